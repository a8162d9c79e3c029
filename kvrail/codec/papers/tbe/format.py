"""The form of TCA-TBE weights; see README.md beside this."""

from dataclasses import dataclass

import torch

from kvrail.codec.fused.weight import FusedWeight

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
class TbeWeight(FusedWeight):
    """A weight, bfloat16 [rows, columns], as TCA-TBE (ZipServ, section 4.2).

    base: int32 [1], the exponent before the window. bitmaps: int64 [BlockTiles, 4, 3, 16]. sign_mantissas: uint8,
    PackedSignMantissa. full_values: int16, FullValue. offsets: int32 [BlockTiles, 4]. All on one device.
    """

    base: torch.Tensor
    bitmaps: torch.Tensor
    sign_mantissas: torch.Tensor
    full_values: torch.Tensor
    offsets: torch.Tensor


def blocks_of(rows: int, columns: int) -> tuple[int, int]:
    """BlockTiles of a weight: down and across."""
    return -(-rows // BLOCK), -(-columns // BLOCK)
