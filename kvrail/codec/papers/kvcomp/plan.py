"""Units, blocks and sections of one tensor. README.md draws them."""

import math
from functools import cached_property

from kvrail.codec.core.plans import ShapePlan
from kvrail.codec.core.sections import Section, aligned, bytes_of, sections_of
from kvrail.codec.papers.kvcomp.codebook import MAX_BITS
from kvrail.codec.papers.kvcomp.format import TensorCode

MOST_DIM = ((1 << 16) - 1) // MAX_BITS
"""The longest vector whose bits can be counted in 16 bits."""


class TensorPlan(ShapePlan[TensorCode]):
    """Units, blocks and sections of the keys or the values of a block.

    A unit is what shares a scale; a KVComp block is the page of one head, [rows, dim], and a vector one row of it.
    """

    @cached_property
    def unit_shape(self) -> tuple[int, ...]:
        """Of minima and scales: `shape` with 1 in the place of the axes that share them."""
        return tuple(1 if axis in self.code.granularity.value else size for axis, size in enumerate(self.shape))

    @cached_property
    def table_bytes(self) -> int:
        """Bytes of a layer's code lengths, two to a byte."""
        return -(-self.code.symbols // 2)

    @cached_property
    def sections(self) -> dict[str, Section]:
        """The sections whose size does not depend on the data, by name, in order."""
        units, blocks = math.prod(self.unit_shape), self.pages * self.heads
        return sections_of(
            {
                "tables": self.num_layers * self.table_bytes,
                "minima": units * self.dtype.itemsize,
                "scales": units * 2,
                "lengths": blocks * self.rows * 2,
                "ends": blocks * 4,
            }
        )

    @cached_property
    def fixed_bytes(self) -> int:
        """Bytes of these sections, with their padding."""
        return bytes_of(self.sections)

    @cached_property
    def uncodable(self) -> bool:
        """Whether the tensor travels raw whatever its data: a count would not fit its field, or sections do not pay."""
        return self.shape[4] > MOST_DIM or self.values >= 1 << 32 or self.fixed_bytes >= self.raw_bytes

    def travels_raw(self, words: int, escapes: int) -> bool:
        """Whether the tensor travels as it is, because with such a stream and escapes it is no smaller."""
        variable = aligned(4 * words) + aligned(4 * escapes) + aligned(self.dtype.itemsize * escapes)
        return self.uncodable or self.fixed_bytes + variable >= self.raw_bytes
