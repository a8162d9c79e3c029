"""Elements to codes and back, in torch operations that give the same bits on every device.

Halves of minima, steps and values stand for them: a range may be twice the largest number. Every product, sum and
quotient is an operation of its own, so that none is fused.
"""

import torch
from torch.nn.functional import pad

from kvrail.codec.integer.plan import TensorPlan


def quantise(tensor: torch.Tensor, plan: TensorPlan) -> dict[str, torch.Tensor]:
    """The sections of a tensor, shaped as plan.shape, by name: flags bool, minima, scales, codes uint8.

    Flagged pages, which hold a value that is not finite, have zeros in the other sections.
    """
    low, high = tensor.amin(plan.code.axis, keepdim=True), tensor.amax(plan.code.axis, keepdim=True)
    flags = ~(low.isfinite() & high.isfinite()).flatten(2).all(2)  # both are NaN where a value is
    raw = flags.view(*flags.shape, 1, 1, 1)
    low, high = (end.masked_fill(raw, 0) + 0 for end in (low, high))  # of the two zeros the one without a sign
    base = low.float() * 0.5
    reach = high.float() * 0.5 - base
    scales = _rounded_up(reach * (2 / plan.code.top), plan.scale_dtype)
    codes = (tensor.float() * 0.5).sub_(base).div_(scales.float() * 0.5)
    codes = codes.masked_fill_(scales == 0, 0).round_().to(torch.uint8)  # a rounded-up scale reaches the top
    return {"flags": flags, "minima": low, "scales": scales, "codes": _packed(codes.flatten(2), plan)}


def dequantise(minima: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, plan: TensorPlan) -> torch.Tensor:
    """Elements, shaped as plan.shape; minima, scales: as plan.group_shape; codes: uint8 [pages, code_bytes]."""
    halves = _unpacked(codes, plan).view(plan.shape).float()
    halves.mul_(scales.float() * 0.5).add_(minima.float() * 0.5)
    limit = plan.format.largest * 0.5  # a scale that was rounded up can lead beyond it
    return halves.clamp_(-limit, limit).mul_(2).to(plan.dtype)


def _rounded_up(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Positive float32 numbers as the next ones of a type of 16 bits that are no smaller."""
    nearest = numbers.to(dtype)
    return (nearest.view(torch.int16) + (nearest.float() < numbers)).view(dtype)


def _packed(codes: torch.Tensor, plan: TensorPlan) -> torch.Tensor:
    """Codes, uint8 [layers, pages, values], as bytes [layers, pages, code_bytes]: the first of two in the low half."""
    if plan.code.bits == 8:
        return codes
    even = pad(codes, (0, plan.page_values % 2))
    return even[..., 0::2] | even[..., 1::2] << 4


def _unpacked(packed: torch.Tensor, plan: TensorPlan) -> torch.Tensor:
    """The reverse, uint8 [pages, values]."""
    if plan.code.bits == 8:
        return packed
    pairs = torch.stack((packed & 15, packed >> 4), dim=-1)
    return pairs.flatten(1)[:, : plan.page_values]
