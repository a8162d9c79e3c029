"""The form of compact weights; see README.md beside this."""

from dataclasses import dataclass

import torch

STRIP_ROWS = 16
TILE_COLUMNS = 64
LOW_BYTES, CODE_BYTES = 1024, 384
FIXED_BYTES = LOW_BYTES + CODE_BYTES
"""Bytes of a block before its records."""
UNIT = 16
"""Blocks begin at multiples of it, in bytes."""
FIRST_EXPONENT, WINDOW = 120, 8
"""Exponents in the form that have a code: FIRST_EXPONENT and the seven after it."""


@dataclass(frozen=True, slots=True, eq=False)
class CompactWeight:
    """A weight, bfloat16 [rows, columns], in the compact form.

    blocks: uint8. index, counts: int32 [tiles]. shifts: int32 [rows]. scales: float32 [rows], 2^shift. All on one
    device.
    """

    rows: int
    columns: int
    blocks: torch.Tensor
    index: torch.Tensor
    counts: torch.Tensor
    shifts: torch.Tensor
    scales: torch.Tensor

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """Its tensors, by their names, in order."""
        return {name: getattr(self, name) for name in ("blocks", "index", "counts", "shifts", "scales")}

    @property
    def nbytes(self) -> int:
        """Memory that it takes, in bytes."""
        return sum(part.nbytes for part in self.parts.values())

    def to(self, device: torch.device | str) -> "CompactWeight":
        """The same weight on another device."""
        return CompactWeight(self.rows, self.columns, *(part.to(device) for part in self.parts.values()))


def refusal(weight: torch.Tensor) -> str:
    """Why a weight cannot take this form; empty where it can."""
    if weight.dtype != torch.bfloat16 or weight.dim() != 2:
        return f"it is {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}, not bfloat16 [rows, columns]"
    rows, columns = weight.shape
    if not rows or not columns or rows % STRIP_ROWS or columns % TILE_COLUMNS:
        return f"its shape {[rows, columns]} is no multiple of [{STRIP_ROWS}, {TILE_COLUMNS}]"
    return ""
