"""What plans of keys or values have in common, whatever a codec makes of them."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch

from kvrail.codec.base import BlockSpec
from kvrail.codec.core.floats import FLOATS, FloatFormat

Code = TypeVar("Code")
PlanT = TypeVar("PlanT", bound="MatrixPlan")  # type: ignore[type-arg]


@dataclass(frozen=True)
class MatrixPlan(Generic[Code]):
    """The keys or the values of a block, page by page.

    One page of one layer is a matrix [rows, columns] of elements, contiguous: rows are tokens, columns are channels of
    all heads. Pages are counted layer by layer: page number = layer * num_pages + page.
    """

    format: FloatFormat
    code: Code
    num_layers: int
    num_pages: int
    rows: int
    columns: int

    @cached_property
    def pages(self) -> int:
        """Pages of all layers."""
        return self.num_layers * self.num_pages

    @cached_property
    def page_values(self) -> int:
        """Elements of a page."""
        return self.rows * self.columns

    @cached_property
    def values(self) -> int:
        """Elements in all."""
        return self.pages * self.page_values

    @cached_property
    def raw_bytes(self) -> int:
        """Bytes of the tensor as it is."""
        return self.values * self.format.item_bytes


def matrices(kind: type[PlanT], spec: BlockSpec, code: object) -> tuple[PlanT, PlanT]:
    """Plans of keys and values."""
    shape = (FLOATS[spec.dtype], code, spec.num_layers, spec.num_pages, spec.page_size)
    return kind(*shape, spec.num_kv_heads * spec.key_dim), kind(*shape, spec.num_kv_heads * spec.value_dim)


@dataclass(frozen=True)
class ShapePlan(Generic[Code]):
    """The keys or the values of a block by their shape, [layers, pages, page_size, kv_heads, dim].

    Pages are counted layer by layer.
    """

    code: Code
    dtype: torch.dtype
    shape: tuple[int, int, int, int, int]

    @cached_property
    def format(self) -> FloatFormat:
        """The element type."""
        return FLOATS[str(self.dtype).removeprefix("torch.")]

    @cached_property
    def pages(self) -> int:
        """Pages of all layers."""
        return self.shape[0] * self.shape[1]

    @cached_property
    def values(self) -> int:
        """Elements in all."""
        return math.prod(self.shape)

    @cached_property
    def page_values(self) -> int:
        """Elements of a page."""
        return math.prod(self.shape[2:])

    @cached_property
    def raw_bytes(self) -> int:
        """Bytes of the tensor as it is."""
        return self.values * self.dtype.itemsize


Shape = tuple[torch.dtype, tuple[int, int, int, int, int]]


def shapes(spec: BlockSpec) -> tuple[Shape, Shape]:
    """Element type and shape of keys and of values, as a ShapePlan takes them."""
    dtype, lead = getattr(torch, spec.dtype), (spec.num_layers, spec.num_pages, spec.page_size, spec.num_kv_heads)
    return (dtype, (*lead, spec.key_dim)), (dtype, (*lead, spec.value_dim))
