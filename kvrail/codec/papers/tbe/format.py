"""The form of TCA-TBE weights; see README.md beside this."""

from dataclasses import dataclass

import torch

FRAGMENT, STRIP_ROWS, BLOCK = 8, 16, 64
"""Rows and columns of a FragTile, rows of a TensorCoreTile, rows and columns of a BlockTile."""
STRIPS = BLOCK // STRIP_ROWS
"""Rows of TensorCoreTiles in a BlockTile."""
FRAGMENTS = STRIP_ROWS * BLOCK // FRAGMENT**2
"""FragTiles of a strip."""
PLANES = 3
WINDOW = (1 << PLANES) - 1
"""Consecutive exponents that have a code."""
MOST_BASE = 255 - WINDOW
UNIT = 16
"""A block's values begin at multiples of it, in bytes, in either buffer; UNIT bytes of zeros end each buffer."""
MOST_BYTES = 1 << 32
"""The most bytes of PackedSignMantissa: kernels count them in 32 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class TbeWeight:
    """A weight, bfloat16 [rows, columns], as TCA-TBE (ZipServ, section 4.2).

    base: int32 [1], the exponent before the window. bitmaps: int64 [BlockTiles, 4, 3, 16]. sign_mantissas: uint8,
    PackedSignMantissa. full_values: int16, FullValue. offsets: int32 [BlockTiles, 4]. All on one device.
    """

    rows: int
    columns: int
    base: torch.Tensor
    bitmaps: torch.Tensor
    sign_mantissas: torch.Tensor
    full_values: torch.Tensor
    offsets: torch.Tensor

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """Its tensors, by their names, in order."""
        return {name: getattr(self, name) for name in ("base", "bitmaps", "sign_mantissas", "full_values", "offsets")}

    @property
    def nbytes(self) -> int:
        """Memory that it takes, in bytes."""
        return sum(part.nbytes for part in self.parts.values())

    def to(self, device: torch.device | str) -> "TbeWeight":
        """The same weight on another device."""
        return TbeWeight(self.rows, self.columns, *(part.to(device) for part in self.parts.values()))


def blocks_of(rows: int, columns: int) -> tuple[int, int]:
    """BlockTiles of a weight: down and across."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def refusal(weight: torch.Tensor) -> str:
    """Why a weight cannot be multiplied as TCA-TBE on a GPU; empty where it can."""
    if weight.dtype != torch.bfloat16 or weight.dim() != 2:
        return f"it is {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}, not bfloat16 [rows, columns]"
    rows, columns = weight.shape
    if not rows or not columns or rows % STRIP_ROWS or columns % BLOCK:
        return f"its shape {[rows, columns]} is no multiple of [{STRIP_ROWS}, {BLOCK}]"
    return ""
