"""A TensorPlan as the CPU's kernels take it: plain numbers."""

import functools
from typing import NamedTuple

from kvrail.codec.papers.lynx.payload import ANCHOR, EXACT, RESIDUAL
from kvrail.codec.papers.lynx.plan import TensorPlan


class Stage(NamedTuple):
    """Where the sections of a stage begin in its fixed sections; -1 where it has none of that name."""

    minima: int
    scales: int
    lows: int
    widths: int
    codes: int
    lengths: int


class Geometry(NamedTuple):
    """What kernels know of a TensorPlan: its attributes of the same names, and mantissa_bits of the element type.

    curved: whether the map is not linear.
    """

    mantissa_bits: int
    num_pages: int
    rows: int
    columns: int
    chunk: int
    chunks: int
    half_rows: int
    tile_columns: int
    tiles_per_page: int
    curved: int


@functools.lru_cache(maxsize=256)
def geometry_of(plan: TensorPlan) -> Geometry:
    """A plan as kernels take it."""
    return Geometry(
        mantissa_bits=plan.format.mantissa_bits,
        num_pages=plan.num_pages,
        rows=plan.rows,
        columns=plan.columns,
        chunk=plan.code.chunk,
        chunks=plan.chunks,
        half_rows=plan.half_rows,
        tile_columns=plan.tile_columns,
        tiles_per_page=plan.tiles_per_page,
        curved=int(plan.code.curved),
    )


@functools.lru_cache(maxsize=256)
def stages_of(plan: TensorPlan) -> tuple[Stage, Stage, Stage]:
    """The sections of all stages as kernels take them."""
    found = []
    for stage in (ANCHOR, RESIDUAL, EXACT):
        sections = plan.sections[stage]
        found.append(Stage(*(sections[name].offset if name in sections else -1 for name in Stage._fields)))
    return found[0], found[1], found[2]
