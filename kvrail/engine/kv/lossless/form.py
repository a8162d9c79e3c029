"""The form of a closed page: which byte of it holds what.

A page is closed when it is full: its bfloat16 values are then kept in 12 bits each, without the loss of a bit. A page
of one layer holds, for each KV head and each 64 of its tokens, a tile of keys and a tile of values:

    page     [KV heads, 64-token blocks] of (tile of keys, tile of values)

    tile     low bytes   64 * dim    of each value: the lowest exponent bit and the mantissa
             nibbles     32 * dim    of each value: its sign, and three bits of the upper part of its exponent
             bases            dim    of each channel
             escapes           64    16 little-endian words: two for each of eight groups

A value's high byte is its sign and the upper seven bits of its exponent. A nibble holds the sign and what these seven
bits are above the channel's base, 0 to 7. So the nibbles of a channel reach sixteen exponents, from its base on. A
value outside of them is an escape: its nibble is 0, which gives the base as its high byte, and a word of its group
corrects that.

    word     bits 31-24  what the value's high byte is XORed with; 0: the word is unused
             bit  23     the tile is raw: it has a group of more than two escapes
             bit  22     of the tile's first word: the tile has escapes
             bits 21-0   the value's place in its group

In a raw tile every group has the same two words: the first has bit 23, the second is the number of a spare unit of
64 * dim bytes, which holds the tile's high bytes in the order of its low bytes. Nibbles and bases are then unused.

Low bytes lie as the tensor core's instruction m16n8k16 takes its second operand, for four warps that share the columns
of a product. Keys have a token a column and a channel a row, values a channel a column and a token a row. From the
columns 8 * (4 * r + w) to + 7 and the rows 16 * s to + 15, lane l of warp w holds four values: column l // 4, and with
t = l % 4 the rows 2 * t, 2 * t + 1, 2 * t + 8 and 2 * t + 9. It holds them in order of r, then of s, 16 to a chunk:

    low bytes   [dim / 32 chunks, 4 warps, 32 lanes, 16 values]
    nibbles     [dim / 64 pairs of chunks, 4 warps, 32 lanes, 4 words]
    bases       keys: [4 values of t, dim / 16 of s, 4 rows]; values: [4 warps, 8 columns, dim / 32 of r]
    groups      group 4 h + w: warp w's values in half h of its chunks

So a warp loads 512 consecutive bytes at once, 16 a lane; a lane's bases lie together; and what a lane loads is what it
multiplies.

A word of nibbles holds eight values of a chunk. ANDed with 0x87878787 it is the first four, a byte each: the sign in
bit 7, the bits of the exponent in bits 0 to 2. Rotated left by four bits and ANDed, it is the other four.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TOKENS = 64
"""Tokens of a tile."""
WARPS, LANES, CHUNK = 4, 32, 16
"""See the order above."""
GROUPS, SLOTS = 8, 2
"""Groups of a tile, and escapes that each has room for."""
RAW = 1 << 23
"""The bit of a word of escapes that says that the tile is raw."""
SOME = 1 << 22
"""The bit of a tile's first word that says that it has escapes, and more than any place in a group."""
NO_UNIT = 0xFFFFFFFF
"""Stands for the spare unit of a raw tile for which none was left: the tile cannot be opened."""
CODES = 8
"""Upper parts of exponents that a nibble can tell apart."""
SPECIAL = 127
"""The upper part of the exponents of infinities and NaN."""
BASES_TRIED, BASE_STEP = 4, 3
"""Bases that closing tries for each channel, each so far below the one before; it takes the one with fewest escapes.

Where one value of a channel is so large that a window cannot span the others with it, it is the one that escapes.
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a tile whose rows are `dim` wide, and where its parts begin; all in bytes."""

    dim: int

    @property
    def nibbles(self) -> int:
        """Where nibbles begin, and how many low bytes there are."""
        return TOKENS * self.dim

    @property
    def bases(self) -> int:
        """Where bases begin."""
        return self.nibbles + TOKENS * self.dim // 2

    @property
    def escapes(self) -> int:
        """Where words of escapes begin."""
        return self.bases + self.dim

    @property
    def bytes(self) -> int:
        """Bytes of the whole tile."""
        return self.escapes + 4 * GROUPS * SLOTS


def supports(dim: int, dtype: str) -> bool:
    """Whether rows of `dim` elements of type `dtype` have this form."""
    return dtype == "bfloat16" and dim % 64 == 0 and 0 < dim <= 512


def places(dim: int, keys: bool, of_chunk: int = CHUNK) -> npt.NDArray[np.int64]:
    """Index into a tile [64, dim] of each value, in the order of storage. of_chunk: values of a lane in a chunk."""
    chunks = dim // 2 // of_chunk
    chunk, warp, lane, value = np.ix_(np.arange(chunks), np.arange(WARPS), np.arange(LANES), np.arange(of_chunk))
    steps = (dim if keys else TOKENS) // 16
    number = chunk * of_chunk + value  # of a lane's values
    repeat, step, inner = number // (4 * steps), number // 4 % steps, number % 4
    row = 16 * step + 2 * (lane % 4) + inner % 2 + inner // 2 * 8
    column = 8 * (4 * repeat + warp) + lane // 4
    token, channel = (column, row) if keys else (row, column)
    return np.asarray((token * dim + channel).reshape(-1), np.int64)


def base_places(dim: int, keys: bool) -> npt.NDArray[np.int64]:
    """The channel of each byte of a tile's bases."""
    if not keys:
        warp, column, repeat = np.ix_(np.arange(WARPS), np.arange(8), np.arange(dim // 32))
        return np.asarray((8 * (WARPS * repeat + warp) + column).reshape(-1), np.int64)
    t, step, inner = np.ix_(np.arange(4), np.arange(dim // 16), np.arange(4))
    return np.asarray((16 * step + 2 * t + inner % 2 + inner // 2 * 8).reshape(-1), np.int64)
