"""The form of a closed page of KVComp: which bit of it holds what.

KVComp (Jiang et al., 2025) quantises keys by a scale for each channel and values by one for each token, and codes the
symbols by Huffman. `kvrail.codec.papers.kvcomp` sends that; here it stays in memory. A page of one layer holds, for
each KV head and each 64 of its tokens, a pair of tiles of a fixed size:

    pair      keys' part, values' part, streams, zeros up to a multiple of 64 bytes, at least 12

    part      steps   4 * rows    bfloat16: scale and offset of each row, as `kvrail.engine.kv.fixed.form` has them
              lanes         64    four bits a lane: what its stream is longer than the base, the lower half first
              head          12    16 bits each: base, code, and where the streams of each of 4 warps begin

A row is a channel of 64 keys, or a token of values. A value is symbol * scale + offset, computed exactly and rounded
once to bfloat16. The scale and the symbols are those of the wire's codec, and so is the bound: a value differs from
what was stored by half of 0.05 (keys) or 0.15 (values) of its row's range at most, and by that last rounding.

A tile has 128 streams, one for each lane that multiplies its values: the symbols of a lane, in the order in which
`kvrail.engine.kv.lossless.form` has its values. Lengths and places count in units of four bits: a stream ends in up to
three zeros, and begins where the one before it ends; places are counted from the part's first byte. A code's first bit
is the lowest.

A tile names its code. The first is a canonical Huffman code, the same for all layers and models, of what symbols of
normally distributed values are. The second has one length for all symbols: 3 bits for the 8 of values; 4 for keys,
which then have 16 symbols instead of 21. Values take the shorter one. Keys take the first unless the streams of both
tiles would not fit: then they are **coarse**, and 1/15 stands for 0.05 in their bound. So every tile fits, and what
it becomes depends on its pair alone. Streams of lengths that differ by more than four bits can say do not fit either.

A pair with a value that is not finite, or from 2^36 on, has no such form: the scales of the tile are NaN.
"""

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrail.codec.papers.kvcomp.codebook import codes_of
from kvrail.codec.papers.kvcomp.format import CHANNEL_CODE, SLACK, Granularity, TensorCode
from kvrail.engine.kv.fixed.form import NO_SCALE
from kvrail.engine.kv.lossless.form import TOKENS, places

CODED = 1
"""Stands where other forms have the bits of a value: symbols have codes of different lengths."""
UNIT = 4
"""Bits of a unit of streams."""
SPREAD = 15
"""The most units that a stream is longer than the shortest of its tile."""
STREAMS, WARPS = 128, 4
"""Streams of a tile, and groups of them whose beginnings are stored."""
LANES_BYTES, HEAD_BYTES = STREAMS // 2, 12
MAX_BITS = 5
"""The longest code: a warp's 32 lanes have the table."""
TAIL = 12
"""Bytes at the end of a pair, at least, that no stream has."""
KEYS = (CHANNEL_CODE.keys, TensorCode(Granularity.CHANNEL, 1 / 15))
VALUES = (CHANNEL_CODE.values, CHANNEL_CODE.values)
"""How keys and values are quantised with each of the two codes."""
_NORMAL = (5, 5, 5, 5, 5, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5, 5, 5)
_NORMAL_OF_8 = (5, 4, 3, 2, 2, 3, 3, 5)
"""Lengths of the best codes of at most MAX_BITS for the normally distributed values of a row."""
_EIGHTHS = {True: (35, 22), False: (35, 21)}
"""Room for the streams of a pair, in eighths of a bit for each key and each value; True: heads of 64."""


@dataclass(frozen=True, slots=True)
class Part:
    """Sizes of the part of keys, or of values, whose heads are `dim` wide; in bytes, from the part's beginning."""

    dim: int
    keys: bool

    @property
    def rows(self) -> int:
        """Rows of the operand: each has a scale."""
        return self.dim if self.keys else TOKENS

    @property
    def lanes(self) -> int:
        """Where lengths of streams begin, and how many bytes steps take."""
        return 4 * self.rows

    @property
    def head(self) -> int:
        """Where the head begins."""
        return self.lanes + LANES_BYTES

    @property
    def bytes(self) -> int:
        """Bytes of the part."""
        return self.head + HEAD_BYTES

    @property
    def mark(self) -> tuple[int, int]:
        """Where 16 bits say that the tile was refused, and by which number: the first scale."""
        return 0, NO_SCALE

    @property
    def symbols(self) -> int:
        """Symbols of a stream."""
        return TOKENS * self.dim // STREAMS


@dataclass(frozen=True, slots=True)
class Pair:
    """Sizes of a pair of tiles; all in bytes."""

    key_dim: int
    value_dim: int

    @property
    def parts(self) -> tuple[Part, Part]:
        """The parts of keys and of values."""
        return Part(self.key_dim, True), Part(self.value_dim, False)

    @property
    def streams(self) -> int:
        """Where streams begin."""
        return sum(part.bytes for part in self.parts)

    @property
    def bytes(self) -> int:
        """Bytes of the pair."""
        key, value = _EIGHTHS[self.value_dim == 64]
        eighths = max(key * self.key_dim + value * self.value_dim, 32 * self.key_dim + 24 * self.value_dim)
        return -(-(self.streams + TOKENS * eighths // 64 + TAIL) // 64) * 64

    @property
    def room(self) -> int:
        """Units of streams that fit. The last words of a pair are none of them: kernels read two words ahead."""
        return (self.bytes - self.streams - TAIL) * 8 // UNIT


def lengths(keys: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bits of each symbol in both codes of a tile."""
    return (_NORMAL, (4,) * 16) if keys else (_NORMAL_OF_8, (3,) * 8)


def share(code: TensorCode) -> float:
    """A row's scale by its range, as float32."""
    return float(np.float32(code.scale * (1 - SLACK)))


@functools.cache
def writing_tables() -> npt.NDArray[np.uint16]:
    """Codes, and from bit 8 on their lengths: uint16 [keys and values, codes, 32 symbols]."""
    tables = np.zeros((2, 2, 32), np.uint16)
    for kind in range(2):
        for number, each in enumerate(lengths(kind == 0)):
            tables[kind, number, : len(each)] = np.array(codes_of(each)) | np.array(each) << 8
    return tables


@functools.cache
def reading_tables() -> npt.NDArray[np.uint8]:
    """By the next MAX_BITS bits: a code's length, and its symbol; uint8 [kinds, codes, 32, 2]."""
    tables = np.zeros((2, 2, 1 << MAX_BITS, 2), np.uint8)
    for kind, codes in enumerate(writing_tables()):
        for number, of in enumerate(codes):
            for symbol, (code, bits) in enumerate(zip(of & 255, of >> 8, strict=True)):
                if bits:
                    tables[kind, number, code :: 1 << bits] = bits, symbol
    return tables


def stream_places(dim: int, keys: bool) -> npt.NDArray[np.int64]:
    """Index into a tile [64, dim] of each symbol of each stream: [128, symbols]."""
    by_chunk = places(dim, keys).reshape(-1, STREAMS, 16)
    return by_chunk.transpose(1, 0, 2).reshape(STREAMS, -1)
