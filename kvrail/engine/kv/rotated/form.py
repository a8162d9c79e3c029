"""The form of a tile of values in `rot3` pages: which bit of it holds what.

Keys of a `rot3` page are those of an `int4` page (`kvrail.engine.kv.fixed.form`): with a step for each channel, four
bits are enough, and no channel spoils another. Values bear more, as attention takes their mean over many tokens. Here
each has two bits, which would be too few for values as they are. So each token's channels are rotated first: what was
one large value is spread over 64 small ones, and all are about normally distributed, whatever the model.

    tile     codes   16 * dim   two bits of each rotated value
             means        dim   a byte a channel: the mean of 64 tokens, and how much smaller the channel is
             scales        64   a byte a token: bits 0 to 6 its scale, bit 7 a part of the tile's exponent

    mean     bits 0 to 4    n, -15 to 15, as two's complement
             bits 5 to 7    k, 0 to 7
    scale    bits 0 to 6    0: 0; 1 to 126: a float32 whose bits are (code + LEAST_CODE) << 20; 127: refused
             bit 7          of token t: bit t % 8 of the tile's exponent E + BIAS

A channel's unit is u = 2^(E - k), about its deviation. Its mean is n / 2 units. A token's value in units, less the
mean, is y; Y = 128 y, an integer. Blocks of 64 channels are rotated:

    Z[j] = sum over i of sign(i, j) * Y[i],    sign(i, j) = (-1)^parity(i & (j ^ ((i >> 1) & 21)))

which is a Walsh-Hadamard transform of Y, with signs of channels that no row of the transform is like (a bent function):
rows that are alike, or alternate, become flat. The transform is 8 times a rotation, and undone by its transpose / 64.

A code is 0 to 3, its level 2 * code - 3. So an opened value is

    (level sums * scale * 2^-13 + n / 2) * u,    level sums[i] = sum over j of sign(i, j) * level[j]

The sums are integers of at most 192, so that nothing is rounded, in whatever order, until the end: once, to bfloat16. A
tile is opened / SHRUNK, as keys are.

Words of codes lie as the tensor core's instruction takes its first operand, [tokens, rotated values], so that a thread
multiplies what it loads. Warp w, lane l, g = l // 4, t = l % 4:

    codes    [4 warps, 32 lanes, dim / 64 blocks, 2 r] words

A word has token 16 w + 8 r + g, and for s of 4 and h of 2 the values 16 s + 8 h + 2 t, from bit 4 s + 2 h on, and the
next one from bit 16 + 4 s + 2 h on. A mask and a bit that is set make two bfloat16 of it: 128 + code. What 128 adds to
the sums falls on the block's first channel alone, where all signs are alike.

Means lie as the sums do: [4 t, dim / 64 blocks, 4 s, 2 i, 2 h], of channel 16 s + 8 h + 2 t + i of a block. A word has
two channels' bytes in the lower bytes of its halves, and two in the upper ones.

A tile with a value that is not finite, or from 2^36 on, has no such form: its scales are all 127, and NaN when opened.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrail.engine.kv.lossless.form import TOKENS

ROTATED = 3
"""Stands where other forms have the bits of a value: keys have four, values two, and both their scales."""
KEY_BITS = 4
BLOCK = 64
"""Channels that are rotated together."""
LEAST_MAGNITUDE = -40
"""The exponent that a tile's largest magnitude counts as at least, so that no opened value is subnormal."""
FRACTION, UNIT, LARGEST = 20, 7, 2047
"""Bits below the largest magnitude's exponent that closing sees; below a unit that it rotates; the largest Y."""
MOST_MEAN, MOST_SHIFT = 15, 7
LEAST_CODE, MOST_CODE, REFUSED_CODE = 127 - 2 << 3, 126, 127
BIAS = 61
"""E is from LEAST_MAGNITUDE - FRACTION to 36."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a tile of values whose heads are `dim` wide; all in bytes."""

    dim: int
    keys = False
    bits = 2

    @property
    def means(self) -> int:
        """Where means begin."""
        return TOKENS * self.dim * self.bits // 8

    @property
    def scales(self) -> int:
        """Where scales begin."""
        return self.means + self.dim

    @property
    def bytes(self) -> int:
        """Bytes of the whole tile."""
        return self.scales + TOKENS

    @property
    def mark(self) -> tuple[int, int]:
        """Where 16 bits say that the tile was refused, and by which number: two scales of REFUSED_CODE."""
        return self.scales, -1


def code_places(dim: int) -> npt.NDArray[np.int64]:
    """Index into a tile [64, dim] of each code, two bits after two bits."""
    warp, g, t, block, r, i, s, h = np.ix_(*(np.arange(size) for size in (4, 8, 4, dim // BLOCK, 2, 2, 4, 2)))
    token, channel = 16 * warp + 8 * r + g, BLOCK * block + 16 * s + 8 * h + 2 * t + i
    return np.asarray((token * dim + channel).reshape(-1), np.int64)


def channel_places(dim: int) -> npt.NDArray[np.int64]:
    """The channel of each mean, in the order of storage."""
    t, s, i, h = np.ix_(*(np.arange(size) for size in (4, dim // 16, 2, 2)))
    return np.asarray((16 * s + 8 * h + 2 * t + i).reshape(-1), np.int64)


def signs() -> npt.NDArray[np.int64]:
    """1 or -1 by rotated value and channel, [64, 64]: see above."""
    j, i = np.ix_(np.arange(BLOCK), np.arange(BLOCK))
    bits = i & (j ^ i >> 1 & 21)
    for shift in (4, 2, 1):
        bits ^= bits >> shift
    return np.asarray(1 - 2 * (bits & 1), np.int64)
