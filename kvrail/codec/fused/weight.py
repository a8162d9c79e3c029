"""What forms of weights share above their kernels: their parts, and the product as an operation of torch's."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from kvrail.codec.fused import launch
from kvrail.codec.fused.builds import Form
from kvrail.codec.fused.launch import STRIP_ROWS

TILE_COLUMNS = 64
"""Columns that a form packs together, beside STRIP_ROWS rows."""


@dataclass(frozen=True, slots=True, eq=False)
class FusedWeight:
    """A weight, bfloat16 [rows, columns], in fewer bytes. A form adds its tensors, all on one device."""

    rows: int
    columns: int

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """Its tensors, by their names, in order."""
        return {name: getattr(self, name) for name in parts_of(type(self))}

    @property
    def nbytes(self) -> int:
        """Memory that it takes, in bytes."""
        return sum(part.nbytes for part in self.parts.values())

    def to(self, device: torch.device | str) -> Self:
        """The same weight on another device."""
        return type(self)(self.rows, self.columns, *(part.to(device) for part in self.parts.values()))


def parts_of(kind: type[FusedWeight]) -> list[str]:
    """Names of the tensors of a form's weights, in order."""
    return [field.name for field in fields(kind)][2:]


def refusal(weight: torch.Tensor) -> str:
    """Why a weight cannot be multiplied in such a form; empty where it can."""
    if weight.dtype != torch.bfloat16 or weight.dim() != 2:
        return f"it is {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}, not bfloat16 [rows, columns]"
    rows, columns = weight.shape
    if not rows or not columns or rows % STRIP_ROWS or columns % TILE_COLUMNS:
        return f"its shape {[rows, columns]} is no multiple of [{STRIP_ROWS}, {TILE_COLUMNS}]"
    return ""


@dataclass(frozen=True, slots=True)
class Products:
    """Products with weights of a form on an NVIDIA GPU, and the weights unpacked there.

    multiplied, unpacked: names of the parts that the form's kernels take, in order.
    """

    form: Form
    multiplied: tuple[str, ...]
    unpacked: tuple[str, ...]

    def multiply(self, x: torch.Tensor, weight: FusedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """What torch.nn.functional.linear gives, with a weight that `prepare` has had: bfloat16 [tokens, rows].

        x: bfloat16 [tokens, columns], contiguous, on the weight's device. bias: bfloat16 [rows]. The bits are those of
        cuBLASLt where it does not split sums and gets at least 32 tokens.
        """
        if len(x) > launch.MOST_TOKENS:
            return torch.nn.functional.linear(x, self.unpack(weight), bias)
        return launch.multiply(self.form, x, _addresses(weight, self.multiplied), weight.rows, bias)

    def prepare(self, weight: FusedWeight) -> None:
        """Compile and load what products with a weight of this shape need; a capture allows none of it."""
        launch.prepare(self.form, getattr(weight, self.multiplied[0]).device, weight.rows)

    def unpack(self, weight: FusedWeight) -> torch.Tensor:
        """The weight, bfloat16 [rows, columns], bit for bit as it was compressed."""
        device = getattr(weight, self.unpacked[0]).device
        out = torch.empty(weight.rows, weight.columns, dtype=torch.bfloat16, device=device)
        return launch.unpack(self.form, _addresses(weight, self.unpacked), out)


def _addresses(weight: FusedWeight, names: tuple[str, ...]) -> list[int]:
    return [getattr(weight, name).data_ptr() for name in names]


def product_op(name: str, kind: type[FusedWeight], multiply: Callable[..., torch.Tensor]) -> Any:
    """The product as torch's operation kvrail::NAME, which compiled and captured models can hold.

    It takes x, bfloat16 [..., columns], the bias or None, the parts of a weight of `kind`, its rows and columns, and
    gives x times the transpose of the weight, plus the bias: [..., rows].
    """
    parts = ", ".join(f"Tensor {part}" for part in parts_of(kind))
    schema = f"(Tensor x, Tensor? bias, {parts}, SymInt rows, SymInt columns) -> Tensor"

    @torch.library.custom_op(f"kvrail::{name}", mutates_args=(), schema=schema)
    def product(x: torch.Tensor, bias: torch.Tensor | None, *given: Any) -> torch.Tensor:
        *parts, rows, columns = given
        weight = kind(rows, columns, *parts)
        return multiply(x.reshape(-1, columns).contiguous(), weight, bias).view(*x.shape[:-1], rows)

    @product.register_fake
    def _(x: torch.Tensor, bias: torch.Tensor | None, *given: Any) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], given[-2]))

    return product
