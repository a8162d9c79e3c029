"""The form of a closed page of 4 or 8 bits a value: which byte of it holds what.

A page of one layer holds, for each KV head and each 64 of its tokens, a tile of keys and a tile of values, as
`kvrail.engine.kv.lossless.form` orders them. A tile is the second operand of a product: keys have a channel a row and a
token a column, values a token a row and a channel a column. Each row has a scale and a middle, so keys have them for
each channel of 64 tokens, and values for each token.

    tile     codes     64 * dim * bits / 8    of each value
             scales               2 * rows    bfloat16, of each row
             middles              2 * rows    bfloat16, of each row

A code is an unsigned integer of `bits` bits. Its value is (code - 2^(bits - 1)) * scale + middle, computed exactly and
rounded once to bfloat16. So a value differs from what was stored by half a scale at most, and by that last rounding.

Codes lie in the order of lossless pages' low bytes, 16 bytes of a lane to a chunk. A little-endian word holds 32 / bits
of a lane's values: value i from bit bits * (i // 2) + 16 * (i % 2) on. So a shift and a mask give two values that a
register of the operand holds.

    codes             [64 * dim * bits / 16,384 chunks, 4 warps, 32 lanes, 4 words]
    scales, middles   [4 values of t, rows / 16 of s, 4 rows]

A tile with a value that is not finite, or from 2^100 on, has no such form. Its scales are NaN and its page stays open.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrail.engine.kv.lossless.form import TOKENS, base_places, places

WIDTHS = (4, 8)
"""Bits of a code."""
REFUSED = 100 + 127 << 7
"""Bits of the least magnitude that is refused, as bfloat16: 2^100. It and all above have no sign bit set."""
NO_SCALE = 0x7FC0
"""The bits of the scales of a tile that was refused: NaN."""
LEAST_SCALE = 2.0**-96
"""The smallest scale: above it no product or sum of opening is subnormal."""
LEAST_MIDDLE = 2.0**-20
"""A middle that is at most this part of a row's range is 0, so that float64 holds every sum exactly."""
SLACK = 1 + 2.0**-20
"""What a scale is multiplied by before it is rounded up, so that rounding in float32 puts no value out of its reach."""


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
    def scales(self) -> int:
        """Where scales begin."""
        return TOKENS * self.dim * self.bits // 8

    @property
    def middles(self) -> int:
        """Where middles begin."""
        return self.scales + 2 * self.rows

    @property
    def bytes(self) -> int:
        """Bytes of the whole tile."""
        return self.middles + 2 * self.rows


def code_places(tile: Tile) -> npt.NDArray[np.int64]:
    """Index into a tile [64, dim] of each value, in the order of storage."""
    return places(tile.dim, tile.keys, 128 // tile.bits)


def row_places(tile: Tile) -> npt.NDArray[np.int64]:
    """The row of each scale, in the order of storage."""
    return base_places(tile.rows, keys=True)
