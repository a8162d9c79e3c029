"""Which values share a minimum and a scale, and where everything of one tensor lies. README.md draws it."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from kvrail.codec.core.sections import Section, aligned, sections_of
from kvrail.codec.integer.format import FORMATS, IntegerCode


@dataclass(frozen=True)
class TensorPlan:
    """Groups and sections of the keys or the values of a block.

    axis: CHANNEL or TOKEN. shape: [layers, pages, page_size, kv_heads, dim]. Pages are counted layer by layer.
    """

    code: IntegerCode
    axis: int
    dtype: torch.dtype
    shape: tuple[int, int, int, int, int]

    @cached_property
    def scale_dtype(self) -> torch.dtype:
        """Of scales: 16 bits with the range of the element type."""
        return torch.float16 if self.dtype == torch.float16 else torch.bfloat16

    @cached_property
    def largest(self) -> float:
        """The largest finite number of the element type."""
        return FORMATS[str(self.dtype).removeprefix("torch.")].largest

    @cached_property
    def pages(self) -> int:
        """Pages of all layers."""
        return self.shape[0] * self.shape[1]

    @cached_property
    def page_values(self) -> int:
        """Elements of a page."""
        return math.prod(self.shape[2:])

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
        """Of minima and scales: `shape` with 1 in the place of `axis`."""
        return (*self.shape[: self.axis], 1, *self.shape[self.axis + 1 :])

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
    def coded_bytes(self) -> int:
        """Bytes of the sections, with their padding."""
        return aligned(self.sections["codes"].end)

    def travels_raw(self, raw_pages: int) -> bool:
        """Whether the tensor travels as it is, because with this many raw pages its sections are no smaller."""
        return self.coded_bytes + aligned(raw_pages * self.page_bytes) >= self.pages * self.page_bytes
