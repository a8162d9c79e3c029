"""`splitzip-ans` on CUDA: pages, planes, blocks and payload stay on the device; the host learns sizes. The host's part.

Encoding waits twice: for the numbers of escapes, by which the inner payload is complete, and for the sizes of the coded
blocks. Decoding waits once, for the word whether all that was decoded is sound, and looks at a payload's first bytes.
"""

from dataclasses import replace

import numpy as np
import torch

from kvrail.codec.base import BlockSpec, CodecError, EncodingStats, PagedBlock, Payload
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.gpu import byte_pools
from kvrail.codec.core.host import host_bytes, host_memory, to_device
from kvrail.codec.core.sections import aligned
from kvrail.codec.core.streams import record
from kvrail.codec.splitzip.entropy.format import num_blocks
from kvrail.codec.splitzip.entropy.gpu_launch import (
    CodedPieces,
    launch_check,
    launch_code,
    launch_decode_pieces,
    launch_place,
)
from kvrail.codec.splitzip.entropy.payload import BODY, LENGTHS, coded_bytes, head_bytes, pieces_of, places_of
from kvrail.codec.splitzip.one_stage.gpu_launch import launch_decode, launch_encode
from kvrail.codec.splitzip.one_stage.payload import Layout, parse_header
from kvrail.codec.splitzip.tiles.format import WindowCode
from kvrail.codec.splitzip.tiles.gpu_launch import EncodeBuffers, Plans, Slots, make_table, tiles_of
from kvrail.codec.splitzip.tiles.payload import HEADER_BYTES, Part, scale_bytes_of, stats_of, travels_raw
from kvrail.codec.splitzip.tiles.plan import plans_of

CODED = (1, 3, 4)
"""Pieces that are worth a try; the others are significands."""


class AnsEncoding:
    """An encoding under way on the stream that was current when it began."""

    def __init__(self, pages: PagedBlock, code: WindowCode, on_device: bool) -> None:
        """Launch the inner encoding. Raises CodecError where the rows of a page are not contiguous."""
        device = pages.device
        self._pages, self._on_device = pages, on_device
        self._plans = plans = plans_of(pages.spec, code)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._table = make_table(pages, (None, None))
        self._inner, self._buffers = _inner_memory(pages.spec, plans, device)
        launch_encode(pages, plans, self._table, self._buffers)
        self._totals = torch.empty((2, 2), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._totals.copy_(self._buffers.totals, non_blocking=True)
        self._event = record(device)
        self._parts: list[Part] = []
        self._payload: torch.Tensor | None = None

    def stages(self) -> list[Payload]:
        """Wait for the inner encoding, code its payload and wait for that."""
        if self._payload is None:
            with torch.cuda.stream(self._stream):
                self._wait()
                self._payload = self._finish()
            del self._inner, self._buffers
        return [self._payload if self._on_device else self._payload.numpy().data]

    def stats(self) -> EncodingStats:
        """What it came to; after `stages`."""
        return stats_of(self._parts)

    def _wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def _finish(self) -> torch.Tensor:
        for plan, (records, extensions) in zip(self._plans, self._totals.tolist(), strict=True):
            raw = not tiles_of(plan) or travels_raw(plan, records, extensions)
            self._parts.append(Part(plan, True, 0, 0) if raw else Part(plan, False, records, extensions))
        layout = Layout(self._parts[0], self._parts[1], scale_bytes_of(self._pages.spec), 0)
        inner = self._complete(layout)
        places = pieces_of(layout)
        tried = [number for number in CODED if places[number].stop > places[number].start]
        if not tried:
            return self._assemble(layout, inner, None, {})
        coded = launch_code(inner, [places[number] for number in tried])
        ends = host_memory(coded.ends.nbytes, inner.device).view(torch.int64)
        ends.copy_(coded.ends, non_blocking=True)
        self._event = record(inner.device)
        self._wait()
        sizes, before, blocks = {}, 0, 0
        for number in tried:
            size = places[number].stop - places[number].start
            blocks += num_blocks(size)
            end = int(ends[blocks - 1])
            sizes[number] = min(size, coded_bytes(size, end - before))
            before = end
        return self._assemble(layout, inner, coded, sizes)

    def _complete(self, layout: Layout) -> torch.Tensor:
        """The inner payload but for its header, where it was made unless a tensor travels raw."""
        inner = self._inner
        if layout.keys.raw or layout.values.raw:
            inner = torch.empty(layout.size, dtype=torch.uint8, device=inner.device)
            index, pools = self._table[: len(self._pages.page_ids)], byte_pools(self._pages)
            dense = self._buffers.dense(self._plans)
            for part, pool, made, at in zip(layout.parts, pools, dense, layout.dense_offsets, strict=False):
                source = pool.index_select(1, index).flatten() if part.raw else made
                inner[at : at + source.numel()] = source
            scales = self._buffers.scales(self._plans)
            inner[layout.scale_offset : layout.scale_offset + scales.numel()] = scales
        for part, slots, at in zip(layout.parts, self._buffers.slots, layout.escape_offsets, strict=True):
            beyond = at + aligned(2 * part.records)
            inner[at : at + 2 * part.records] = slots.packed_records[: part.records].view(torch.uint8)
            inner[beyond : beyond + part.extensions] = slots.packed_extensions[: part.extensions]
        for end in layout.section_ends:
            if end < aligned(end):
                inner[end : aligned(end)] = 0
        return inner

    def _assemble(
        self, layout: Layout, inner: torch.Tensor, coded: CodedPieces | None, sizes: dict[int, int]
    ) -> torch.Tensor:
        """The payload, complete. sizes: of pieces that were coded, as they shall travel."""
        places = pieces_of(layout)
        lengths = [sizes.get(number, place.stop - place.start) for number, place in enumerate(places)]
        head = replace(layout, entropy_coded=True).header() + LENGTHS.pack(*lengths)
        payload = torch.empty(BODY + sum(lengths), dtype=torch.uint8, device=inner.device)
        payload[:BODY] = to_device(np.frombuffer(head, dtype=np.uint8), inner.device)
        offsets, at = [], BODY
        for number, (place, length) in enumerate(zip(places, lengths, strict=True)):
            smaller = length < place.stop - place.start
            if number in sizes:
                offsets.append(at if smaller else -1)
            if not smaller:
                payload[at : at + length] = inner[place]
            at += length
        if coded is not None:
            launch_place(coded, offsets, payload)
        if not self._on_device:
            host = host_memory(payload.numel(), payload.device)
            payload = host.copy_(payload, non_blocking=True)
        self._event = record(inner.device)
        self._wait()
        return payload


def _inner_memory(spec: BlockSpec, plans: Plans, device: torch.device) -> tuple[torch.Tensor, EncodeBuffers]:
    """Memory for an inner payload, uint8, whatever its escapes; and the inner encoding's, of which it is a part."""
    scale_bytes = scale_bytes_of(spec)
    size = HEADER_BYTES + sum(aligned(plan.raw_bytes) for plan in plans) + aligned(scale_bytes)
    inner = torch.empty(size, dtype=torch.uint8, device=device)
    dense = sum(plan.fixed_bytes if tiles_of(plan) else 0 for plan in plans)
    slots = Slots.allocate(plans[0], device), Slots.allocate(plans[1], device)
    totals = torch.empty((2, 2), dtype=torch.int64, device=device)
    return inner, EncodeBuffers(inner[HEADER_BYTES : HEADER_BYTES + dense + scale_bytes], slots, totals)


def decode(payload: Payload, code: WindowCode, out: PagedBlock) -> None:
    """Restore the inner of a payload in host memory, or on the device of `out`, then decode it into `out`.

    Raises CodecError, with `out` untouched, where the payload is not one of this code and spec, or the rows of a page
    are not contiguous.
    """
    byte_pools(out)
    source, head = _on_device(payload, out.device)
    layout = parse_header(head, out.spec, code, 0, entropy_coded=True)
    places = pieces_of(layout)
    sources = places_of(head, source.numel(), places)
    inner = torch.empty(layout.size, dtype=torch.uint8, device=out.device)
    wrong = torch.zeros(1, dtype=torch.int32, device=out.device)
    smaller = []
    for came, place in zip(sources, places, strict=True):
        if came.stop - came.start < place.stop - place.start:
            _check_length(came, place)
            smaller.append((came, place))
        else:
            inner[place] = source[came]
    if smaller:
        launch_decode_pieces(source, [came for came, _ in smaller], inner, [place for _, place in smaller], wrong)
    launch_check(inner, layout, code, wrong)
    if wrong.item():
        raise CodecError("a coded piece of a payload is corrupt, or counts and records in it don't fit each other")
    launch_decode(inner, layout, make_table(out, (None, None)), out)


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
