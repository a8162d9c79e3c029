"""Closing and opening of one pair of tiles, slow and readable: what the kernels must do, bit for bit.

Closing computes in float32, a rounding after each operation. Opening is exact before its one rounding.
"""

import numpy as np
import numpy.typing as npt

from kvrail.codec.papers.kvcomp.format import TensorCode
from kvrail.engine.kv.fixed.form import (
    LEAST_OFFSET,
    LEAST_SCALE,
    NO_SCALE,
    OFFSET_SHIFT,
    REFUSED,
    SCALE_SHIFT,
    SHRUNK,
)
from kvrail.engine.kv.kvcomp.form import (
    KEYS,
    MAX_BITS,
    SPREAD,
    STREAMS,
    UNIT,
    VALUES,
    WARPS,
    Pair,
    Part,
    reading_tables,
    share,
    stream_places,
    writing_tables,
)
from kvrail.engine.kv.lossless.form import TOKENS, base_places
from tests.reference.fixed_pages import Bits, rounded, widened

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]


def close_pair(keys: Bits, values: Bits) -> tuple[Bytes, int]:
    """The closed pair of `keys` and `values`, bits of bfloat16 [64, dim], and how many of both were refused."""
    pair = Pair(keys.shape[1], values.shape[1])
    tables = writing_tables()
    fine, coarse = (_Quantised(keys, pair.parts[0], code, table) for code, table in zip(KEYS, tables[0], strict=True))
    short, even = (
        _Quantised(values, pair.parts[1], code, table) for code, table in zip(VALUES, tables[1], strict=True)
    )
    of_values = int(not (short.fits and short.units <= even.units))
    second = (short, even)[of_values]
    of_keys = int(not (fine.fits and fine.units + second.units <= pair.room))
    first = (fine, coarse)[of_keys]
    data = np.zeros(pair.bytes, np.uint8)
    begin = 2 * pair.streams
    at = 0
    for part, tile, number in ((pair.parts[0], first, of_keys), (pair.parts[1], second, of_values)):
        data[at : at + part.bytes] = tile.part(number, begin - 2 * at)
        begin, at = begin + tile.units, at + part.bytes
    bits = np.concatenate([first.bits(), second.bits()])
    data[pair.streams : pair.streams + -(-len(bits) // 8)] = np.packbits(bits, bitorder="little")
    return data, int(first.refused) + int(second.refused)


def open_pair(data: Bytes, key_dim: int, value_dim: int) -> tuple[Bits, Bits]:
    """The keys and the values of a closed pair, bits of bfloat16 [64, dim]."""
    pair = Pair(key_dim, value_dim)
    tables = reading_tables()
    keys, values = pair.parts
    return _opened(data, keys, tables[0]), _opened(data[keys.bytes :], values, tables[1])


def steps_of(data: Bytes, part: Part) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Scales and offsets of the rows of a part, which begins `data`, as the values have them."""
    both = data[: part.lanes].view(np.uint16).reshape(-1, 2, 4)
    found = np.empty((2, part.rows))
    found[:, base_places(part.rows, keys=True)] = widened(both.transpose(1, 0, 2).reshape(2, -1))
    return found[0] * SHRUNK * 2.0**-133, found[1] * SHRUNK


def code_of(data: Bytes, part: Part) -> int:
    """Which code a part, which begins `data`, names."""
    return int(data[part.head : part.head + 4].view(np.uint16)[1])


class _Quantised:
    """A tile with one of its codes. units: of all streams; fits: whether their lengths can be said."""

    def __init__(self, values: Bits, part: Part, code: TensorCode, table: Words) -> None:
        self.refused = bool(((values & 0x7FFF) >= REFUSED).any())
        self._part = part
        rows = widened(np.zeros_like(values) if self.refused else values)
        rows = rows.T if part.keys else rows
        low, high = rows.min(1), rows.max(1)
        scales = np.maximum((high - low) * np.float32(share(code)), np.float32(LEAST_SCALE)).view(np.uint32) >> 16
        self._scales = scales.astype(np.uint16)
        none = np.abs(low) <= widened(self._scales) * np.float32(LEAST_OFFSET)
        self._offsets = np.where(none, 0, low.view(np.uint32) >> 16).astype(np.uint16)
        symbols = (rows - widened(self._offsets)[:, None]) / widened(self._scales)[:, None]
        symbols = np.rint(np.clip(symbols, np.float32(0), np.float32(code.top)))
        in_order = (symbols.T if part.keys else symbols).reshape(-1)[stream_places(part.dim, part.keys)]
        self._codes = table[in_order.astype(np.int64)]
        self._lengths = -(-(self._codes >> 8).sum(1, dtype=np.int64) // UNIT)
        self.units = int(self._lengths.sum())
        self.fits = bool(self._lengths.max() - self._lengths.min() <= SPREAD)

    def part(self, number: int, begin: int) -> Bytes:
        """The part of a tile whose streams begin at unit `begin`; number: of its code."""
        places = base_places(self._part.rows, keys=True)
        scales = np.full_like(self._scales, NO_SCALE) if self.refused else self._scales + SCALE_SHIFT
        offsets = np.where(self._offsets, self._offsets - OFFSET_SHIFT, 0)
        steps = np.stack([each[places].reshape(-1, 4) for each in (scales, offsets)], 1)
        base = self._lengths.min()
        longer = (self._lengths - base).astype(np.uint8)
        starts = begin + np.concatenate([[0], self._lengths.reshape(WARPS, -1).sum(1).cumsum()[:-1]])
        head = np.array([base, number, *starts])
        return np.concatenate(
            [
                steps.astype(np.uint16).reshape(-1).view(np.uint8),
                longer[0::2] | longer[1::2] << 4,
                head.astype(np.uint16).view(np.uint8),
            ]
        )

    def bits(self) -> npt.NDArray[np.bool_]:
        """All streams, bit by bit."""
        lengths, sizes = self._codes >> 8, UNIT * self._lengths
        told = (self._codes[..., None] >> np.arange(MAX_BITS) & 1)[np.arange(MAX_BITS) < lengths[..., None]]
        used = lengths.sum(1, dtype=np.int64)
        unused_before = (sizes - used).cumsum() - (sizes - used)
        found = np.zeros(sizes.sum(), np.bool_)
        found[np.arange(len(told)) + np.repeat(unused_before, used)] = told
        return found


def _opened(data: Bytes, part: Part, tables: Bytes) -> Bits:
    """The values of a tile; data: from its part on."""
    lanes = data[part.lanes : part.head]
    base, number, *starts = data[part.head : part.bytes].view(np.uint16).astype(np.int64)
    lengths = base + np.stack([lanes & 15, lanes >> 4], 1).reshape(WARPS, -1)
    begins = UNIT * (np.array(starts)[:, None] + lengths.cumsum(1) - lengths)
    bits = np.unpackbits(data, bitorder="little")
    symbols, at = np.empty((STREAMS, part.symbols), np.int64), begins.reshape(-1)
    for place in range(part.symbols):  # of all streams at once
        windows = bits[at[:, None] + np.arange(MAX_BITS)] @ (1 << np.arange(MAX_BITS))
        lengths, symbols[:, place] = tables[number, windows].T
        at = at + lengths
    flat = np.empty(TOKENS * part.dim, np.int64)
    flat[stream_places(part.dim, part.keys)] = symbols
    tile = flat.reshape(TOKENS, part.dim)
    scales, offsets = steps_of(data, part)
    return rounded(tile * scales + offsets if part.keys else tile * scales[:, None] + offsets[:, None])
