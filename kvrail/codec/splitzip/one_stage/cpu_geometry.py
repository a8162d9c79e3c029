"""A TensorPlan as the CPU's kernels take it: plain numbers."""

import functools
from typing import NamedTuple

from kvrail.codec.core.plans import geometry
from kvrail.codec.splitzip.tiles.plan import TensorPlan


class Geometry(NamedTuple):
    """What kernels know of a TensorPlan: its attributes of the same names, and where sections begin in a dense part.

    exponent_mask: 2^E - 1. low: the significand plane of eight bits; field_bits: the bits above, 0, 3 or 4; field0 and
    field1, code0 and code1: the planes of the fields and of the codes. 0 where there is no such section.
    """

    item_bytes: int
    mantissa_bits: int
    exponent_mask: int
    field_bits: int
    code_bits: int
    window: int
    position_bits: int
    per_channel: int
    num_pages: int
    rows: int
    columns: int
    segment_rows: int
    tile_width: int
    tiles_per_page: int
    low: int
    field0: int
    field1: int
    code0: int
    code1: int
    tops: int
    drops: int
    counts: int


@functools.lru_cache(maxsize=256)
def geometry_of(plan: TensorPlan) -> Geometry:
    """A plan as kernels take it."""
    starts = {name: where.offset for name, where in plan.sections.items()}
    widths = plan.significand_planes
    above = 1 if widths[0] == 8 else 0  # the first plane that `low` is not
    return geometry(
        Geometry,
        plan,
        exponent_mask=plan.format.exponents - 1,
        field_bits=sum(widths[above:]),
        per_channel=int(plan.code.per_channel),
        low=starts["significand0"],
        field0=starts.get(f"significand{above}", 0),
        field1=starts.get(f"significand{above + 1}", 0),
        code0=starts["code0"],
        code1=starts.get("code1", 0),
        tops=starts.get("tops", 0),
        drops=starts.get("drops", 0),
        counts=starts["counts"],
    )
