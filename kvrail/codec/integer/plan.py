"""Which values share a minimum and a scale, and where everything of one tensor lies. README.md draws it."""

import math
from functools import cached_property

import torch

from kvrail.codec.core.plans import ShapePlan
from kvrail.codec.core.sections import Section, aligned, bytes_of, sections_of
from kvrail.codec.integer.format import IntegerCode


class TensorPlan(ShapePlan[IntegerCode]):
    """Groups and sections of the keys or the values of a block."""

    @cached_property
    def scale_dtype(self) -> torch.dtype:
        """Of scales: 16 bits with the range of the element type."""
        return torch.float16 if self.dtype == torch.float16 else torch.bfloat16

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page as it is."""
        return self.page_values * self.dtype.itemsize

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of a page's codes."""
        return -(-self.page_values * self.code.bits // 8)

    @cached_property
    def group_shape(self) -> tuple[int, ...]:
        """Of minima and scales: `shape` with 1 in the place of the code's axis."""
        return (*self.shape[: self.code.axis], 1, *self.shape[self.code.axis + 1 :])

    @cached_property
    def sections(self) -> dict[str, Section]:
        """The sections of a coded tensor, by name, in order."""
        groups = math.prod(self.group_shape)
        return sections_of(
            {
                "flags": self.pages,
                "minima": groups * self.dtype.itemsize,
                "scales": groups * self.scale_dtype.itemsize,
                "codes": self.pages * self.code_bytes,
            }
        )

    @cached_property
    def fixed_bytes(self) -> int:
        """Bytes of the sections, with their padding."""
        return bytes_of(self.sections)

    def travels_raw(self, raw_pages: int) -> bool:
        """Whether the tensor travels as it is, because with this many raw pages its sections are no smaller."""
        return self.fixed_bytes + aligned(raw_pages * self.page_bytes) >= self.raw_bytes
