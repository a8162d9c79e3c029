"""The rANS code: its parameters, and the model of a piece. README.md has the bits."""

import numpy as np

from kvrail.codec.core.arrays import Ints
from kvrail.codec.core.sections import ceil_div

SYMBOLS = 256
"""Symbols are bytes."""
PROBABILITY_BITS = 12
"""A model's frequencies add up to 2 to this power, so that a decoding table's entry is 32 bits."""
TOTAL = 1 << PROBABILITY_BITS
LANES = 32
"""States that take turns in a block: one a thread of a warp."""
STEPS = 1024
"""Symbols of a lane in a whole block. A lane costs some three bytes, and a block's steps follow one another."""
BLOCK_BYTES = LANES * STEPS
"""What is coded by itself; the last block of a piece may have fewer."""
RUN = 4
"""Neighbouring bytes of one lane: a word that a thread loads at once."""
LOWEST_STATE = 1 << 16
"""States lie from here to 2^32, and begin and end here; a renormalisation moves sixteen bits."""
MOST_PIECES = 5
"""Pieces of a payload; an encoder may have coded any of them."""
STATE_WORDS = 2 * LANES
"""Words of sixteen bits that a block's states take."""
RECIPROCAL_BITS = 44
"""x // f is x * (2^44 // f + 1) >> 44 for every x below f * 2^20, and the product has no more than 64 bits."""


def frequencies_of(counts: Ints) -> Ints:
    """The model of a piece, int64 [256], that adds up to TOTAL; counts: how often each byte occurs, int64 [256].

    A byte whose share of TOTAL would be below two gets one. The others divide what is left: each gets the difference of
    the cumulated shares, rounded down, after and before it, which is at least one.
    """
    rare = (counts > 0) & (counts * TOTAL < 2 * counts.sum())
    common = np.where(rare, 0, counts)
    ends = np.cumsum(common) * (TOTAL - int(rare.sum())) // max(1, int(common.sum()))
    frequencies: Ints = np.diff(ends, prepend=0) + rare
    return frequencies


def num_blocks(size: int) -> int:
    """Blocks of a piece of `size` bytes."""
    return ceil_div(size, BLOCK_BYTES)
