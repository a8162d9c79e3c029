"""Closing and opening of one tile, slow and readable: what the kernels must do, bit for bit.

Closing computes in float32, a rounding after each operation. Opening is exact before its one rounding.
"""

import numpy as np
import numpy.typing as npt

from kvrail.engine.kv.fixed.form import (
    LEAST_MIDDLE,
    LEAST_SCALE,
    NO_SCALE,
    REFUSED,
    SLACK,
    Tile,
    code_places,
    row_places,
)
from kvrail.engine.kv.lossless.form import TOKENS

Bits = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]


def close_tile(values: Bits, keys: bool, bits: int) -> tuple[npt.NDArray[np.uint8], bool]:
    """The closed tile of `values`, bits of bfloat16 [64, dim], and whether it was refused."""
    tile, half = Tile(values.shape[1], keys, bits), 1 << bits - 1
    refused = bool(((values & 0x7FFF) >= REFUSED).any())
    rows = widened(np.zeros_like(values) if refused else values)
    rows = rows.T if keys else rows
    scales, middles = _scales(rows.min(1), rows.max(1), np.float32(half))
    codes = (rows - widened(middles)[:, None]) / widened(scales)[:, None]
    codes = np.rint(np.clip(codes, np.float32(-half), np.float32(half - 1))) + half
    if refused:
        scales[:] = NO_SCALE
    in_order = (codes.T if keys else codes).reshape(-1)[code_places(tile)].astype(np.uint32)
    order = row_places(tile)
    parts = (_packed(in_order, bits), scales[order], middles[order])
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts]), refused


def open_tile(data: npt.NDArray[np.uint8], dim: int, keys: bool, bits: int) -> Bits:
    """The values of a closed tile, bits of bfloat16 [64, dim]."""
    tile = Tile(dim, keys, bits)
    scales, middles = (np.empty(tile.rows, np.uint16) for _ in range(2))
    scales[row_places(tile)] = data[tile.scales : tile.middles].view(np.uint16)
    middles[row_places(tile)] = data[tile.middles :].view(np.uint16)
    unsigned = np.empty(TOKENS * dim, np.int64)
    unsigned[code_places(tile)] = _unpacked(data[: tile.scales].view(np.uint32), bits)
    codes = unsigned.reshape(TOKENS, dim) - (1 << bits - 1)
    scale, middle = (widened(each).astype(np.float64) for each in (scales, middles))
    if keys:
        return rounded(codes * scale + middle)
    return rounded(codes * scale[:, None] + middle[:, None])


def widened(bits: Bits) -> Floats:
    """Bits of bfloat16 as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: npt.NDArray[np.float64]) -> Bits:
    """Bits of the nearest bfloat16, ties to even, of values that are 0, or NaN, or normal as bfloat16."""
    bits = np.ascontiguousarray(values).view(np.uint64)
    bits = bits + np.uint64((1 << 44) - 1) + (bits >> np.uint64(45) & np.uint64(1)) & ~np.uint64((1 << 45) - 1)
    nearest = bits.view(np.float64).astype(np.float32).view(np.uint32) >> 16
    return np.where(np.isnan(values), NO_SCALE, nearest).astype(np.uint16)


def _scales(low: Floats, high: Floats, half: np.float32) -> tuple[Bits, Bits]:
    """Scales and middles of rows by their smallest and largest values."""
    one = np.float32(1)
    span = high - low
    middles = _nearest(low + span * (half / (half + half - one)))
    middles[np.abs(widened(middles)) <= span * np.float32(LEAST_MIDDLE)] = 0
    middle = widened(middles)
    scale = np.maximum((middle - low) * (one / half), (high - middle) * (one / (half - one)))
    scale = np.maximum(scale * np.float32(SLACK), np.float32(LEAST_SCALE))
    return (scale.view(np.uint32) + np.uint32(0xFFFF) >> np.uint32(16)).astype(np.uint16), middles


def _nearest(values: Floats) -> Bits:
    """Bits of the nearest bfloat16 of finite values, ties to even."""
    bits = values.view(np.uint32)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)).astype(np.uint16)


def _shifts(bits: int) -> npt.NDArray[np.uint32]:
    """Where each value of a word begins."""
    value = np.arange(32 // bits)
    return (bits * (value // 2) + 16 * (value % 2)).astype(np.uint32)


def _packed(codes: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint32]:
    """Codes, in the order of storage, as words."""
    return np.asarray(np.bitwise_or.reduce(codes.reshape(-1, 32 // bits) << _shifts(bits), axis=1), np.uint32)


def _unpacked(words: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint32]:
    """The reverse of `_packed`."""
    return (words[:, None] >> _shifts(bits) & np.uint32((1 << bits) - 1)).reshape(-1)
