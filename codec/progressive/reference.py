"""The two stages, value by value, for reading and for testing the others against: they must equal it bit for bit.

Follows README.md, which builds on that of `splitzip`: tiles, tops, drops, counts and escapes are those of its
reference, whose significands and codes are cut anew here. Slow: about a megabyte a second.
"""

import numpy as np
import numpy.typing as npt

from codec.progressive.plan import AnchorPlan, one_stage
from codec.splitzip import reference
from codec.splitzip.payload import Bytes, section
from codec.splitzip.reference import Bits, Ints

_SHARED = ("tops", "drops", "counts", "groups")
"""Sections that are those of the code in one stage."""


def encode_tensor(
    pool: Bits, pages: Ints, plan: AnchorPlan, dense: Bytes, rest: Bytes
) -> tuple[npt.NDArray[np.uint16], Bytes]:
    """Fill `dense` (plan.fixed_bytes) and `rest` (plan.rest.fixed_bytes) and give records and extensions.

    pool: elements' bits, [layers, pool pages, rows, columns]; pages: which pages of it.
    """
    whole = one_stage(plan)
    joined = np.zeros(whole.fixed_bytes, dtype=np.uint8)
    records, extensions = reference.encode_tensor(pool, pages, whole, None, joined)
    dense[:] = 0
    rest[:] = 0
    rest_bits = plan.rest.rest_bits
    for tile in range(plan.tiles):
        significands = reference.read_planes(whole, "significand", whole.significand_planes, joined, tile)
        codes = reference.read_planes(whole, "code", whole.code_planes, joined, tile)
        anchors = codes | significands >> rest_bits << plan.code.code_bits
        reference.write_planes(anchors, plan, "anchor", plan.planes["anchor"], dense, tile)
        low = significands & (1 << rest_bits) - 1
        reference.write_planes(low, plan.rest, "rest", plan.rest.planes["rest"], rest, tile)
    for name in _SHARED:
        section(dense, plan, name)[:] = section(joined, whole, name)
    return records, extensions


def decode_anchor(
    dense: Bytes, records: npt.NDArray[np.uint16], extensions: Bytes, pages: Ints, plan: AnchorPlan, pool: Bits
) -> None:
    """Write the middle of each value's interval into `pool`. Raises CodecError where a record lies nowhere."""
    whole = one_stage(plan)
    joined = np.zeros(whole.fixed_bytes, dtype=np.uint8)
    rest_bits = plan.rest.rest_bits
    middle = 1 << rest_bits - 1 if rest_bits else 0
    for tile in range(plan.tiles):
        anchors = reference.read_planes(plan, "anchor", plan.planes["anchor"], dense, tile)
        codes, kept = anchors & plan.code.window - 1, anchors >> plan.code.code_bits
        reference.write_planes(codes, whole, "code", whole.code_planes, joined, tile)
        significands = kept << rest_bits | middle
        reference.write_planes(significands, whole, "significand", whole.significand_planes, joined, tile)
    for name in _SHARED:
        section(joined, whole, name)[:] = section(dense, plan, name)
    reference.decode_tensor(joined, records, extensions, pages, whole, None, pool)


def refine(rest: Bytes, pages: Ints, plan: AnchorPlan, pool: Bits) -> None:
    """Write the low mantissa bits into `pool`, which holds what `decode_anchor` wrote."""
    mask = (1 << plan.rest.rest_bits) - 1
    for tile, _, bits, real in reference.tiles(pool, pages, plan):
        low = reference.read_planes(plan.rest, "rest", plan.rest.planes["rest"], rest, tile)
        reference.store(pool, pages, plan, tile, bits & ~mask | low, real)
