"""SplitZip on a CPU: straight from pages into a payload and back, one pass over the pages each way."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvrail.codec.base import PagedBlock
from kvrail.codec.core import buffers
from kvrail.codec.core.arrays import Bytes, Ints
from kvrail.codec.core.cpu import CpuEncoding, append, byte_pools, gather, scatter
from kvrail.codec.core.sections import HEADER_BYTES, aligned, pad
from kvrail.codec.splitzip.one_stage.cpu_geometry import geometry_of
from kvrail.codec.splitzip.one_stage.cpu_kernels import decode_tiles, encode_tiles
from kvrail.codec.splitzip.one_stage.plan import Coding
from kvrail.codec.splitzip.tiles.cpu import Escapes, decode_on_threads, encode_on_threads
from kvrail.codec.splitzip.tiles.payload import Layout, Part, scale_bytes_of, stats_of, travels_raw
from kvrail.codec.splitzip.tiles.plan import TensorPlan


def encode(pages: PagedBlock, coding: Coding) -> CpuEncoding:
    """Encode keys and values. Raises CodecError where a pool's tensor is not contiguous."""
    plans = coding.plans
    pools, page_ids = byte_pools(pages), np.array(pages.page_ids, dtype=np.int64)
    scale_bytes = scale_bytes_of(pages.spec)
    memory = buffers.take(HEADER_BYTES + sum(aligned(plan.raw_bytes) for plan in plans) + aligned(scale_bytes))
    parts: list[Part] = []
    escapes: list[list[Escapes]] = []
    offset = HEADER_BYTES
    for pool, plan, window_tops in zip(pools, plans, coding.tops, strict=False):  # the pools of scales come after
        dense = memory[offset:]
        coded = plan.fits and not travels_raw(plan, 0, 0)
        found = _encode_tensor(pool, page_ids, plan, window_tops, dense) if coded else None
        if found is None:
            pad(dense, gather(pool, page_ids, dense, 0))
        records = sum(each.records.size // 2 for each in found or ())
        extensions = sum(each.extensions.size for each in found or ())
        parts.append(Part(plan, found is None, records, extensions))
        escapes.append(found or [])
        offset += parts[-1].fixed_bytes
    for pool in pools[2:]:
        offset = gather(pool, page_ids, memory, offset)
    offset = pad(memory, offset)
    for found in escapes:
        offset = pad(memory, append(memory, offset, [each.records for each in found]))
        offset = pad(memory, append(memory, offset, [each.extensions for each in found]))
    layout = Layout((parts[0], parts[1]), scale_bytes)
    memory[:HEADER_BYTES] = np.frombuffer(layout.header(), dtype=np.uint8)
    return CpuEncoding([memory.data[: layout.size]], stats_of(parts))


def _encode_tensor(
    pool: Bytes, page_ids: Ints, plan: TensorPlan, tops: Ints | None, dense: Bytes
) -> list[Escapes] | None:
    """Fill the beginning of `dense`, gaps and all; None where the code does not make the tensor smaller."""
    geometry, window_tops = geometry_of(plan), _as_bytes(plan, tops)

    def encode_range(first: int, last: int, records: npt.NDArray[np.uint16], extensions: Bytes) -> tuple[int, int]:
        where = pool, page_ids, first, last, geometry, window_tops
        found: tuple[int, int] = encode_tiles(*where, dense, records, extensions)
        return found

    return encode_on_threads(plan, dense, encode_range)


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
    geometry, window_tops = geometry_of(part.plan), _as_bytes(part.plan, tops)

    def decode_range(first: int, last: int, records: Bytes, extensions: Bytes) -> None:
        decode_tiles(pool, page_ids, first, last, geometry, window_tops, dense, records, extensions)

    decode_on_threads(part, dense, escapes, decode_range)


def _as_bytes(plan: TensorPlan, tops: Ints | None) -> Bytes:
    return np.zeros(plan.num_layers, dtype=np.uint8) if tops is None else tops.astype(np.uint8)
