"""The form of compact weights; see README.md beside this."""

from dataclasses import dataclass

import torch

from kvrail.codec.fused.weight import FusedWeight

LOW_BYTES, CODE_BYTES = 1024, 384
FIXED_BYTES = LOW_BYTES + CODE_BYTES
"""Bytes of a block before its records."""
UNIT = 16
"""Blocks begin at multiples of it, in bytes."""
FIRST_EXPONENT, WINDOW = 120, 8
"""Exponents in the form that have a code: FIRST_EXPONENT and the seven after it."""


@dataclass(frozen=True, slots=True, eq=False)
class CompactWeight(FusedWeight):
    """A weight, bfloat16 [rows, columns], in the compact form.

    blocks: uint8. index, counts: int32 [tiles]. shifts: int32 [rows]. scales: float32 [rows], 2^shift. All on one
    device.
    """

    blocks: torch.Tensor
    index: torch.Tensor
    counts: torch.Tensor
    shifts: torch.Tensor
    scales: torch.Tensor
