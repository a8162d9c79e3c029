"""An AnchorPlan as the CPU's kernels take it: plain numbers."""

import functools
from typing import NamedTuple

from kvrail.codec.splitzip.progressive.plan import AnchorPlan


class CutGeometry(NamedTuple):
    """What kernels know of an AnchorPlan: its attributes of the same names, and where sections begin.

    exponent_mask: 2^E - 1. anchor_bits and rest_bits: of the fields of the first and of the second stage; anchor4 to
    anchor1, rest8 to rest1: their planes of so many bits, 0 where there is none.
    """

    item_bytes: int
    mantissa_bits: int
    exponent_mask: int
    window: int
    position_bits: int
    per_channel: int
    num_pages: int
    rows: int
    columns: int
    segment_rows: int
    tile_width: int
    tiles_per_page: int
    kept_bits: int
    anchor_bits: int
    rest_bits: int
    anchor4: int
    anchor2: int
    anchor1: int
    rest8: int
    rest4: int
    rest2: int
    rest1: int
    tops: int
    drops: int
    counts: int


@functools.lru_cache(maxsize=256)
def geometry_of(plan: AnchorPlan) -> CutGeometry:
    """A plan as kernels take it."""
    widths = plan.planes["anchor"]
    starts = {f"anchor{width}": plan.sections[f"anchor{i}"].offset for i, width in enumerate(widths)}
    rest_widths = plan.rest.planes["rest"]
    starts |= {f"rest{width}": plan.rest.sections[f"rest{i}"].offset for i, width in enumerate(rest_widths)}
    return CutGeometry(
        item_bytes=plan.format.item_bytes,
        mantissa_bits=plan.format.mantissa_bits,
        exponent_mask=plan.format.exponents - 1,
        window=plan.code.window,
        position_bits=plan.code.position_bits,
        per_channel=int(plan.code.per_channel),
        num_pages=plan.num_pages,
        rows=plan.rows,
        columns=plan.columns,
        segment_rows=plan.segment_rows,
        tile_width=plan.tile_width,
        tiles_per_page=plan.tiles_per_page,
        kept_bits=plan.kept_bits,
        anchor_bits=sum(widths),
        rest_bits=plan.rest.rest_bits,
        **{name: starts.get(name, 0) for name in CutGeometry._fields if name[:-1] in ("anchor", "rest")},
        tops=plan.sections["tops"].offset,
        drops=plan.sections["drops"].offset,
        counts=plan.rest.sections["counts"].offset,
    )
