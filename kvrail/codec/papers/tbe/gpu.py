"""Products with TCA-TBE weights on an NVIDIA GPU, and the weights decompressed there (ZipServ, section 4.4)."""

import ctypes

import torch

from kvrail.codec.fused import launch
from kvrail.codec.fused.builds import Form
from kvrail.codec.papers.tbe.cpu import check
from kvrail.codec.papers.tbe.format import TbeWeight

_SCRATCH = 2208
"""SCRATCH_BYTES of gpu_kernels.cu; a block of `unpack` has eight warps, each with a tile of 2,048 bytes besides."""
FORM = Form("papers/tbe", (ctypes.c_void_p,) * 5, _SCRATCH, 8 * (2048 + _SCRATCH))
"""For the launch of its kernels."""


def multiply(x: torch.Tensor, weight: TbeWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What torch.nn.functional.linear gives, with a weight that `prepare` has had: bfloat16 [tokens, rows].

    x: bfloat16 [tokens, columns], contiguous, on the weight's device. bias: bfloat16 [rows]. The bits are those of
    cuBLASLt where it does not split sums and gets at least 32 tokens.
    """
    if len(x) > launch.MOST_TOKENS:
        return torch.nn.functional.linear(x, unpack(weight), bias)
    return launch.multiply(FORM, x, _arguments(weight), weight.rows, bias)


def prepare(weight: TbeWeight) -> None:
    """Check a weight, and compile and load what products with it need; nothing of it can be done during a capture.

    Raises CodecError where its parts do not fit each other: kernels read without looking.
    """
    check(weight)
    launch.prepare(FORM, weight.bitmaps.device, weight.rows)


def unpack(weight: TbeWeight) -> torch.Tensor:
    """A weight that `prepare` has had, bfloat16 [rows, columns], bit for bit as it was compressed."""
    out = torch.empty(weight.rows, weight.columns, dtype=torch.bfloat16, device=weight.bitmaps.device)
    return launch.unpack(FORM, _arguments(weight), out)


def _arguments(weight: TbeWeight) -> list[int]:
    return [part.data_ptr() for part in weight.parts.values()]
