"""Closing and opening of one tile of values, slow and readable: what the kernels must do, bit for bit.

Closing sums integers, so that no order of sums matters, and rounds to float32 where it divides.
"""

import numpy as np
import numpy.typing as npt

from kvrail.engine.kv.fixed.form import REFUSED
from kvrail.engine.kv.lossless.form import TOKENS
from kvrail.engine.kv.rotated.form import (
    BIAS,
    BLOCK,
    FRACTION,
    LARGEST,
    LEAST_CODE,
    LEAST_MAGNITUDE,
    MOST_CODE,
    MOST_MEAN,
    MOST_SHIFT,
    REFUSED_CODE,
    UNIT,
    Tile,
    channel_places,
    code_places,
    signs,
)
from tests.reference.fixed_pages import Bits, rounded, widened

Integers = npt.NDArray[np.int64]


def close_tile(values: Bits) -> tuple[npt.NDArray[np.uint8], bool]:
    """The closed tile of `values`, bits of bfloat16 [64, dim], and whether it was refused."""
    refused = bool(((values & 0x7FFF) >= REFUSED).any())
    if refused:
        values = np.zeros_like(values)
    magnitude = max(int((values & 0x7FFF).max() >> 7) - 127, LEAST_MAGNITUDE)
    fixed = np.rint(np.ldexp(widened(values), FRACTION - magnitude)).astype(np.int64)
    units, means = _channels(fixed)
    largest = int(units.max())
    shifts = largest - units
    y = np.ldexp((2 * fixed - (means << units)).astype(np.float32), UNIT - 1 - units)
    codes, scales = _rotated(np.rint(np.clip(y, -LARGEST, LARGEST)).astype(np.int64))
    exponent = largest + magnitude - FRACTION + BIAS
    tokens = np.arange(TOKENS)
    scales = np.full_like(scales, 255) if refused else scales | (exponent >> tokens % 8 & 1) << 7
    words = codes.reshape(-1)[code_places(values.shape[1])].reshape(-1, 16) << 2 * np.arange(16)
    channels = (means & 31 | shifts << 5)[channel_places(values.shape[1])]
    parts = (words.sum(1).astype(np.uint32).view(np.uint8), channels, scales)
    return np.concatenate([part.astype(np.uint8) for part in parts]), refused


def open_tile(data: npt.NDArray[np.uint8], dim: int) -> Bits:
    """The values of a closed tile, bits of bfloat16 [64, dim]."""
    tile = Tile(dim)
    words = data[: tile.means].view(np.uint32).astype(np.int64)
    levels = np.empty(TOKENS * dim, np.int64)
    levels[code_places(dim)] = 2 * (words[:, None] >> 2 * np.arange(16) & 3).reshape(-1) - 3
    sums = (levels.reshape(TOKENS, -1, BLOCK) @ signs()).reshape(TOKENS, dim)
    mean, unit = channels_of(data, dim)
    return rounded((sums * scales_of(data, dim)[:, None] * 2.0**-13 + mean) * unit)


def channels_of(data: npt.NDArray[np.uint8], dim: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Read a closed tile's channels: means in units, and units."""
    tile = Tile(dim)
    found = np.empty(dim, np.int64)
    found[channel_places(dim)] = data[tile.means : tile.scales]
    exponent = int((data[tile.scales : tile.scales + 8].astype(np.int64) >> 7) @ (1 << np.arange(8))) - BIAS
    return ((found & 31 ^ 16) - 16) / 2, np.ldexp(1.0, exponent - (found >> 5))


def scales_of(data: npt.NDArray[np.uint8], dim: int) -> npt.NDArray[np.float64]:
    """Scales of a closed tile's tokens."""
    codes = data[Tile(dim).scales :].astype(np.uint32) & 127
    scales = (codes + np.uint32(LEAST_CODE) << np.uint32(20)).view(np.float32).astype(np.float64)
    return np.where(codes == REFUSED_CODE, np.nan, np.where(codes, scales, 0.0))


def _channels(fixed: Integers) -> tuple[Integers, Integers]:
    """Of tokens [64, dim] as integers: each channel's unit as a power of two, and its mean in halves of it."""
    sums = fixed.sum(0)
    spread = _exponent(TOKENS * (fixed * fixed).sum(0) - sums * sums)  # of 4,096 variances
    units = np.maximum(np.maximum(spread - 11 >> 1, _exponent(np.abs(sums)) - 8), 0)
    units = np.maximum(units, units.max() - MOST_SHIFT)
    return units, np.clip(sums + (16 << units) >> 5 + units, -MOST_MEAN, MOST_MEAN)


def _exponent(numbers: Integers) -> Integers:
    """The exponents of numbers as float32; that of 0 is -127."""
    return (numbers.astype(np.float32).view(np.uint32) >> 23).astype(np.int64) - 127


def _rotated(y: Integers) -> tuple[Integers, Integers]:
    """Codes [64, dim] and scales [64] of tokens [64, dim]."""
    dim = y.shape[1]
    z = (y.reshape(TOKENS, -1, BLOCK) @ signs().T).reshape(TOKENS, dim)
    norm = 64 * (y * y).sum(1)
    outer = dim * z * z > norm[:, None]
    levels = np.where(outer, 3, 1)
    product = np.maximum((np.abs(z) * levels).sum(1), 1)
    # The first makes sums over many tokens come out right; the second bounds a token's error by its norm.
    fair = norm.astype(np.float32) / product.astype(np.float32)
    bound = (2 * product).astype(np.float32) / (levels * levels).sum(1).astype(np.float32)
    bits = np.minimum(fair, bound).view(np.uint32).astype(np.int64)
    rounded_bits = bits + 0x7FFFF + (bits >> 20 & 1) >> 20
    return np.where(z < 0, 1 - outer, 2 + outer), np.clip(rounded_bits - LEAST_CODE, 0, MOST_CODE)
