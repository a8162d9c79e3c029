"""SplitZip on a CPU: ranges of tiles on several threads, straight from pages into a payload and back."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvrail.codec.base import CodecError, EncodingStats, PagedBlock, Payload
from kvrail.codec.splitzip import buffers
from kvrail.codec.splitzip.cpu_geometry import geometry_of
from kvrail.codec.splitzip.cpu_kernels import decode_tiles, encode_tiles
from kvrail.codec.splitzip.formats import SEGMENTS
from kvrail.codec.splitzip.payload import (
    HEADER_BYTES,
    Bytes,
    Ints,
    Layout,
    Part,
    pad,
    pad_sections,
    scale_bytes_of,
    stats_of,
    tile_escapes,
    travels_raw,
    write_groups,
)
from kvrail.codec.splitzip.plan import TensorPlan, aligned

Result = TypeVar("Result")

_MAX_THREADS = min(4, torch.get_num_threads())
_BYTES_PER_THREAD = 1 << 20
"""Raw bytes for which another thread is worth its start, some 50 us."""


@dataclass(frozen=True, slots=True)
class CpuEncoding:
    """Payloads, one a stage, that are there already."""

    payloads: list[memoryview]
    totals: EncodingStats

    def stages(self) -> list[Payload]:
        """The payloads."""
        return list(self.payloads)

    def stats(self) -> EncodingStats:
        """What it came to."""
        return self.totals


@dataclass(frozen=True, slots=True)
class Escapes:
    """Escapes of a range of tiles, in `memory` on loan: records and extensions are slices of it."""

    memory: Bytes
    records: Bytes
    extensions: Bytes


class TileEncoder(Protocol):
    """Fills a tensor's dense sections but for groups."""

    def __call__(self, first: int, last: int, records: npt.NDArray[np.uint16], extensions: Bytes) -> tuple[int, int]:
        """Encode tiles `first` to `last`; how many records and extensions they have, or less than 0 if too many."""


class TileDecoder(Protocol):
    """Writes a tensor's values into its pages."""

    def __call__(self, first: int, last: int, records: Bytes, extensions: Bytes) -> None:
        """Decode tiles `first` to `last`, whose records and extensions begin with these."""


def encode(
    pages: PagedBlock, plans: Sequence[TensorPlan], tops: Sequence[Ints | None], codebook_id: int
) -> CpuEncoding:
    """Encode keys and values by their plans.

    tops: of keys and of values, int64 [layers], or None where channels have their own. Raises CodecError where a
    pool's tensor is not contiguous.
    """

    def encoder(pool: Bytes, page_ids: Ints, parts: Sequence[Part], dense: Bytes) -> TileEncoder:
        plan = plans[len(parts)]
        geometry, window_tops = geometry_of(plan), _as_bytes(plan, tops[len(parts)])

        def encode_range(first: int, last: int, records: npt.NDArray[np.uint16], extensions: Bytes) -> tuple[int, int]:
            found: tuple[int, int] = encode_tiles(
                pool, page_ids, first, last, geometry, window_tops, dense, records, extensions
            )
            return found

        return encode_range

    body, parts = encode_body(pages, plans, encoder)
    layout = Layout(parts[0], parts[1], scale_bytes_of(pages.spec), codebook_id)
    body[:HEADER_BYTES] = np.frombuffer(layout.header(), dtype=np.uint8)
    return CpuEncoding([body.data[: layout.size]], stats_of(parts))


def encode_body(
    pages: PagedBlock,
    plans: Sequence[TensorPlan],
    encoder: Callable[[Bytes, Ints, Sequence[Part], Bytes], TileEncoder],
) -> tuple[Bytes, list[Part]]:
    """A payload but for its header, in memory on loan, and what it came to.

    encoder: of a tensor, given its pool, the page ids, the parts of the tensors before it and where its dense part
    goes. Raises CodecError where a pool's tensor is not contiguous.
    """
    pools, page_ids = byte_pools(pages), np.array(pages.page_ids, dtype=np.int64)
    scale_bytes = scale_bytes_of(pages.spec)
    memory = buffers.take(HEADER_BYTES + sum(aligned(plan.raw_bytes) for plan in plans) + aligned(scale_bytes))
    parts: list[Part] = []
    escapes, offset = [], HEADER_BYTES
    for pool, plan in zip(pools, plans, strict=False):  # the pools of scales come after
        dense = memory[offset:]
        coded = plan.fits and not travels_raw(plan, 0, 0)
        found = encode_on_threads(plan, dense, encoder(pool, page_ids, parts, dense)) if coded else None
        if found is None:
            pad(dense, gather(pool, page_ids, dense, 0))
        records = sum(each.records.size // 2 for each in found or ())
        extensions = sum(each.extensions.size for each in found or ())
        parts.append(Part(plan, found is None, records, extensions))
        escapes.append(found or [])
        offset += parts[-1].dense_bytes
    for pool in pools[2:]:
        offset = gather(pool, page_ids, memory, offset)
    offset = pad(memory, offset)
    for found in escapes:
        offset = pad(memory, append(memory, offset, [each.records for each in found]))
        offset = pad(memory, append(memory, offset, [each.extensions for each in found]))
    return memory, parts


def decode(payload: Bytes, layout: Layout, tops: Sequence[Ints | None], out: PagedBlock) -> None:
    """Write a payload into `out`; layout: what payload.parse says of it, tops: as of `encode`.

    Raises CodecError, with `out` untouched, where a pool's tensor is not contiguous.
    """

    def decoder(pool: Bytes, page_ids: Ints, number: int, dense: Bytes) -> TileDecoder:
        plan = layout.parts[number].plan
        geometry, window_tops = geometry_of(plan), _as_bytes(plan, tops[number])

        def decode_range(first: int, last: int, records: Bytes, extensions: Bytes) -> None:
            decode_tiles(pool, page_ids, first, last, geometry, window_tops, dense, records, extensions)

        return decode_range

    decode_body(payload, layout, out, decoder)


def decode_body(
    payload: Bytes, layout: Layout, out: PagedBlock, decoder: Callable[[Bytes, Ints, int, Bytes], TileDecoder]
) -> None:
    """Write what follows a payload's header into `out`.

    decoder: of a tensor, given its pool, the page ids, whether it is the keys (0) or the values (1), and its dense
    part. Raises CodecError, with `out` untouched, where a pool's tensor is not contiguous.
    """
    pools, page_ids = byte_pools(out), np.array(out.page_ids, dtype=np.int64)
    for number, (part, start) in enumerate(zip(layout.parts, layout.dense_offsets, strict=True)):
        if part.raw:
            scatter(pools[number], page_ids, payload[start : start + part.plan.raw_bytes])
        else:
            dense = payload[start:]
            left = payload[layout.escape_offsets[number] :]
            decode_on_threads(part, dense, left, decoder(pools[number], page_ids, number, dense))
    offset = layout.scale_offset
    for pool in pools[2:]:
        size = layout.scale_bytes // 2
        scatter(pool, page_ids, payload[offset : offset + size])
        offset += size


def encode_on_threads(plan: TensorPlan, dense: Bytes, encode_range: TileEncoder) -> list[Escapes] | None:
    """Fill the beginning of `dense`, gaps and all; None where the code does not make the tensor smaller."""
    most = (plan.raw_bytes - plan.fixed_bytes) // 2  # records of a tensor that does not travel raw

    def on_range(first: int, last: int) -> Escapes | None:
        tile_values = SEGMENTS * plan.segment_values
        size = min(most, (last - first) * tile_values) + tile_values
        memory = buffers.take(3 * size)
        records, extensions = memory[: 2 * size].view(np.uint16), memory[2 * size : 3 * size]
        counts = encode_range(first, last, records, extensions)
        return None if counts[0] < 0 else Escapes(memory, memory[: 2 * counts[0]], extensions[: counts[1]])

    found = on_threads(on_range, plan)
    escapes = [each for each in found if each is not None]
    records = sum(each.records.size // 2 for each in escapes)
    extensions = sum(each.extensions.size for each in escapes)
    if len(escapes) < len(found) or travels_raw(plan, records, extensions):
        return None
    pad_sections(plan, dense)
    write_groups(dense, plan)
    return escapes


def decode_on_threads(part: Part, dense: Bytes, escapes: Bytes, decode_range: TileDecoder) -> None:
    """Write the tiles of one tensor into its pages; escapes: its records and what follows."""
    extensions = escapes[aligned(2 * part.records) :]
    records, wide = tile_escapes(dense, part.plan)

    def on_range(first: int, last: int) -> None:
        decode_range(first, last, escapes[2 * int(records[:first].sum()) :], extensions[int(wide[:first].sum()) :])

    on_threads(on_range, part.plan)


def on_threads(work: Callable[[int, int], Result], plan: TensorPlan) -> list[Result]:
    """Call `work` for ranges of a tensor's tiles, on this thread and on others where the tensor is large."""
    wanted = max(1, min(plan.raw_bytes // _BYTES_PER_THREAD, _MAX_THREADS, plan.tiles))
    ends = [plan.tiles * (number + 1) // wanted for number in range(wanted)]
    others = [_threads().submit(work, first, last) for first, last in pairwise(ends)]
    return [work(0, ends[0]), *(other.result() for other in others)]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """The helpers of all threads that encode or decode."""
    return ThreadPoolExecutor(max(1, _MAX_THREADS - 1), thread_name_prefix="splitzip")


def _as_bytes(plan: TensorPlan, tops: Ints | None) -> Bytes:
    return np.zeros(plan.num_layers, dtype=np.uint8) if tops is None else tops.astype(np.uint8)


def byte_pools(pages: PagedBlock) -> list[Bytes]:
    """The pool's tensors, cut to the layers chosen, as [layers, pool pages, bytes of a page]; views."""
    pools = pages.layer_pools()
    for pool in pools:
        if not pool.is_contiguous():
            raise CodecError(f"a pool's tensor of shape {tuple(pool.shape)} is not contiguous; make it so first")
    return [pool.flatten(2).view(torch.uint8).numpy() for pool in pools]


def gather(pool: Bytes, page_ids: Ints, target: Bytes, offset: int) -> int:
    """Copy pages to `offset` of `target`; the end of what was written."""
    shape = (pool.shape[0], page_ids.size, pool.shape[2])
    end = offset + int(np.prod(shape))
    np.take(pool, page_ids, axis=1, out=target[offset:end].reshape(shape), mode="clip")  # raise would copy twice
    return end


def scatter(pool: Bytes, page_ids: Ints, source: Bytes) -> None:
    """Write contiguous pages to their places."""
    pool[:, page_ids] = source.reshape(pool.shape[0], page_ids.size, pool.shape[2])


def append(target: Bytes, offset: int, pieces: list[Bytes]) -> int:
    """Write pieces one after the other from `offset` on; the end of what was written."""
    for piece in pieces:
        target[offset : offset + piece.size] = piece
        offset += piece.size
    return offset
