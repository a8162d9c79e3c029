"""Where everything of one tensor lies in the payloads of its stages. README.md draws it."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from kvrail.codec.core.plans import MatrixPlan, geometry
from kvrail.codec.core.sections import Section, aligned, bytes_of, sections_of
from kvrail.codec.papers.lynx.format import LynxCode

TILE_VALUES = 4096
TILE_COLUMNS = 64


class TensorPlan(MatrixPlan[LynxCode]):
    """Sections of the keys or the values of a block."""

    @cached_property
    def raw(self) -> bool:
        """Whether stage 0 brings the tensor as it is, since coded it would be no smaller; others then bring nothing."""
        return sum(aligned(size) for size in self._sizes[0].values()) >= self.raw_bytes

    @cached_property
    def chunks(self) -> int:
        """Chunks of a page, one after the other; the last may be shorter."""
        return -(-self.rows // self.code.chunk)

    @cached_property
    def half_rows(self) -> int:
        """Rows of the first half of a page, whose codes share bytes with those of the second; whole chunks if many."""
        if self.chunks == 1:
            return -(-self.rows // 2)
        return self.code.chunk * -(-self.chunks // 2)

    @cached_property
    def tile_columns(self) -> int:
        """Columns of a tile of the last stage; the last tile of a page may have fewer."""
        return max(1, min(TILE_COLUMNS, self.columns, TILE_VALUES // max(1, self.rows)))

    @cached_property
    def tiles_per_page(self) -> int:
        """Tiles of a page."""
        return -(-self.columns // self.tile_columns)

    @cached_property
    def tiles(self) -> int:
        """Tiles in all; number = page number * tiles_per_page + tile in the page."""
        return self.pages * self.tiles_per_page

    @cached_property
    def sections(self) -> tuple[dict[str, Section], ...]:
        """By stage: the sections whose size does not depend on the data, by name, in order."""
        found: list[dict[str, Section]] = []
        for sizes in self._sizes:
            if self.raw:
                sizes = {} if found else {"elements": self.raw_bytes}
            found.append(sections_of(sizes))
        return tuple(found)

    @cached_property
    def fixed_bytes(self) -> tuple[int, ...]:
        """By stage: bytes of these sections, with their padding."""
        return tuple(map(bytes_of, self.sections))

    @cached_property
    def _sizes(self) -> tuple[dict[str, int], ...]:
        """By stage: bytes of each section of a tensor that does not travel raw."""
        channels = self.pages * self.columns
        many = self.chunks > 1
        minima = {"minima": channels * self.format.item_bytes}
        scales = {"scales": channels * 2}
        lows = {"lows": channels * self.chunks} if many else {}
        widths = {"widths": channels * self.chunks} if many else {}
        codes = {"codes": channels * self.half_rows}
        bases = minima | lows if self.code.curved else {}
        return (
            minima | scales | lows | widths | codes,
            scales | widths | bases | codes,
            scales | widths | {"lengths": 4 * self.tiles},
        )


@dataclass(frozen=True, slots=True)
class Coding:
    """What both ends know of a block before any of its bytes: plans of keys and values, and the number of stages."""

    plans: tuple[TensorPlan, TensorPlan]
    num_stages: int


class Stage(NamedTuple):
    """For the CPU's kernels: where a stage's sections begin among its fixed ones; -1 where it has none of that name."""

    minima: int
    scales: int
    lows: int
    widths: int
    codes: int
    lengths: int


class Geometry(NamedTuple):
    """What the CPU's kernels know of a TensorPlan: attributes of the same names, and mantissa_bits of the element type.

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


@lru_cache(maxsize=256)
def geometry_of(plan: TensorPlan) -> Geometry:
    """A plan as the CPU's kernels take it."""
    return geometry(Geometry, plan, curved=int(plan.code.curved))


@lru_cache(maxsize=256)
def stages_of(plan: TensorPlan) -> tuple[Stage, Stage, Stage]:
    """The sections of all stages as the CPU's kernels take them."""
    found = []
    for sections in plan.sections:
        found.append(Stage(*(sections[name].offset if name in sections else -1 for name in Stage._fields)))
    return found[0], found[1], found[2]
