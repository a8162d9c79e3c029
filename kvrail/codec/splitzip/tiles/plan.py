"""Where everything of one tensor lies: its tiles, and the sections of its part of a payload. README.md draws it."""

from functools import cached_property, lru_cache

from kvrail.codec.base import BlockSpec
from kvrail.codec.core.plans import MatrixPlan, matrices
from kvrail.codec.core.sections import Section, bytes_of, ceil_div, sections_of
from kvrail.codec.splitzip.tiles.format import SEGMENTS, WindowCode, planes_of

TILES_PER_GROUP = 64
"""Tiles whose records' first offset is written down once."""


class TensorPlan(MatrixPlan[WindowCode]):
    """Tiles and sections of the keys or the values of a block."""

    @cached_property
    def segment_rows(self) -> int:
        """Rows of a segment: 1 where tiles are runs of a page, else an eighth of a page's rows, rounded up."""
        return max(1, ceil_div(self.rows, SEGMENTS)) if self.code.per_channel else 1

    @cached_property
    def fits(self) -> bool:
        """Whether the code can tile the page at all: per channel, a tile is at least one whole column."""
        return self.segment_rows * SEGMENTS <= self.code.chunk

    @cached_property
    def tiles_per_page(self) -> int:
        """Tiles of a page, all of the same size."""
        if self.code.per_channel:
            return ceil_div(self.columns, self.code.chunk // (SEGMENTS * self.segment_rows))
        return ceil_div(self.page_values, self.code.chunk)

    @cached_property
    def tile_width(self) -> int:
        """Columns of a tile, counting a run of a page as eight rows."""
        length = self.columns if self.code.per_channel else ceil_div(self.page_values, SEGMENTS)
        return ceil_div(length, self.tiles_per_page) if self.tiles_per_page else 0

    @cached_property
    def segment_values(self) -> int:
        """Elements of a segment, padding included; a tile has eight times as many."""
        return self.segment_rows * self.tile_width

    @cached_property
    def tiles(self) -> int:
        """Tiles in all; number = page number * tiles_per_page + tile in the page."""
        return self.pages * self.tiles_per_page

    @cached_property
    def groups(self) -> int:
        """Groups of TILES_PER_GROUP tiles; the last may have fewer."""
        return ceil_div(self.tiles, TILES_PER_GROUP)

    @cached_property
    def significand_planes(self) -> tuple[int, ...]:
        """Widths of the planes of sign and mantissa."""
        return planes_of(1 + self.format.mantissa_bits)

    @cached_property
    def code_planes(self) -> tuple[int, ...]:
        """Widths of the planes of the codes."""
        return planes_of(self.code.code_bits)

    @cached_property
    def sections(self) -> dict[str, Section]:
        """The sections whose size does not depend on the data, by name, in order."""
        sizes = self.plane_sizes({"significand": self.significand_planes, "code": self.code_planes})
        if self.code.per_channel:
            sizes |= {"tops": self.tiles, "drops": self.tiles * self.drop_bytes}
        sizes |= {"counts": 2 * self.tiles, "groups": 8 * self.groups}
        return sections_of(sizes)

    @cached_property
    def drop_bytes(self) -> int:
        """Bytes of a tile's drops, four bits a column."""
        return ceil_div(self.tile_width, 2)

    @cached_property
    def fixed_bytes(self) -> int:
        """Bytes of all sections whose size does not depend on the data, with their padding."""
        return bytes_of(self.sections)

    def plane_sizes(self, planes: dict[str, tuple[int, ...]]) -> dict[str, int]:
        """Bytes of each plane, by the name of its field and its number; planes: their widths in bits."""
        unit = self.tiles * self.segment_values
        return {f"{name}{i}": width * unit for name, widths in planes.items() for i, width in enumerate(widths)}


@lru_cache(maxsize=256)
def plans_of(spec: BlockSpec, code: WindowCode) -> tuple[TensorPlan, TensorPlan]:
    """Plans of keys and values."""
    return matrices(TensorPlan, spec, code)
