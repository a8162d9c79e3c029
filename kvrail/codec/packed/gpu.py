"""Products with packed weights on an NVIDIA GPU, and the weights unpacked there."""

import ctypes

import torch

from kvrail.codec.fused import launch
from kvrail.codec.fused.builds import Form
from kvrail.codec.packed.format import PackedWeight

FORM = Form("packed", (ctypes.c_void_p,) * 4)
"""For the launch of its kernels."""


def multiply(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What torch.nn.functional.linear gives, with the weight packed: bfloat16 [tokens, rows].

    x: bfloat16 [tokens, columns], contiguous, on the weight's device. bias: bfloat16 [rows]. The bits are those of
    cuBLASLt where it does not split sums and gets at least 32 tokens.
    """
    if len(x) > launch.MOST_TOKENS:
        return torch.nn.functional.linear(x, unpack(weight), bias)
    parts = (weight.blocks, weight.index, weight.counts, weight.scales)
    return launch.multiply(FORM, x, [part.data_ptr() for part in parts], weight.rows, bias)


def prepare(weight: PackedWeight) -> None:
    """Compile and load what products with a weight of this shape need; nothing of it can be done during a capture."""
    launch.prepare(FORM, weight.blocks.device, weight.rows)


def unpack(weight: PackedWeight) -> torch.Tensor:
    """The weight, bfloat16 [rows, columns], bit for bit as it was packed."""
    out = torch.empty(weight.rows, weight.columns, dtype=torch.bfloat16, device=weight.blocks.device)
    parts = (weight.blocks, weight.index, weight.counts, weight.shifts)
    return launch.unpack(FORM, [part.data_ptr() for part in parts], out)
