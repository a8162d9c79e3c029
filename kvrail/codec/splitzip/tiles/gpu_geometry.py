"""A TensorPlan as kernels on a GPU are compiled for it."""

import functools
from typing import NamedTuple

from kvrail.codec.core.floats import FloatFormat
from kvrail.codec.core.gpu import next_power_of_2
from kvrail.codec.core.plans import geometry
from kvrail.codec.splitzip.tiles.format import SEGMENTS, WindowCode
from kvrail.codec.splitzip.tiles.plan import TensorPlan


class Geometry(NamedTuple):
    """What a kernel is compiled for, of keys or of values; kernels call it G, as a constant.

    ALIGNMENT: bytes, a power of two, that divides the addresses of all pages. LANES: values of a word.
    HALVES: 2 where channels have tops of their own, else 1. PADDED: whether tiles, or their blocks of HALF_PADDED words
    a half, hold anything that is not a value. KEPT_BITS: mantissa bits of the first of two stages; 0 where there is
    one. The others are those of FloatFormat, WindowCode and TensorPlan, WIDTH and PER_PAGE of tiles, what is PADDED up
    to a power of two.
    """

    ITEM_BYTES: int
    EXPONENT_BITS: int
    MANTISSA_BITS: int
    CODE_BITS: int
    WINDOW: int
    POSITION_BITS: int
    LANES: int
    ALIGNMENT: int
    HALVES: int
    ROWS: int
    SEGMENT_ROWS: int
    SEGMENT_ROWS_PADDED: int
    COLUMNS: int
    WIDTH: int
    HALF_PADDED: int
    PER_PAGE: int
    PADDED: bool
    KEPT_BITS: int

    @property
    def segment_words(self) -> int:
        """Words of a segment, padded to a power of two."""
        return self.SEGMENT_ROWS_PADDED * self.HALVES * self.HALF_PADDED


@functools.lru_cache(maxsize=256)
def geometries_of(
    format: FloatFormat,
    code: WindowCode,
    rows: int,
    columns: tuple[int, int],
    kept_bits: tuple[int, int],
    alignment: int,
) -> tuple[Geometry, Geometry]:
    """Geometries of keys and of values, with the same LANES: the most that fit both."""
    plans = [TensorPlan(format, code, 1, 1, rows, each) for each in columns]
    most = 4 // format.item_bytes
    lanes = most if alignment % 4 == 0 and all(_in_words(plan, most) for plan in plans) else 1
    keys, values = (_geometry(plan, lanes, alignment, kept) for plan, kept in zip(plans, kept_bits, strict=True))
    return keys, values


def _geometry(plan: TensorPlan, lanes: int, alignment: int, kept_bits: int) -> Geometry:
    halves = 2 if plan.code.per_channel else 1
    half = next_power_of_2(-(-plan.tile_width // (halves * lanes)))
    return geometry(
        Geometry,
        plan,
        LANES=lanes,
        ALIGNMENT=alignment,
        HALVES=halves,
        SEGMENT_ROWS_PADDED=next_power_of_2(plan.segment_rows),
        WIDTH=plan.tile_width,
        HALF_PADDED=half,
        PER_PAGE=plan.tiles_per_page,
        PADDED=_is_padded(plan, halves * lanes * half),
        KEPT_BITS=kept_bits,
    )


def _in_words(plan: TensorPlan, lanes: int) -> bool:
    """Whether words of `lanes` values never straddle a row, a segment, half a tile or the end of a page."""
    if plan.code.per_channel:
        return plan.columns % lanes == 0 and plan.tile_width % (2 * lanes) == 0
    return plan.page_values % lanes == 0 and plan.tile_width % lanes == 0


def _is_padded(plan: TensorPlan, width: int) -> bool:
    """Whether tiles, or their blocks of `width` columns, hold anything that is not a value."""
    in_page = SEGMENTS * plan.segment_values * plan.tiles_per_page == plan.page_values
    return not in_page or width != plan.tile_width or next_power_of_2(plan.segment_rows) != plan.segment_rows
