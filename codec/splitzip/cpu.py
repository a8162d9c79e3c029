"""SplitZip on a CPU: ranges of tiles on several threads, straight from pages into a payload and back."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch

from codec.base import CodecError, EncodingStats, PagedBlock
from codec.splitzip import buffers
from codec.splitzip.cpu_geometry import geometry_of
from codec.splitzip.cpu_kernels import decode_tiles, encode_tiles
from codec.splitzip.formats import SEGMENTS
from codec.splitzip.payload import (
    HEADER_BYTES,
    Bytes,
    Ints,
    Part,
    Payload,
    scale_bytes_of,
    tile_escapes,
    travels_raw,
    write_groups,
)
from codec.splitzip.plan import TensorPlan, aligned

Result = TypeVar("Result")

_MAX_THREADS = 4
_BYTES_PER_THREAD = 1 << 20
"""Raw bytes for which another thread is worth its start, some 50 us."""


@dataclass(frozen=True, slots=True)
class CpuEncoding:
    """A payload that is there already."""

    payload: memoryview
    totals: EncodingStats

    def stages(self) -> list[memoryview]:
        """The one payload."""
        return [self.payload]

    def stats(self) -> EncodingStats:
        """What it came to."""
        return self.totals


@dataclass(frozen=True, slots=True)
class _Escapes:
    """Escapes of a range of tiles, in `memory` on loan: records and extensions are slices of it."""

    memory: Bytes
    records: Bytes
    extensions: Bytes


def encode(
    pages: PagedBlock, plans: Sequence[TensorPlan], tops: Sequence[Ints | None], codebook_id: int
) -> CpuEncoding:
    """Encode keys and values by their plans.

    tops: of keys and of values, int64 [layers], or None where channels have their own. Raises CodecError where a
    pool's tensor is not contiguous.
    """
    pools, page_ids = _byte_pools(pages), np.array(pages.page_ids, dtype=np.int64)
    scale_bytes = scale_bytes_of(pages.spec)
    memory = buffers.take(HEADER_BYTES + sum(aligned(plan.raw_bytes) for plan in plans) + aligned(scale_bytes))
    parts, escapes, offset = [], [], HEADER_BYTES
    for pool, plan, top in zip(pools, plans, tops, strict=False):  # the pools of scales come after
        found = _encode_tensor(pool, page_ids, plan, top, memory[offset:])
        records = sum(each.records.size // 2 for each in found or ())
        extensions = sum(each.extensions.size for each in found or ())
        parts.append(Part(plan, found is None, records, extensions))
        escapes.append(found or [])
        offset += parts[-1].dense_bytes
    layout = Payload(parts[0], parts[1], scale_bytes, codebook_id)
    memory[:HEADER_BYTES] = np.frombuffer(layout.header(), dtype=np.uint8)
    for pool in pools[2:]:
        offset = _gather(pool, page_ids, memory, offset)
    offset = _pad(memory, offset)
    for found in escapes:
        offset = _pad(memory, _append(memory, offset, [each.records for each in found]))
        offset = _pad(memory, _append(memory, offset, [each.extensions for each in found]))
    totals = EncodingStats(
        sum(plan.values for plan in plans), sum(part.records for part in parts), sum(part.raw for part in parts)
    )
    return CpuEncoding(memory.data[: layout.size], totals)


def decode(payload: Bytes, layout: Payload, tops: Sequence[Ints | None], out: PagedBlock) -> None:
    """Write a payload into `out`; layout: what payload.parse says of it, tops: as of `encode`.

    Raises CodecError, with `out` untouched, where a pool's tensor is not contiguous.
    """
    pools, page_ids = _byte_pools(out), np.array(out.page_ids, dtype=np.int64)
    for pool, top, part, dense, escapes in zip(
        pools, tops, layout.parts, layout.dense_offsets, layout.escape_offsets, strict=False
    ):
        if part.raw:
            _scatter(pool, page_ids, payload[dense : dense + part.plan.raw_bytes])
        else:
            _decode_tensor(pool, page_ids, part, top, payload[dense:], payload[escapes:])
    offset = layout.scale_offset
    for pool in pools[2:]:
        size = layout.scale_bytes // 2
        _scatter(pool, page_ids, payload[offset : offset + size])
        offset += size


def _encode_tensor(
    pool: Bytes, page_ids: Ints, plan: TensorPlan, tops: Ints | None, dense: Bytes
) -> list[_Escapes] | None:
    """Fill the beginning of `dense`, gaps and all; the escapes, or None where the tensor travels raw."""
    found = None if not plan.fits or travels_raw(plan, 0, 0) else _encode_tiles(pool, page_ids, plan, tops, dense)
    if found is None:
        _pad(dense, _gather(pool, page_ids, dense, 0))
        return None
    for part in plan.sections.values():
        _pad(dense, part.end)
    write_groups(dense, plan)
    return found


def _encode_tiles(
    pool: Bytes, page_ids: Ints, plan: TensorPlan, tops: Ints | None, dense: Bytes
) -> list[_Escapes] | None:
    """Fill the dense sections but for groups; None where the code does not make the tensor smaller."""
    geometry = geometry_of(plan)
    window_tops = _as_bytes(plan, tops)
    most = (plan.raw_bytes - plan.fixed_bytes) // 2  # records of a tensor that does not travel raw

    def encode_range(first: int, last: int) -> _Escapes | None:
        tile_values = SEGMENTS * plan.segment_values
        size = min(most, (last - first) * tile_values) + tile_values
        memory = buffers.take(3 * size)
        records, extensions = memory[: 2 * size].view(np.uint16), memory[2 * size : 3 * size]
        counts = encode_tiles(pool, page_ids, first, last, geometry, window_tops, dense, records, extensions)
        if counts[0] < 0:
            return None
        return _Escapes(memory, memory[: 2 * counts[0]], extensions[: counts[1]])

    found = _on_threads(encode_range, plan)
    escapes = [each for each in found if each is not None]
    records = sum(each.records.size // 2 for each in escapes)
    extensions = sum(each.extensions.size for each in escapes)
    return None if len(escapes) < len(found) or travels_raw(plan, records, extensions) else escapes


def _decode_tensor(pool: Bytes, page_ids: Ints, part: Part, tops: Ints | None, dense: Bytes, escapes: Bytes) -> None:
    """Write the tiles of one tensor into its pages."""
    geometry = geometry_of(part.plan)
    window_tops = _as_bytes(part.plan, tops)
    extensions = escapes[aligned(2 * part.records) :]
    records, wide = tile_escapes(dense, part.plan)

    def decode_range(first: int, last: int) -> None:
        left = (escapes[2 * int(records[:first].sum()) :], extensions[int(wide[:first].sum()) :])
        decode_tiles(pool, page_ids, first, last, geometry, window_tops, dense, *left)

    _on_threads(decode_range, part.plan)


def _on_threads(work: Callable[[int, int], Result], plan: TensorPlan) -> list[Result]:
    """Call `work` for ranges of a tensor's tiles, on this thread and on others where the tensor is large."""
    wanted = max(1, min(plan.raw_bytes // _BYTES_PER_THREAD, _MAX_THREADS, torch.get_num_threads(), plan.tiles))
    ends = [plan.tiles * (number + 1) // wanted for number in range(wanted)]
    others = [_threads().submit(work, first, last) for first, last in pairwise(ends)]
    return [work(0, ends[0]), *(other.result() for other in others)]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """The helpers of all threads that encode or decode."""
    return ThreadPoolExecutor(_MAX_THREADS - 1, thread_name_prefix="splitzip")


def _as_bytes(plan: TensorPlan, tops: Ints | None) -> Bytes:
    return np.zeros(plan.num_layers, dtype=np.uint8) if tops is None else tops.astype(np.uint8)


def _byte_pools(pages: PagedBlock) -> list[Bytes]:
    """The pool's tensors, cut to the layers chosen, as [layers, pool pages, bytes of a page]; views."""
    pools = pages.layer_pools()
    for pool in pools:
        if not pool.is_contiguous():
            raise CodecError(f"a pool's tensor of shape {tuple(pool.shape)} is not contiguous; make it so first")
    return [pool.flatten(2).view(torch.uint8).numpy() for pool in pools]


def _gather(pool: Bytes, page_ids: Ints, target: Bytes, offset: int) -> int:
    """Copy pages to `offset` of `target`; the end of what was written."""
    shape = (pool.shape[0], page_ids.size, pool.shape[2])
    end = offset + int(np.prod(shape))
    np.take(pool, page_ids, axis=1, out=target[offset:end].reshape(shape), mode="clip")  # raise would copy twice
    return end


def _scatter(pool: Bytes, page_ids: Ints, source: Bytes) -> None:
    """Write contiguous pages to their places."""
    pool[:, page_ids] = source.reshape(pool.shape[0], page_ids.size, pool.shape[2])


def _append(target: Bytes, offset: int, pieces: list[Bytes]) -> int:
    """Write pieces one after the other from `offset` on; the end of what was written."""
    for piece in pieces:
        target[offset : offset + piece.size] = piece
        offset += piece.size
    return offset


def _pad(target: Bytes, end: int) -> int:
    """Zeros from `end` to the next section; where that begins."""
    target[end : aligned(end)] = 0
    return aligned(end)
