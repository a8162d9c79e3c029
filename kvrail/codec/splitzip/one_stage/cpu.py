"""SplitZip on a CPU: straight from pages into a payload and back, one pass over the pages each way."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrail.codec.base import PagedBlock
from kvrail.codec.core import buffers
from kvrail.codec.core.arrays import Bytes, Ints
from kvrail.codec.core.cpu import CpuEncoding, byte_pools, gather, on_threads, scatter
from kvrail.codec.core.sections import HEADER_BYTES, aligned
from kvrail.codec.splitzip.one_stage.cpu_geometry import geometry_of
from kvrail.codec.splitzip.one_stage.cpu_kernels import decode_tiles, encode_tiles
from kvrail.codec.splitzip.one_stage.plan import Coding
from kvrail.codec.splitzip.tiles.format import SEGMENTS
from kvrail.codec.splitzip.tiles.payload import (
    Layout,
    Part,
    scale_bytes_of,
    stats_of,
    tile_escapes,
    travels_raw,
    write_groups,
)
from kvrail.codec.splitzip.tiles.plan import TensorPlan


@dataclass(frozen=True, slots=True)
class _Escapes:
    """Escapes of a range of tiles, in `memory` on loan: records and extensions are slices of it."""

    memory: Bytes
    records: Bytes
    extensions: Bytes


def encode(pages: PagedBlock, coding: Coding) -> CpuEncoding:
    """Encode keys and values. Raises CodecError where a pool's tensor is not contiguous."""
    plans = coding.plans
    pools, page_ids = byte_pools(pages), np.array(pages.page_ids, dtype=np.int64)
    scale_bytes = scale_bytes_of(pages.spec)
    memory = buffers.take(HEADER_BYTES + sum(aligned(plan.raw_bytes) for plan in plans) + aligned(scale_bytes))
    parts: list[Part] = []
    escapes: list[list[_Escapes]] = []
    offset = HEADER_BYTES
    for pool, plan, window_tops in zip(pools, plans, coding.tops, strict=False):  # the pools of scales come after
        dense = memory[offset:]
        coded = plan.fits and not travels_raw(plan, 0, 0)
        found = _encode_tensor(pool, page_ids, plan, window_tops, dense) if coded else None
        if found is None:
            gather(pool, page_ids, dense, 0)
        parts.append(Part(plan, found is None, *_counts(found or [])))
        escapes.append(found or [])
        offset += parts[-1].fixed_bytes
    for pool in pools[2:]:
        offset = gather(pool, page_ids, memory, offset)
    layout = Layout((parts[0], parts[1]), scale_bytes)
    for part, found, start in zip(parts, escapes, layout.streams, strict=True):
        if found:
            records, extensions = part.cut(memory[start:])
            np.concatenate([each.records for each in found], out=records)
            np.concatenate([each.extensions for each in found], out=extensions)
    layout.complete(memory)
    return CpuEncoding([memory.data[: layout.size]], stats_of(parts))


def _counts(escapes: list[_Escapes]) -> tuple[int, int]:
    """How many records and extensions there are."""
    return sum(each.records.size // 2 for each in escapes), sum(each.extensions.size for each in escapes)


def _encode_tensor(
    pool: Bytes, page_ids: Ints, plan: TensorPlan, tops: Ints | None, dense: Bytes
) -> list[_Escapes] | None:
    """Fill the sections at the beginning of `dense`; None where the code does not make the tensor smaller."""
    geometry, window_tops = geometry_of(plan), _as_bytes(plan, tops)
    most = (plan.raw_bytes - plan.fixed_bytes) // 2  # records of a tensor that does not travel raw

    def on_range(first: int, last: int) -> _Escapes | None:
        tile_values = SEGMENTS * plan.segment_values
        size = min(most, (last - first) * tile_values) + tile_values
        memory = buffers.take(3 * size)
        records, extensions = memory[: 2 * size].view(np.uint16), memory[2 * size : 3 * size]
        where = pool, page_ids, first, last, geometry, window_tops
        counts = encode_tiles(*where, dense, records, extensions)
        return None if counts[0] < 0 else _Escapes(memory, memory[: 2 * counts[0]], extensions[: counts[1]])

    found = on_threads(on_range, plan.tiles, plan.raw_bytes)
    escapes = [each for each in found if each is not None]
    if len(escapes) < len(found) or travels_raw(plan, *_counts(escapes)):
        return None
    write_groups(dense, plan)
    return escapes


def decode(stage: int, payloads: Sequence[Bytes], layouts: Sequence[Layout], coding: Coding, out: PagedBlock) -> None:
    """Write the one payload into `out`. Raises CodecError, with `out` untouched, where a pool is not contiguous."""
    (payload,), (layout,) = payloads, layouts
    pools, page_ids = byte_pools(out), np.array(out.page_ids, dtype=np.int64)
    for number, (part, start) in enumerate(zip(layout.parts, layout.offsets, strict=True)):
        if part.raw:
            scatter(pools[number], page_ids, payload[start : start + part.plan.raw_bytes])
        else:
            left = payload[layout.streams[number] :]
            _decode_tensor(payload[start:], left, part, coding.tops[number], pools[number], page_ids)
    offset, size = layout.scale_offset, layout.scale_bytes // 2
    for pool in pools[2:]:
        scatter(pool, page_ids, payload[offset : offset + size])
        offset += size


def _decode_tensor(dense: Bytes, escapes: Bytes, part: Part, tops: Ints | None, pool: Bytes, page_ids: Ints) -> None:
    """Write the tiles of one tensor into its pages; escapes: its records and what follows."""
    geometry, window_tops = geometry_of(part.plan), _as_bytes(part.plan, tops)
    extensions = escapes[aligned(2 * part.records) :]
    records, wide = tile_escapes(dense, part.plan)

    def on_range(first: int, last: int) -> None:
        begins = escapes[2 * int(records[:first].sum()) :], extensions[int(wide[:first].sum()) :]
        decode_tiles(pool, page_ids, first, last, geometry, window_tops, dense, *begins)

    on_threads(on_range, part.plan.tiles, part.plan.raw_bytes)


def _as_bytes(plan: TensorPlan, tops: Ints | None) -> Bytes:
    return np.zeros(plan.num_layers, dtype=np.uint8) if tops is None else tops.astype(np.uint8)
