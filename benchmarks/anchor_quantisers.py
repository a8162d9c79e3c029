"""Coarse forms of KV. Each takes one layer's keys or values, bfloat16 [contexts, tokens, kv_heads, dim] with tokens a
multiple of PAGE, and gives what a decode worker would hold, with its size: of stage 0, and of all stages to bfloat16.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

PAGE = 64
TILE = 4096
"""Values of a tile: a page of one head, at 64 tokens of 64 channels."""
CHANNEL, TOKEN = 2, 4
"""Axes of [contexts, pages, PAGE, kv_heads, dim] over which values share a scale."""
TILE_BITS = (8 + 4 * 64 + 8 * 8 / 64) / TILE
"""Bits a value for tops, drops and group offsets."""
SAMPLE = 2
"""Contexts from which a residual's entropy is estimated."""


@dataclass(frozen=True, slots=True)
class Coarse:
    """tensor: bfloat16, shaped as the input; bits: a value, of stage 0; total: a value, of all stages to every bit.

    coded: bits of stage 0 where its codes are entropy-coded, or NaN where that isn't considered.
    """

    tensor: torch.Tensor
    bits: float
    total: float
    coded: float = math.nan


Quantiser = Callable[[torch.Tensor], Coarse]


def planes(mantissa: int, *, escapes_first: bool = False, midpoint: bool = True) -> Quantiser:
    """Planes of `splitzip-channel` (kvrail/codec/splitzip/README.md): sign, 3-bit code, the mantissa's top bits.

    escapes_first: records of escapes come in stage 0; else they come last, and an escape has the code 7 of the
    smallest numbers until then. midpoint: a value is put in the middle of its interval, else at its lower end.
    """
    return partial(_planes, mantissa=mantissa, escapes_first=escapes_first, midpoint=midpoint)


def _planes(x: torch.Tensor, mantissa: int, escapes_first: bool, midpoint: bool) -> Coarse:
    bits = _pages(x).view(torch.int16).int()
    exponent = bits >> 7 & 255
    top = _channel_top(exponent)
    distance = top - exponent
    escape = distance >= 8
    code = distance if escapes_first else distance.clamp_max(7)
    kept = bits & 127 & -(1 << 7 - mantissa)
    middle = 1 << 6 - mantissa if midpoint and mantissa < 7 else 0
    rebuilt = bits & -32768 | (top - code).clamp_min(0) << 7 | kept | middle
    records = 16 * escape.sum().item() + 8 * _wide_escapes(distance, 8)
    sparse = records / x.numel() + 16 / TILE
    stage0 = 1 + mantissa + TILE_BITS + (sparse if escapes_first else 0)
    entropy = _entropy(code.clamp_max(7).flatten())
    return Coarse(
        _unpaged(rebuilt.short().view(torch.bfloat16), x), 3 + stage0, 11 + TILE_BITS + sparse, entropy + stage0
    )


def levels(kept: int) -> Quantiser:
    """Levels of decision 0010: 2^kept an octave, more in the top two."""
    return partial(_levels, kept=kept)


def _levels(x: torch.Tensor, kept: int) -> Coarse:
    octave, size = 128, 128 >> kept
    bits = _pages(x).view(torch.int16).int()
    exponent = bits >> 7 & 255
    top = _channel_top(exponent)
    distance = top - exponent
    escape = distance >= 7
    depth = (top * octave + octave - 1 - (bits & 32767)).where(~escape, 7 * octave - 1 - (bits & 127))
    fine = torch.logical_and(depth < 2 * octave, depth % octave >= octave // 2)
    width = torch.where(fine, size // 2, size)
    middle = depth // width * width + width // 2 - 1
    rebuilt = bits & -32768 | (top * octave + octave - 1 - middle).clamp_min(0)
    sparse = (16 * escape.sum().item() + 8 * _wide_escapes(distance, 7)) / x.numel() + 16 / TILE
    tensor = _unpaged(rebuilt.short().view(torch.bfloat16), x)
    return Coarse(tensor, 4 + kept + TILE_BITS, 11 + TILE_BITS + sparse)


def coded(mantissa: int) -> Quantiser:
    """Stage 0 of `splitzip-progressive-ans`: sign, exponent, the mantissa's top bits; exponents cost their entropy."""
    return partial(_coded, mantissa=mantissa)


def _coded(x: torch.Tensor, mantissa: int) -> Coarse:
    bits = _pages(x).view(torch.int16).int()
    exponent = bits >> 7 & 255
    distance = _channel_top(exponent) - exponent
    middle = 1 << 6 - mantissa if mantissa < 7 else 0
    rebuilt = bits & -(1 << 7 - mantissa) | middle
    records = 16 * (distance >= 16).sum().item() + 8 * _wide_escapes(distance, 16)
    exponents = _entropy((distance & 15).flatten()) + TILE_BITS + records / x.numel() + 16 / TILE
    stage0 = exponents + 1 + mantissa
    return Coarse(_unpaged(rebuilt.short().view(torch.bfloat16), x), stage0, exponents + 8)


def fixed_point(bits: int) -> Quantiser:
    """Sign and the top bits of the magnitude, in units of a power of two by channel and page.

    The rest of a value has as many bits as it needs: its exponent in unary, if stage 0 left it open, and its mantissa.
    """
    return partial(_fixed_point, bits=bits)


def _fixed_point(x: torch.Tensor, bits: int) -> Coarse:
    pages = _pages(x)
    exponent = pages.view(torch.int16).int() >> 7 & 255
    top = _channel_top(exponent)
    step = torch.exp2((top - 127 + 2 - bits).float())
    rebuilt = torch.copysign(((pages.float().abs() / step).floor() + 0.5) * step, pages.float())
    distance = (top - exponent).clamp_max(16)
    known = bits - 1
    rest = torch.where(distance < known, 7 - (known - 1 - distance), 7 + distance - known + 1).clamp_min(0)
    return Coarse(_unpaged(rebuilt.bfloat16(), x), bits + TILE_BITS, bits + TILE_BITS + rest.float().mean().item())


def uniform(bits: int, axis: int) -> Quantiser:
    """INT4 and INT8: minimum and step in half precision, over the page of a channel or the head of a token."""
    return partial(_uniform, bits=bits, axis=axis)


def _uniform(x: torch.Tensor, bits: int, axis: int) -> Coarse:
    rebuilt, size = min_max(x, bits, axis)
    return Coarse(rebuilt, size, size + residual_entropy(x, rebuilt))


def min_max(x: torch.Tensor, bits: int, axis: int, group: int | None = None) -> tuple[torch.Tensor, float]:
    """What `uniform` leaves, and its bits a value; group: of KIVI, values along `axis` that share a scale."""
    pages = _pages(x).float()
    group = group or pages.shape[axis]
    groups = torch.unflatten(pages, axis, (-1, group))
    low = groups.amin(axis + 1, keepdim=True)
    step = (groups.amax(axis + 1, keepdim=True) - low) / (2**bits - 1)
    low, step = low.half().float(), step.half().float().clamp_min(2**-24)
    level = ((groups - low) / step).round().clamp(0, 2**bits - 1)
    return _unpaged((low + level * step).bfloat16(), x), bits + 32 / group


def error_bounded(relative: float, axis: int) -> Quantiser:
    """KVComp: a step of `relative` times the range over `axis`, levels entropy-coded (their order-0 entropy counts)."""
    return partial(_error_bounded, relative=relative, axis=axis)


def _error_bounded(x: torch.Tensor, relative: float, axis: int) -> Coarse:
    pages = _pages(x).float()
    low = pages.amin(axis, keepdim=True)
    step = ((pages.amax(axis, keepdim=True) - low) * relative).clamp_min(2**-24)
    low, step = low.half().float(), step.half().float().clamp_min(2**-24)
    level = ((pages - low) / step).round()
    rebuilt = _unpaged((low + level * step).bfloat16(), x)
    size = _entropy(level.int().clamp_min(0).flatten()) + 32 / pages.shape[axis]
    return Coarse(rebuilt, size, size + residual_entropy(x, rebuilt))


def lynx(chunk: int, alpha: float, *, full: bool = False) -> Quantiser:
    """Lynx, Algorithm 1, with the sign of the centred value (line 12) and 120 for 127 (line 10), which would overflow.

    chunk: tokens of a chunk; a page of it has 256. full: anchor and residual, which is as fine as Lynx gets.
    """
    return partial(_lynx, chunk=chunk, alpha=alpha, full=full)


def _lynx(x: torch.Tensor, chunk: int, alpha: float, full: bool) -> Coarse:
    contexts, tokens, *rest = x.shape
    page = x.float().view(contexts, tokens // 256, 256, *rest)
    low = page.amin(2, keepdim=True).half().float()
    scale = (page.amax(2, keepdim=True) - low).half().float().clamp_min(2**-24)
    normal = ((page - low) / scale).view(contexts, tokens // 256, 256 // chunk, chunk, *rest)
    mean = normal.mean(3, keepdim=True).half().float()
    sigma = (normal - mean).abs().amax(3, keepdim=True).half().float().clamp_min(2**-24)
    centred = ((normal - mean) / sigma).clamp(-1, 1)
    index = (torch.log1p(alpha * centred.abs()) / math.log1p(alpha) * 120).round()
    coarse = index if full else ((index + 7) / 16).floor() * 16
    size = torch.expm1(coarse / 120 * math.log1p(alpha)) / alpha
    rebuilt = (torch.copysign(size, centred) * sigma + mean).view(page.shape) * scale + low
    tensor = rebuilt.view(x.shape).bfloat16()
    bits = (8 if full else 4) + (2 + 2 * 256 // chunk) * 16 / 256
    return Coarse(tensor, bits, bits + residual_entropy(x, tensor))


def residual_entropy(x: torch.Tensor, coarse: torch.Tensor) -> float:
    """Estimate of the bits a value that lead from `coarse` to `x`, both bfloat16.

    The order-0 entropy of the distance in bfloat16 numbers, given the exponent of `coarse`; of SAMPLE contexts.
    """
    found, start = _ordered(x[:SAMPLE]), _ordered(coarse[:SAMPLE])
    given = (coarse[:SAMPLE].contiguous().view(torch.int16).int() >> 7 & 255).flatten()
    joint = given.long() << 17 | (found - start + (1 << 16)).flatten()
    return _unique_entropy(joint) - _unique_entropy(given)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """int32 numbers in the order of the bfloat16 numbers."""
    bits = x.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def _unique_entropy(keys: torch.Tensor) -> float:
    _, counts = np.unique(keys.numpy(), return_counts=True)
    return _bits_of(torch.from_numpy(counts))


def _entropy(levels: torch.Tensor) -> float:
    return _bits_of(torch.bincount(levels))


def _bits_of(counts: torch.Tensor) -> float:
    share = counts[counts > 0].double() / counts.sum()
    return -(share * share.log2()).sum().item()


def _channel_top(exponent: torch.Tensor) -> torch.Tensor:
    """README.md, "Codes": the largest exponent of a channel in a page, at most 15 below that of its head."""
    channel = exponent.amax(CHANNEL, keepdim=True)
    return torch.maximum(channel, channel.amax(TOKEN, keepdim=True) - 15)


def _wide_escapes(distance: torch.Tensor, window: int) -> int:
    """Escapes of tiles that have one 16 or more outside the window."""
    wide = (distance >= window + 16).any(TOKEN, keepdim=True).any(CHANNEL, keepdim=True)
    return int(((distance >= window) & wide).sum())


def _pages(x: torch.Tensor) -> torch.Tensor:
    """[contexts, pages, PAGE, kv_heads, dim]."""
    return x.contiguous().view(len(x), -1, PAGE, *x.shape[2:])


def _unpaged(pages: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return pages.reshape(like.shape)
