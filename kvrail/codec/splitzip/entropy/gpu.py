"""`splitzip-ans` on CUDA: pages, planes, blocks and payload stay on the device; the host learns sizes. The host's part.

Encoding waits for the numbers of escapes and the sizes of the coded blocks, which come together unless a tensor travels
raw or escapes are many, and for its end. Decoding looks at a payload's first bytes, and waits for the word whether all
that was decoded is sound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np
import torch

from kvrail.codec.base import BlockSpec, CodecError, EncodingStats, PagedBlock, Payload
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.gpu import byte_pools, record, wait_for
from kvrail.codec.core.host import host_bytes, host_memory, to_device
from kvrail.codec.core.sections import HEADER_BYTES, aligned
from kvrail.codec.splitzip.entropy.format import STATE_WORDS, num_blocks
from kvrail.codec.splitzip.entropy.gpu_launch import (
    CodedPieces,
    launch_check,
    launch_code,
    launch_decode_pieces,
    launch_place,
)
from kvrail.codec.splitzip.entropy.payload import BODY, LENGTHS, coded_bytes, head_bytes, pieces_of, places_of
from kvrail.codec.splitzip.one_stage.gpu_launch import launch_decode, launch_encode
from kvrail.codec.splitzip.tiles.format import WindowCode
from kvrail.codec.splitzip.tiles.gpu_launch import EncodeBuffers, Plans, make_table, parts_of, tiles_of
from kvrail.codec.splitzip.tiles.payload import Layout, Part, parse_header, scale_bytes_of, stats_of
from kvrail.codec.splitzip.tiles.plan import plans_of

CODES, REST = (1, 3), 4
"""Numbers of the pieces that are worth a try: those with codes, and what comes last. The others are significands."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pieces that were coded by one launch of each kernel. ends: CodedPieces.ends on their way to the host."""

    numbers: tuple[int, ...]
    coded: CodedPieces
    ends: torch.Tensor

    @classmethod
    def launch(cls, inner: torch.Tensor, places: dict[int, slice]) -> Self:
        """Launch the coding of pieces of `inner`, by their numbers."""
        coded = launch_code(inner, list(places.values()))
        ends = torch.empty(coded.ends.shape, dtype=torch.int64, pin_memory=inner.is_cuda)
        ends.copy_(coded.ends, non_blocking=True)
        return cls(tuple(places), coded, ends)

    def lengths(self) -> dict[int, int]:
        """Bytes of the pieces as they shall travel: coded or, where that is no smaller, as they are."""
        lengths, before, blocks = {}, 0, 0
        for number, place in zip(self.numbers, self.coded.places, strict=True):
            size = place.stop - place.start
            blocks += num_blocks(size)
            end = int(self.ends[blocks - 1])
            lengths[number] = min(size, coded_bytes(size, end - before))
            before = end
        return lengths


class AnsEncoding:
    """An encoding under way on the stream that was current when it began.

    Codes are coded before it is known whether their tensor will travel raw, which is rare: then they are coded again.
    """

    def __init__(self, pages: PagedBlock, code: WindowCode, on_device: bool) -> None:
        """Launch the inner encoding and the coding of its codes.

        Raises CodecError where the rows of a page are not contiguous.
        """
        device = pages.device
        self._pages, self._on_device = pages, on_device
        self._plans = plans = plans_of(pages.spec, code)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._table = make_table(pages, (None, None))
        self._inner, self._buffers = _inner_memory(pages.spec, plans, device)
        launch_encode(pages, plans, self._table, self._buffers)
        self._totals = torch.empty((2, 2), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._totals.copy_(self._buffers.totals, non_blocking=True)
        codes = _code_places(plans)
        self._batches = [_Batch.launch(self._inner, codes)] if codes else []
        self._event = record(device)
        self._parts: Sequence[Part] = ()
        self._payloads: list[torch.Tensor] = []

    def stages(self) -> list[Payload]:
        """Wait for the work, code what is left and give the payloads: one, or one of each stage."""
        if not self._payloads:
            with torch.cuda.stream(self._stream):
                wait_for(self._event)
                self._payloads = self._finish()
                wait_for(self._event)
            del self._inner, self._buffers, self._batches
        return [payload if self._on_device else payload.numpy().data for payload in self._payloads]

    def stats(self) -> EncodingStats:
        """What it came to; after `stages`."""
        return stats_of(self._parts)

    def _finish(self) -> list[torch.Tensor]:
        """Launch what completes the payloads."""
        self._parts = parts = parts_of(self._plans, self._totals)
        layout = Layout(parts, scale_bytes_of(self._pages.spec))
        places = dict(enumerate(pieces_of(layout)))
        inner, left = self._inner, {REST}
        if any(part.raw for part in layout.parts):
            inner, left, self._batches = self._moved(layout), {*CODES, REST}, []
        self._append_escapes(inner, layout)
        tried = {number: places[number] for number in sorted(left) if _may_shrink(places[number])}
        if tried:
            self._batches.append(_Batch.launch(inner, tried))
            self._event = record(inner.device)
            wait_for(self._event)
        payloads = self._assemble(layout, inner)
        if not self._on_device:
            payloads = [host_memory(each.numel(), each.device).copy_(each, non_blocking=True) for each in payloads]
        self._event = record(inner.device)
        return payloads

    def _moved(self, layout: Layout) -> torch.Tensor:
        """The inner payload up to its escapes, made again where a tensor travels raw: what follows it moves."""
        inner = torch.zeros(layout.size, dtype=torch.uint8, device=self._inner.device)
        index, pools = self._table[: len(self._pages.page_ids)], byte_pools(self._pages)
        dense = self._buffers.dense(self._plans)
        for part, pool, made, at in zip(layout.parts, pools, dense, layout.offsets, strict=False):
            source = pool.index_select(1, index).flatten() if part.raw else made
            inner[at : at + source.numel()] = source
        scales = self._buffers.scales(self._plans)
        inner[layout.scale_offset : layout.scale_offset + scales.numel()] = scales
        return inner

    def _append_escapes(self, inner: torch.Tensor, layout: Layout) -> None:
        """Bring records and extensions behind the scales, where zeros are."""
        for part, slots, at in zip(layout.parts, self._buffers.slots, layout.streams, strict=True):
            beyond = at + aligned(2 * part.records)
            inner[at : at + 2 * part.records] = slots.packed_records[: part.records].view(torch.uint8)
            inner[beyond : beyond + part.extensions] = slots.packed_extensions[: part.extensions]

    def _assemble(self, layout: Layout, inner: torch.Tensor) -> list[torch.Tensor]:
        """Launch what brings header and pieces together; the payloads, on the device."""
        return [self._joined(layout.header(), [inner[place] for place in pieces_of(layout)])]

    def _joined(self, header: bytes, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Launch what brings a header, the pieces that were coded, and all others as they are into a payload."""
        coded = {number: length for batch in self._batches for number, length in batch.lengths().items()}
        lengths = [coded.get(number, piece.numel()) for number, piece in enumerate(pieces)]
        head = np.frombuffer(header + LENGTHS.pack(*lengths), dtype=np.uint8)
        payload = torch.empty(BODY + sum(lengths), dtype=torch.uint8, device=self._inner.device)
        payload[:BODY] = to_device(head, payload.device)
        offsets = list(accumulate(lengths, initial=BODY))
        for number, (piece, length) in enumerate(zip(pieces, lengths, strict=True)):
            if length == piece.numel():
                payload[offsets[number] : offsets[number] + length] = piece
                offsets[number] = -1
        for batch in self._batches:
            launch_place(batch.coded, [offsets[number] for number in batch.numbers], payload)
        return payload


def _inner_memory(spec: BlockSpec, plans: Plans, device: torch.device) -> tuple[torch.Tensor, EncodeBuffers]:
    """Memory for an inner payload, uint8, whatever its escapes; and the inner encoding's memory, a part of it.

    Zeros, for they stand between its sections: to write them there would take a launch for each.
    """
    scale_bytes = scale_bytes_of(spec)
    size = HEADER_BYTES + sum(aligned(plan.raw_bytes) for plan in plans) + aligned(scale_bytes)
    inner = torch.zeros(size, dtype=torch.uint8, device=device)
    return inner, EncodeBuffers.allocate(plans, scale_bytes, device, inner[HEADER_BYTES:])


def _code_places(plans: Plans) -> dict[int, slice]:
    """The pieces with codes, where no tensor turns out to travel raw; none where one does whatever it holds."""
    if not all(tiles_of(plan) for plan in plans):
        return {}
    places = pieces_of(Layout((Part(plans[0], False, 0, 0), Part(plans[1], False, 0, 0))))
    return {number: places[number] for number in CODES if _may_shrink(places[number])}


def _may_shrink(place: slice) -> bool:
    """Whether the coded form of a piece can be smaller than the piece, whatever that holds."""
    size: int = place.stop - place.start
    return coded_bytes(size, STATE_WORDS * num_blocks(size)) < size


def decode(payload: Payload, code: WindowCode, out: PagedBlock) -> None:
    """Restore the inner of a payload in host memory, or on the device of `out`, then decode it into `out`.

    Raises CodecError, with `out` untouched, where the payload is not one of this code and spec, or the rows of a page
    are not contiguous.
    """
    byte_pools(out)
    source, head = _on_device(payload, out.device)
    layout = parse_header(head, out.spec, plans_of(out.spec, code))
    places = pieces_of(layout)
    came = places_of(head, source.numel(), places)
    inner = torch.empty(layout.size, dtype=torch.uint8, device=out.device)
    wrong = restore_pieces(source, came, inner, places)
    decode_inner(inner, layout, wrong, out)


def restore_pieces(
    source: torch.Tensor, came: Sequence[slice], target: torch.Tensor, places: Sequence[slice]
) -> torch.Tensor:
    """Fill `places` of `target` from the pieces that came, coded where they are shorter; source, target: uint8.

    Gives int32 [1], which is 1 when all is done where a coded piece is corrupt. Raises CodecError where one cannot be.
    """
    wrong = torch.zeros(1, dtype=torch.int32, device=target.device)
    smaller = []
    for piece, place in zip(came, places, strict=True):
        if piece.stop - piece.start < place.stop - place.start:
            _check_length(piece, place)
            smaller.append((piece, place))
        else:
            target[place] = source[piece]
    if smaller:
        launch_decode_pieces(source, [piece for piece, _ in smaller], target, [place for _, place in smaller], wrong)
    return wrong


def decode_inner(inner: torch.Tensor, layout: Layout, wrong: torch.Tensor, out: PagedBlock) -> None:
    """Decode the payload in one stage, uint8 on the device, once the device has found it sound, into `out`.

    wrong: int32 [1], 1 where what it was made from is not. Raises CodecError, with `out` untouched, where it is not.
    """
    launch_check(inner, layout, layout.parts[0].plan.code, wrong)
    table = make_table(out, (None, None))
    if wrong.item():
        raise CodecError("a coded piece of a payload is corrupt, or counts and records in it don't fit each other")
    launch_decode(inner, layout, table, out)


def _check_length(came: slice, place: slice) -> None:
    """Raise CodecError where a coded piece has no room for its head, or doesn't begin and end as such pieces do."""
    length, head = came.stop - came.start, head_bytes(place.stop - place.start)
    if length < head:
        raise CodecError(f"a coded piece of a payload has {length} bytes; its head alone has {head}")
    if came.start % 8 or length % 8:
        raise CodecError(f"a coded piece of a payload has {length} bytes from {came.start} on, which are not eights")


def _on_device(payload: Payload, device: torch.device) -> tuple[torch.Tensor, Bytes]:
    """A payload, uint8 [n], on the device from an address on that its words can have; and its first bytes."""
    if not isinstance(payload, torch.Tensor):
        source = host_bytes("splitzip-ans", payload)
        return to_device(source, device), source[:BODY]
    if payload.device != device or payload.dtype != torch.uint8 or not payload.is_contiguous():
        raise CodecError(
            f"a payload of splitzip-ans is a tensor of {payload.dtype} on {payload.device}; pages on {device} take"
            " contiguous bytes in host memory or on the same device"
        )
    payload = payload.flatten()
    return payload if payload.data_ptr() % 8 == 0 else payload.clone(), payload[:BODY].cpu().numpy()
