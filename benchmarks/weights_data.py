"""Tensors for the benchmark of weights: the demo model's, and Gaussian ones with a deviation a layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from kvrail.config.settings import DEMO_MODEL

DEVIATIONS = (0.011, 0.014, 0.017, 0.02, 0.023, 0.027, 0.034, 0.045)
"""Standard deviations of a Gaussian model's layers: the range of trained models' projections."""
E4M3_MAX, E5M2_MAX, E2M1_MAX = 448.0, 57344.0, 6.0
STEPS = (0.05, 0.02, 0.01, 0.005)
"""Of four pairs of consecutive checkpoints: how far a weight moves, over its layer's deviation; training slows down."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What is compressed at once. base: the checkpoint before, where the difference is compressed."""

    name: str
    tensor: torch.Tensor
    base: torch.Tensor | None = None


def _layers(values: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = values // len(DEVIATIONS) // 4096 * 4096
    return [deviation * torch.randn(size, generator=generator) for deviation in DEVIATIONS]


def _scaled(layer: torch.Tensor, largest: float, dtype: torch.dtype) -> torch.Tensor:
    """A layer quantised with one scale, as FP8 checkpoints are."""
    return (layer * (largest / layer.abs().max())).to(dtype)


def _nvfp4_scales(layer: torch.Tensor) -> torch.Tensor:
    """E4M3 scales of groups of 16 values, under one scale of the tensor (the recipe of section 3.4)."""
    groups = layer.reshape(-1, 16).abs().amax(dim=1) / E2M1_MAX
    return (groups * (E4M3_MAX / groups.max())).to(torch.float8_e4m3fn)


def _mxfp4(layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, two a byte, and E8M0 scales of groups of 32 (OCP microscaling formats 1.0)."""
    groups = layer.reshape(-1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(dim=1))) - 2
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = groups / torch.exp2(exponents)[:, None]
    nearest = torch.bucketize(scaled.abs(), (grid[1:] + grid[:-1]) / 2).to(torch.uint8)
    codes = (nearest | (scaled < 0).to(torch.uint8) << 3).reshape(-1)
    return codes[0::2] | codes[1::2] << 4, (exponents + 127).to(torch.uint8)


def _demo() -> list[torch.Tensor]:
    """The demo model's matrices, bfloat16."""
    found = load_file(Path(DEMO_MODEL) / "model.safetensors")
    return [tensor.reshape(-1) for tensor in found.values() if tensor.dim() > 1]


def _checkpoints(layers: list[torch.Tensor]) -> Iterator[Sample]:
    """Four pairs, each a step of a Gaussian walk, kept in float32 as a trainer does."""
    generator = torch.Generator().manual_seed(1)
    now = torch.cat(layers)
    spread = torch.cat([torch.full_like(layer, float(layer.std())) for layer in layers])
    for step in STEPS:
        after = now + step * spread * torch.randn(now.shape, generator=generator)
        yield Sample(f"delta, step {step:g}", after.bfloat16(), now.bfloat16())
        now = after


def samples(values: int) -> Iterator[Sample]:
    """All of them, each of about `values` values."""
    layers, demo = _layers(values), _demo()
    whole = torch.cat(layers)
    yield Sample("Gaussian, bfloat16", whole.bfloat16())
    yield Sample("demo model, bfloat16", torch.cat(demo))
    yield Sample("Gaussian, float16", whole.half())
    yield Sample("Gaussian, float32", whole)
    yield Sample("Gaussian, bfloat16 kept as float32", whole.bfloat16().float())
    yield Sample(
        "Gaussian, float8_e4m3fn", torch.cat([_scaled(each, E4M3_MAX, torch.float8_e4m3fn) for each in layers])
    )
    demo8 = [_scaled(each.float(), E4M3_MAX, torch.float8_e4m3fn) for each in demo]
    yield Sample("demo model, float8_e4m3fn", torch.cat(demo8))
    yield Sample("Gaussian, float8_e5m2", torch.cat([_scaled(each, E5M2_MAX, torch.float8_e5m2) for each in layers]))
    yield from _checkpoints(layers)
    yield Sample("Gaussian, NVFP4 scales", torch.cat([_nvfp4_scales(each) for each in layers]))
    whole16 = [each[: each.numel() // 16 * 16].float() for each in demo]
    yield Sample("demo model, NVFP4 scales", torch.cat([_nvfp4_scales(each) for each in whole16]))
    codes, scales = _mxfp4(whole)
    yield Sample("Gaussian, MXFP4 scales", scales.view(torch.float8_e8m0fnu))
    yield Sample("Gaussian, MXFP4 values", codes)
