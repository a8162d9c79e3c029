"""A TensorPlan as kernels on a GPU are compiled for it."""

from collections.abc import Sequence
from typing import NamedTuple

from kvrail.codec.core.gpu import next_power_of_2
from kvrail.codec.papers.lynx.plan import TensorPlan

PROGRAM_VALUES = 4096
"""Values of a program, about; a page's rows in whole, of as many columns as that leaves."""


class Geometry(NamedTuple):
    """What a kernel is compiled for, of keys or of values; kernels call it G, as a constant.

    ALIGNMENT: bytes, a power of two, that divides the addresses of all pages. LANES: values of a word. ROWS_IN_CHUNK:
    rows of a chunk, CHUNK the same up to a power of two; ALL_CHUNKS: chunks of a page, CHUNKS those of half a page, up
    to a power of two. WIDTH: columns of a program. PADDED: whether programs have rows or columns that the page has not.
    The others are those of FloatFormat, LynxCode and TensorPlan.
    """

    MANTISSA_BITS: int
    CURVED: int
    ALIGNMENT: int
    LANES: int
    ROWS: int
    HALF_ROWS: int
    ROWS_IN_CHUNK: int
    CHUNKS: int
    CHUNK: int
    ALL_CHUNKS: int
    COLUMNS: int
    WIDTH: int
    PADDED: bool


def geometries_of(plans: Sequence[TensorPlan], alignment: int) -> list[Geometry]:
    """Geometries of keys and of values; alignment: as of Geometry. Both have the same LANES: the most that fit both."""
    whole = plans[0].format.item_bytes == 2 and alignment % 8 == 0 and not any(plan.columns % 4 for plan in plans)
    lanes = 4 if whole and all(width_of(plan) >= 4 for plan in plans) else 1
    return [_geometry(plan, lanes, alignment) for plan in plans]


def width_of(plan: TensorPlan) -> int:
    """Columns of a program, a power of two."""
    rows = 2 * next_power_of_2(plan.half_rows)
    return min(next_power_of_2(plan.columns), max(1, PROGRAM_VALUES // rows))


def _geometry(plan: TensorPlan, lanes: int, alignment: int) -> Geometry:
    many = plan.chunks > 1
    return Geometry(
        MANTISSA_BITS=plan.format.mantissa_bits,
        CURVED=int(plan.code.curved),
        ALIGNMENT=alignment,
        LANES=lanes,
        ROWS=plan.rows,
        HALF_ROWS=plan.half_rows,
        ROWS_IN_CHUNK=plan.code.chunk if many else plan.half_rows,
        CHUNKS=next_power_of_2(plan.half_rows // plan.code.chunk if many else 1),
        CHUNK=plan.code.chunk if many else next_power_of_2(plan.half_rows),
        ALL_CHUNKS=plan.chunks,
        COLUMNS=plan.columns,
        WIDTH=width_of(plan),
        PADDED=_is_padded(plan),
    )


def _is_padded(plan: TensorPlan) -> bool:
    """Whether programs have rows or columns that the page has not."""
    rows_in_chunk = plan.code.chunk if plan.chunks > 1 else plan.half_rows
    chunks = plan.half_rows // rows_in_chunk
    whole = plan.rows == 2 * plan.half_rows and not chunks & (chunks - 1) and not rows_in_chunk & (rows_in_chunk - 1)
    return not whole or plan.columns % width_of(plan) != 0
