"""Closing and opening of one tile, slow and readable: what the kernels must do, bit for bit.

Closing computes in float32, a rounding after each operation. Opening is exact before its one rounding.
"""

import numpy as np
import numpy.typing as npt

from kvrail.engine.kv.fixed.form import (
    HIGH_SHIFT,
    LEAST_OFFSET,
    LEAST_SCALE,
    NO_SCALE,
    OFFSET_SHIFT,
    REFUSED,
    SCALE_SHIFT,
    SHRUNK,
    Tile,
    code_places,
    high_rows,
    row_places,
    share,
)
from kvrail.engine.kv.lossless.form import TOKENS

Bits = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]


def close_tile(values: Bits, keys: bool, bits: int) -> tuple[npt.NDArray[np.uint8], bool]:
    """The closed tile of `values`, bits of bfloat16 [64, dim], and whether it was refused."""
    tile = Tile(values.shape[1], keys, bits)
    refused = bool(((values & 0x7FFF) >= REFUSED).any())
    rows = widened(np.zeros_like(values) if refused else values)
    rows = rows.T if keys else rows
    scales, offsets = _steps(rows.min(1), rows.max(1), bits)
    codes = (rows - widened(offsets)[:, None]) / widened(scales)[:, None]
    codes = np.rint(np.clip(codes, np.float32(0), np.float32((1 << bits) - 1)))
    in_order = (codes.T if keys else codes).reshape(-1)[code_places(tile)].astype(np.uint32)
    scales = scales + SCALE_SHIFT - HIGH_SHIFT * high_rows(tile.rows, bits)
    scales = np.full_like(scales, NO_SCALE) if refused else scales
    offsets = np.where(offsets, offsets - OFFSET_SHIFT, 0)
    both = np.stack([each[row_places(tile)].reshape(-1, 4) for each in (scales, offsets)], 1)
    parts = (_packed(in_order, bits), both.astype(np.uint16).reshape(-1))
    return np.concatenate([part.view(np.uint8) for part in parts]), refused


def open_tile(data: npt.NDArray[np.uint8], dim: int, keys: bool, bits: int) -> Bits:
    """The values of a closed tile, bits of bfloat16 [64, dim]."""
    scales, offsets = steps_of(data, Tile(dim, keys, bits))
    in_order = np.empty(TOKENS * dim, np.int64)
    in_order[code_places(Tile(dim, keys, bits))] = _unpacked(data[: -4 * len(scales)].view(np.uint32), bits)
    codes = in_order.reshape(TOKENS, dim)
    return rounded(codes * scales + offsets if keys else codes * scales[:, None] + offsets[:, None])


def steps_of(data: npt.NDArray[np.uint8], tile: Tile) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Scales and offsets of a closed tile's rows, as the values have them."""
    scales, offsets = (np.empty(tile.rows, np.uint16) for _ in range(2))
    both = data[tile.steps :].view(np.uint16).reshape(-1, 2, 4)
    scales[row_places(tile)], offsets[row_places(tile)] = both[:, 0].reshape(-1), both[:, 1].reshape(-1)
    scale, offset = (widened(each).astype(np.float64) * SHRUNK for each in (scales, offsets))
    return scale * np.where(high_rows(tile.rows, tile.bits), 2.0**-129, 2.0**-133), offset


def widened(bits: Bits) -> Floats:
    """Bits of bfloat16 as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: npt.NDArray[np.float64]) -> Bits:
    """Bits of the nearest bfloat16, ties to even, of values that are 0, or NaN, or normal as bfloat16."""
    bits = np.ascontiguousarray(values).view(np.uint64)
    bits = bits + np.uint64((1 << 44) - 1) + (bits >> np.uint64(45) & np.uint64(1)) & ~np.uint64((1 << 45) - 1)
    nearest = bits.view(np.float64).astype(np.float32).view(np.uint32) >> 16
    return np.where(np.isnan(values), NO_SCALE, nearest).astype(np.uint16)


def _steps(low: Floats, high: Floats, bits: int) -> tuple[Bits, Bits]:
    """Bits of scales and offsets of rows by their smallest and largest values."""
    scales = np.maximum((high - low) * np.float32(share(bits)), np.float32(LEAST_SCALE))
    scales = (scales.view(np.uint32) + np.uint32(0xFFFF) >> np.uint32(16)).astype(np.uint16)
    none = np.abs(low) <= widened(scales) * np.float32(LEAST_OFFSET)
    return scales, np.where(none, 0, low.view(np.uint32) >> 16).astype(np.uint16)


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
