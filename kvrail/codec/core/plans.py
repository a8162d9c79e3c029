"""What plans of keys or values have in common, whatever a codec makes of them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

import torch

from kvrail.codec.base import BlockSpec
from kvrail.codec.core.floats import FLOATS, FloatFormat

Code = TypeVar("Code")
GeometryT = TypeVar("GeometryT")
PlanT = TypeVar("PlanT", bound="MatrixPlan")  # type: ignore[type-arg]
ShapeT = TypeVar("ShapeT", bound="ShapePlan")  # type: ignore[type-arg]


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


def geometry(kind: type[GeometryT], plan: Any, **given: int) -> GeometryT:
    """A named tuple for kernels: `given`, and for all other fields what plan, code or format have of the same name."""
    made: Any = kind
    for name in set(made._fields) - given.keys():
        sources = (plan, plan.code, plan.format)
        given[name] = next(getattr(each, name.lower()) for each in sources if hasattr(each, name.lower()))
    return cast(GeometryT, made(**given))


@dataclass(frozen=True)
class ShapePlan(MatrixPlan[Code]):
    """The same, with the heads that a row's columns are of, and torch's element type."""

    heads: int
    dtype: torch.dtype

    @cached_property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[layers, pages, page_size, kv_heads, dim]."""
        return self.num_layers, self.num_pages, self.rows, self.heads, self.columns // self.heads


def shaped(kind: type[ShapeT], spec: BlockSpec, codes: tuple[object, object]) -> tuple[ShapeT, ShapeT]:
    """Plans of keys and values, whose codes these are."""
    heads, dtype = spec.num_kv_heads, getattr(torch, spec.dtype)
    lead = spec.num_layers, spec.num_pages, spec.page_size
    keys, values = (
        kind(FLOATS[spec.dtype], code, *lead, heads * dim, heads, dtype)
        for code, dim in zip(codes, (spec.key_dim, spec.value_dim), strict=True)
    )
    return keys, values
