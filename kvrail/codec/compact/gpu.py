"""Products with compact weights on an NVIDIA GPU, and the weights unpacked there."""

import ctypes

import torch

from kvrail.codec.compact.format import CompactWeight
from kvrail.codec.fused import launch
from kvrail.codec.fused.builds import Form

FORM = Form("compact", (ctypes.c_void_p,) * 4)
"""For the launch of its kernels."""


def multiply(x: torch.Tensor, weight: CompactWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What torch.nn.functional.linear gives, with a compact weight: bfloat16 [tokens, rows].

    x: bfloat16 [tokens, columns], contiguous, on the weight's device. bias: bfloat16 [rows]. The bits are those of
    cuBLASLt where it does not split sums and gets at least 32 tokens.
    """
    if len(x) > launch.MOST_TOKENS:
        return torch.nn.functional.linear(x, unpack(weight), bias)
    parts = (weight.blocks, weight.index, weight.counts, weight.scales)
    return launch.multiply(FORM, x, [part.data_ptr() for part in parts], weight.rows, bias)


def prepare(weight: CompactWeight) -> None:
    """Compile and load what products with a weight of this shape need; nothing of it can be done during a capture."""
    launch.prepare(FORM, weight.blocks.device, weight.rows)


def unpack(weight: CompactWeight) -> torch.Tensor:
    """The weight, bfloat16 [rows, columns], bit for bit as it was compressed."""
    out = torch.empty(weight.rows, weight.columns, dtype=torch.bfloat16, device=weight.blocks.device)
    parts = (weight.blocks, weight.index, weight.counts, weight.shifts)
    return launch.unpack(FORM, [part.data_ptr() for part in parts], out)
