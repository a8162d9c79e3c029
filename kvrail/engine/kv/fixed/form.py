"""The form of a closed page of 4 or 8 bits a value: which byte of it holds what.

A page of one layer holds, for each KV head and each 64 of its tokens, a tile of keys and a tile of values, as
`kvrail.engine.kv.lossless.form` orders them. A tile is the second operand of a product: keys have a channel a row and a
token a column, values a token a row and a channel a column. Each row has a scale and an offset, so keys have them for
each channel of 64 tokens, and values for each token.

    tile     codes     64 * dim * bits / 8    of each value
             steps                4 * rows    bfloat16: scale and offset of each row

A code is an unsigned integer of `bits` bits. Its value is code * scale + offset, computed exactly and rounded once to
bfloat16. The offset is the row's smallest value. So a value differs from what was stored by half a scale at most, and
by that last rounding.

Codes lie in the order of lossless pages' low bytes, 16 bytes of a lane to a chunk. A little-endian word holds 32 / bits
of a lane's values: value i from bit bits * (i // 2) + 16 * (i % 2) on. So a mask, and of every other register a shift,
give the two values that a register of the operand holds.

    codes    [64 * dim * bits / 16,384 chunks, 4 warps, 32 lanes, 4 words]
    steps    [4 values of t, rows / 16 of s, scales, then offsets, 4 rows]

A GPU opens two values by one multiply-add of bfloat16, without conversion. A code with 0 in all other bits is a small
bfloat16: code * 2^-133, for up to 8 bits, as subnormal numbers and those of the first exponent have the same distance.
No bfloat16 is as large as a scale * 2^133. So a tile is opened as what it holds / SHRUNK, and the kernel that opens it
makes up for that. Steps are stored as this needs them; all factors are powers of two, so that only exponents change:

    scale     scale * 2^133 / SHRUNK, or a sixteenth of it where a mask leaves codes in bits 4 to 7:
              with 4 bits, of rows r with r % 16 >= 8
    offset    offset / SHRUNK

A tile with a value that is not finite, or from 2^36 on, has no such form. Its scales are NaN and its page stays open.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrail.engine.kv.lossless.form import TOKENS, base_places, places

WIDTHS = (4, 8)
"""Bits of a code."""
SHRUNK = 2.0**40
"""What a GPU opens is a tile / SHRUNK."""
REFUSED = 36 + 127 << 7
"""Bits of the least magnitude that is refused, as bfloat16: 2^36. It and all above have no sign bit set."""
NO_SCALE = 0x7FC0
"""The bits of the scales of a tile that was refused: NaN."""
LEAST_SCALE = 2.0**-70
"""The smallest scale: from it on no value / SHRUNK is subnormal."""
LEAST_OFFSET = 2.0**-16
"""An offset that is at most this part of its scale is 0, so that float64 holds every sum exactly."""
SCALE_SHIFT, OFFSET_SHIFT, HIGH_SHIFT = 133 - 40 << 7, 40 << 7, 4 << 7
"""What is added to the bits of a scale, and taken from those of an offset and of a scale of codes in bits 4 to 7."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a tile of keys, or of values, whose heads are `dim` wide; all in bytes."""

    dim: int
    keys: bool
    bits: int

    @property
    def rows(self) -> int:
        """Rows of the operand: each has a scale."""
        return self.dim if self.keys else TOKENS

    @property
    def steps(self) -> int:
        """Where steps begin."""
        return TOKENS * self.dim * self.bits // 8

    @property
    def bytes(self) -> int:
        """Bytes of the whole tile."""
        return self.steps + 4 * self.rows

    @property
    def mark(self) -> tuple[int, int]:
        """Where 16 bits say that the tile was refused, and by which number: the first scale."""
        return self.steps, NO_SCALE


def code_places(tile: Tile) -> npt.NDArray[np.int64]:
    """Index into a tile [64, dim] of each value, in the order of storage."""
    return places(tile.dim, tile.keys, 128 // tile.bits)


def row_places(tile: Tile) -> npt.NDArray[np.int64]:
    """The row of each scale, in the order of storage; so are offsets'."""
    return base_places(tile.rows, keys=True)


def high_rows(rows: int, bits: int) -> npt.NDArray[np.bool_]:
    """Whether a mask leaves a row's codes in bits 4 to 7."""
    return (np.arange(rows) % 16 >= 8) & (bits == 4)


def share(bits: int) -> float:
    """A row's scale by its range, as float32: a little more than needed, so that rounding keeps all values in reach."""
    return float(np.float32((1 + 2.0**-20) / ((1 << bits) - 1)))
