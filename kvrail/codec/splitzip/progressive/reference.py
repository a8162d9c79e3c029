"""The two stages, value by value, for reading and for testing the others against: they must equal it bit for bit.

Follows README.md, which builds on that of `splitzip`: tiles, tops, drops, counts and escapes are those of its
reference, from whose significands and codes levels are made here. Slow: about a megabyte a second.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvrail.codec.base import PagedBlock
from kvrail.codec.core.arrays import Bits, Bytes, Ints
from kvrail.codec.core.cpu import CpuEncoding, matrices
from kvrail.codec.core.sections import aligned, joined
from kvrail.codec.splitzip.progressive.format import CODE_BITS
from kvrail.codec.splitzip.progressive.payload import StageLayout, layouts_of
from kvrail.codec.splitzip.progressive.plan import AnchorPlan, Plans, one_stage
from kvrail.codec.splitzip.tiles import reference
from kvrail.codec.splitzip.tiles.format import SEGMENTS
from kvrail.codec.splitzip.tiles.payload import WIDE, Part, scale_bytes_of, section, stats_of, travels_raw
from kvrail.codec.splitzip.tiles.plan import TensorPlan

Records = npt.NDArray[np.uint16]


def encode(pages: PagedBlock, plans: Plans) -> CpuEncoding:
    """The payloads that README.md asks for. Raises CodecError where a pool's tensor is not contiguous."""
    page_ids, pools = np.array(pages.page_ids, dtype=np.int64), matrices(pages)
    parts: list[Part] = []
    dense_parts: list[bytes] = []
    rests: list[bytes] = []
    escapes: list[bytes] = []
    for pool, plan in zip(pools, plans, strict=False):  # the pools of scales come after
        raw = not plan.fits or not plan.values
        if not raw:
            dense, rest = (np.zeros(size, dtype=np.uint8) for size in (plan.fixed_bytes, plan.rest.fixed_bytes))
            records, extensions = encode_tensor(pool, page_ids, plan, dense, rest)
            raw = travels_raw(plan, records.size, extensions.size)
        if raw:
            parts.append(Part(plan, True, 0, 0))
            dense_parts.append(pool[:, page_ids].tobytes())
        else:
            parts.append(Part(plan, False, records.size, extensions.size))
            dense_parts.append(dense.tobytes())
            rests.append(rest.tobytes())
            escapes += [records.tobytes(), extensions.tobytes()]
    scales = b"".join(pool[:, page_ids].tobytes() for pool in pools[2:])
    first, second = (layout.header() for layout in layouts_of(plans, parts, scale_bytes_of(pages.spec)))
    payloads = (first, *dense_parts, scales), (second, *rests, *escapes)
    return CpuEncoding([memoryview(joined(pieces)) for pieces in payloads], stats_of(parts))


def decode(
    stage: int, payloads: Sequence[Bytes], layouts: Sequence[StageLayout], plans: Plans, out: PagedBlock
) -> None:
    """Write a stage into `out`. Raises CodecError, with `out` untouched, where a pool's tensor is not contiguous."""
    page_ids, pools = np.array(out.page_ids, dtype=np.int64), matrices(out)
    for number, (plan, part) in enumerate(zip(plans, layouts[-1].parts, strict=True)):
        start = layouts[0].dense_offsets[number]
        dense = payloads[0][start : start + plan.fixed_bytes]
        if not part.raw and stage == 0:
            decode_anchor(dense, page_ids, plan, pools[number])
        elif not part.raw:
            rest, escapes = (payloads[1][at[number] :] for at in (layouts[1].dense_offsets, layouts[1].escape_offsets))
            records, extensions = escapes[: 2 * part.records].view("<u2"), escapes[aligned(2 * part.records) :]
            rest = rest[: plan.rest.fixed_bytes]
            decode_exact(dense, rest, records, extensions[: part.extensions], page_ids, plan, pools[number])
    if stage == 0:
        reference.place_whole(payloads[0], layouts[0], page_ids, pools)


def encode_tensor(pool: Bits, pages: Ints, plan: AnchorPlan, dense: Bytes, rest: Bytes) -> tuple[Records, Bytes]:
    """Fill `dense` (plan.fixed_bytes) and `rest` (plan.rest.fixed_bytes) and give records and extensions.

    pool: elements' bits, [layers, pool pages, rows, columns]; pages: which pages of it.
    """
    whole, mantissa_bits = one_stage(plan), plan.format.mantissa_bits
    joined = np.zeros(whole.fixed_bytes, dtype=np.uint8)
    records, extensions = reference.encode_tensor(pool, pages, whole, None, joined)
    dense[:] = 0
    rest[:] = 0
    for tile, escapes in enumerate(_escapes(joined, records, extensions, whole)):
        significands = reference.read_planes(whole, "significand", whole.significand_planes, joined, tile)
        distances = reference.read_planes(whole, "code", whole.code_planes, joined, tile)
        for segment, j, _ in escapes:
            distances[segment, j] = plan.code.window - 1
        mantissas = significands & (1 << mantissa_bits) - 1
        depths = (distances + 1 << mantissa_bits) - 1 - mantissas
        anchors = levels(depths, plan) | significands >> mantissa_bits << CODE_BITS + plan.kept_bits
        reference.write_planes(anchors, plan, "anchor", plan.planes["anchor"], dense, tile)
        low = significands & (1 << plan.rest.rest_bits) - 1
        reference.write_planes(low, plan.rest, "rest", plan.rest.planes["rest"], rest, tile)
    _copy_sections(("tops", "drops"), joined, whole, dense, plan)
    _copy_sections(("counts", "groups"), joined, whole, rest, plan.rest)
    return records, extensions


def levels(depths: Ints, plan: AnchorPlan) -> Ints:
    """Number of the level in which each depth lies, from the top; of a depth in the window, by README.md's table."""
    if not plan.rest.rest_bits:
        return depths
    ends = np.cumsum(sizes_of_levels(plan))
    numbers: Ints = np.searchsorted(ends, depths, side="right").astype(np.int64)
    return numbers


def sizes_of_levels(plan: AnchorPlan) -> list[int]:
    """How many depths each level has, from the top."""
    octave, size = 1 << plan.format.mantissa_bits, 1 << plan.rest.rest_bits
    coarse, fine = [size] * (octave // 2 // size), [size // 2] * (octave // size)
    return [*coarse, *fine, *coarse, *fine, *[size] * (5 * octave // size)]


def middles(plan: AnchorPlan) -> Ints:
    """The depth that each level's values get: the larger of its two middle numbers, as magnitudes go."""
    if not plan.rest.rest_bits:
        return np.arange(plan.code.window << plan.format.mantissa_bits)
    sizes = np.array(sizes_of_levels(plan))
    depths: Ints = np.cumsum(sizes) - sizes + sizes // 2 - 1
    return depths


def decode_anchor(dense: Bytes, pages: Ints, plan: AnchorPlan, pool: Bits) -> None:
    """Write the middle of each value's level into `pool`."""
    nothing = np.zeros(0, dtype=np.uint8)
    joined = _join(dense, None, plan)
    reference.decode_tensor(joined, nothing.view(np.uint16), nothing, pages, one_stage(plan), None, pool)


def decode_exact(
    dense: Bytes, rest: Bytes, records: Records, extensions: Bytes, pages: Ints, plan: AnchorPlan, pool: Bits
) -> None:
    """Write the values into `pool`, whatever lies there; dense: of the first stage, the others of the second.

    Raises CodecError where a record lies nowhere.
    """
    whole, joined = one_stage(plan), _join(dense, rest, plan)
    _copy_sections(("counts", "groups"), rest, plan.rest, joined, whole)
    reference.decode_tensor(joined, records, extensions, pages, whole, None, pool)


def _join(dense: Bytes, rest: Bytes | None, plan: AnchorPlan) -> Bytes:
    """The dense part that one stage would have but for escapes; without `rest`, of the middles of levels."""
    whole, mantissa_bits, middle = one_stage(plan), plan.format.mantissa_bits, middles(plan)
    joined = np.zeros(whole.fixed_bytes, dtype=np.uint8)
    level_bits, open_bits = CODE_BITS + plan.kept_bits, (1 << plan.rest.rest_bits) - 1
    for tile in range(plan.tiles):
        anchors = reference.read_planes(plan, "anchor", plan.planes["anchor"], dense, tile)
        depths, signs = middle[anchors & (1 << level_bits) - 1], anchors >> level_bits
        reference.write_planes(depths >> mantissa_bits, whole, "code", whole.code_planes, joined, tile)
        mantissas = ~depths & (1 << mantissa_bits) - 1
        if rest is not None:
            low = reference.read_planes(plan.rest, "rest", plan.rest.planes["rest"], rest, tile)
            mantissas = mantissas & ~open_bits | low
        significands = signs << mantissa_bits | mantissas
        reference.write_planes(significands, whole, "significand", whole.significand_planes, joined, tile)
    _copy_sections(("tops", "drops"), dense, plan, joined, whole)
    return joined


def _escapes(
    dense: Bytes, records: Records, extensions: Bytes, plan: TensorPlan
) -> Iterator[list[tuple[int, int, int]]]:
    """Of each tile its escapes: segment, number in it, and how far outside the window; dense: with the counts."""
    next_record, next_extension = 0, 0
    for count in section(dense, plan, "counts").view("<u2").tolist():
        escapes = []
        for record in records[next_record : next_record + (count & WIDE - 1)].tolist():
            position, far = record % plan.code.chunk, record // plan.code.chunk
            if count & WIDE:
                far += int(extensions[next_extension]) << plan.code.distance_bits
                next_extension += 1
            escapes.append((position % SEGMENTS, position // SEGMENTS, far))
        next_record += len(escapes)
        yield escapes


def _copy_sections(names: tuple[str, ...], source: Bytes, of: TensorPlan, target: Bytes, plan: TensorPlan) -> None:
    for name in names:
        section(target, plan, name)[:] = section(source, of, name)
