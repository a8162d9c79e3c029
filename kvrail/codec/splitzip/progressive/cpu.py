"""The two stages on a CPU: straight from pages into payloads and back, one pass over the pages each way."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvrail.codec.base import PagedBlock
from kvrail.codec.core import buffers
from kvrail.codec.core.arrays import Bytes, Ints
from kvrail.codec.core.cpu import CpuEncoding, append, byte_pools, gather, on_threads, scatter
from kvrail.codec.core.sections import aligned, pad
from kvrail.codec.splitzip.progressive.cpu_geometry import geometry_of
from kvrail.codec.splitzip.progressive.cpu_kernels import decode_exact_tiles, decode_tiles, encode_tiles
from kvrail.codec.splitzip.progressive.payload import StageLayout, layouts_of
from kvrail.codec.splitzip.progressive.plan import AnchorPlan, Plans
from kvrail.codec.splitzip.tiles.cpu import Escapes, decode_on_threads, encode_on_threads
from kvrail.codec.splitzip.tiles.payload import HEADER_BYTES, Part, pad_sections, scale_bytes_of, stats_of, travels_raw


def encode(pages: PagedBlock, plans: Plans) -> CpuEncoding:
    """Encode keys and values by their plans. Raises CodecError where a pool's tensor is not contiguous."""
    pools, page_ids = byte_pools(pages), np.array(pages.page_ids, dtype=np.int64)
    scale_bytes = scale_bytes_of(pages.spec)
    coded = [plan.fits and not travels_raw(plan, 0, 0) for plan in plans]
    first = buffers.take(HEADER_BYTES + sum(aligned(plan.raw_bytes) for plan in plans) + aligned(scale_bytes))
    rooms = [plan.raw_bytes - plan.fixed_bytes if codes else 0 for plan, codes in zip(plans, coded, strict=True)]
    second = buffers.take(HEADER_BYTES + sum(rooms))
    parts: list[Part] = []
    escapes: list[list[Escapes]] = []
    offset, rest_offset = HEADER_BYTES, HEADER_BYTES
    for pool, plan, codes in zip(pools, plans, coded, strict=False):  # the pools of scales come after
        dense, rest = first[offset:], second[rest_offset:]
        found = _encode_tensor(pool, page_ids, plan, dense, rest) if codes else None
        if found is None:
            pad(dense, gather(pool, page_ids, dense, 0))
        records = sum(each.records.size // 2 for each in found or ())
        extensions = sum(each.extensions.size for each in found or ())
        parts.append(Part(plan, found is None, records, extensions))
        escapes.append(found or [])
        offset += parts[-1].dense_bytes
        rest_offset += 0 if found is None else plan.rest.fixed_bytes
    for pool in pools[2:]:
        offset = gather(pool, page_ids, first, offset)
    pad(first, offset)
    for found in escapes:
        rest_offset = pad(second, append(second, rest_offset, [each.records for each in found]))
        rest_offset = pad(second, append(second, rest_offset, [each.extensions for each in found]))
    payloads = []
    for memory, layout in zip((first, second), layouts_of(plans, parts, scale_bytes), strict=True):
        memory[:HEADER_BYTES] = np.frombuffer(layout.header(), dtype=np.uint8)
        payloads.append(memory.data[: layout.size])
    return CpuEncoding(payloads, stats_of(parts))


def _encode_tensor(pool: Bytes, page_ids: Ints, plan: AnchorPlan, dense: Bytes, rest: Bytes) -> list[Escapes] | None:
    """Fill the beginning of `dense` and `rest`, gaps and all; None where the code does not make the tensor smaller."""
    geometry = geometry_of(plan)

    def encode_range(first: int, last: int, records: npt.NDArray[np.uint16], extensions: Bytes) -> tuple[int, int]:
        found: tuple[int, int] = encode_tiles(pool, page_ids, first, last, geometry, dense, rest, records, extensions)
        return found

    escapes = encode_on_threads(plan.rest, rest, encode_range)
    if escapes is not None:
        pad_sections(plan, dense)
    return escapes


def decode(
    stage: int, payloads: Sequence[Bytes], layouts: Sequence[StageLayout], plans: Plans, out: PagedBlock
) -> None:
    """Write a stage into `out`. Raises CodecError, with `out` untouched, where it cannot write a pool."""
    if stage == 0:
        decode_anchor(payloads[0], layouts[0], out)
    else:
        decode_exact(payloads, layouts, out)


def decode_anchor(payload: Bytes, layout: StageLayout, out: PagedBlock) -> None:
    """Write a first stage into `out`. Raises CodecError, with `out` untouched, where a pool is not contiguous."""
    pools, page_ids = byte_pools(out), np.array(out.page_ids, dtype=np.int64)
    for pool, plan, part, start in zip(pools, layout.plans, layout.parts, layout.dense_offsets, strict=False):
        if part.raw:
            scatter(pool, page_ids, payload[start : start + plan.raw_bytes])
        else:
            _decode_tensor(payload[start:], plan, pool, page_ids)
    offset, size = layout.scale_offset, layout.scale_bytes // 2
    for pool in pools[2:]:
        scatter(pool, page_ids, payload[offset : offset + size])
        offset += size


def _decode_tensor(dense: Bytes, plan: AnchorPlan, pool: Bytes, page_ids: Ints) -> None:
    geometry = geometry_of(plan)

    def decode_range(first: int, last: int) -> None:
        decode_tiles(pool, page_ids, first, last, geometry, dense)

    on_threads(decode_range, plan.tiles, plan.raw_bytes)


def decode_exact(payloads: Sequence[Bytes], layouts: Sequence[StageLayout], out: PagedBlock) -> None:
    """Write what both stages code into `out`.

    Raises CodecError, with `out` untouched, where a pool is not contiguous.
    """
    (first, second), (anchor, rest) = payloads, layouts
    pools, page_ids = byte_pools(out), np.array(out.page_ids, dtype=np.int64)
    for number, (plan, part) in enumerate(zip(anchor.plans, rest.parts, strict=True)):
        if not part.raw:
            dense = first[anchor.dense_offsets[number] :]
            later, escapes = second[rest.dense_offsets[number] :], second[rest.escape_offsets[number] :]
            _decode_both(pools[number], page_ids, plan, part, dense, later, escapes)


def _decode_both(
    pool: Bytes, page_ids: Ints, plan: AnchorPlan, part: Part, dense: Bytes, rest: Bytes, escapes: Bytes
) -> None:
    geometry = geometry_of(plan)

    def decode_range(first: int, last: int, records: Bytes, extensions: Bytes) -> None:
        decode_exact_tiles(pool, page_ids, first, last, geometry, dense, rest, records, extensions)

    decode_on_threads(part, rest, escapes, decode_range)
