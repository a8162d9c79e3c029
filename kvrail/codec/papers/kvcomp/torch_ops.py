"""Elements to symbols and back, in torch operations that give the same bits on every device.

Halves of minima, steps and values stand for them: a range may be twice the largest number. Every product, sum and
quotient is an operation of its own, so that none is fused.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kvrail.codec.papers.kvcomp.format import SLACK, TINY
from kvrail.codec.papers.kvcomp.plan import TensorPlan


@dataclass(frozen=True, slots=True)
class Quantised:
    """A tensor's minima (element type) and scales (bfloat16), as plan.unit_shape; symbols, uint8, as plan.shape.

    escapes: bool, as plan.shape: values that are not finite, or would err by more than the bound.
    """

    minima: torch.Tensor
    scales: torch.Tensor
    symbols: torch.Tensor
    escapes: torch.Tensor


def quantise(tensor: torch.Tensor, plan: TensorPlan) -> Quantised:
    """The symbols of a tensor, shaped as plan.shape."""
    axes = plan.code.granularity.value
    odd = ~tensor.isfinite()
    low = tensor.masked_fill(odd, torch.inf).amin(axes, keepdim=True)
    high = tensor.masked_fill(odd, -torch.inf).amax(axes, keepdim=True)
    none = low.isinf()
    low, high = (end.masked_fill(none, 0) + 0 for end in (low, high))  # of the two zeros the one without a sign
    base = low.float() * 0.5
    reach = high.float() * 0.5 - base
    scales = _truncated(reach * float(np.float32(2 * plan.code.scale * (1 - SLACK))))
    steps = scales.float() * 0.5
    symbols = (tensor.float() * 0.5).sub_(base).div_(steps).masked_fill_(odd | (scales == 0), 0)
    symbols = symbols.round_().clamp_(0, plan.code.top).to(torch.uint8)
    found = dequantise(low, scales, symbols, plan).float()
    errors = (found - tensor.float()).abs_()
    rounding = (found.abs_() * 2.0 ** -(plan.format.mantissa_bits + 1)).clamp_min_(half_tiny(plan))
    return Quantised(low, scales, symbols, ~(errors <= rounding.add_(steps)) | odd)


def dequantise(minima: torch.Tensor, scales: torch.Tensor, symbols: torch.Tensor, plan: TensorPlan) -> torch.Tensor:
    """Elements, shaped as plan.shape; minima, scales: as plan.unit_shape; symbols: as plan.shape."""
    halves = symbols.float().mul_(scales.float() * 0.5).add_(minima.float() * 0.5)
    limit = plan.format.largest * 0.5
    return halves.clamp_(-limit, limit).mul_(2).to(plan.dtype)


def half_tiny(plan: TensorPlan) -> float:
    """Half of float16's smallest number, which rounding to it may cost; others' is below any step."""
    return 2.0**-25 if plan.dtype == torch.float16 else 0.0


def _truncated(numbers: torch.Tensor) -> torch.Tensor:
    """Positive float32 numbers cut to bfloat16; 0 below TINY."""
    bits = numbers.masked_fill(numbers < TINY, 0).view(torch.int32) >> 16
    return bits.to(torch.int16).view(torch.bfloat16)
