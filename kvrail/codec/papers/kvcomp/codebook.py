"""Canonical Huffman codes of bounded length, one for each layer's keys and one for its values."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvrail.codec.core.arrays import Bytes

MAX_BITS = 12
"""The longest code: a decoder's table of 2^12 entries fits a core's first cache."""
Words = npt.NDArray[np.uint16]


def lengths_of(counts: Sequence[int], most: int = MAX_BITS) -> list[int]:
    """Optimal code lengths, at most `most`, of symbols that occur so often; 0 for one that does not occur.

    Package-merge: of coins and packages of equal weight, coins come first, each in its own order. A single symbol has
    a code of one bit.
    """
    coins = sorted((count, (symbol,)) for symbol, count in enumerate(counts) if count)
    lengths = [0] * len(counts)
    if len(coins) == 1:
        lengths[coins[0][1][0]] = 1
        return lengths
    level: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(most):
        pairs = zip(level[0::2], level[1::2], strict=False)
        packages = [(one[0] + other[0], one[1] + other[1]) for one, other in pairs]
        level = sorted([*coins, *packages], key=lambda item: item[0])
    for _, symbols in level[: max(0, 2 * len(coins) - 2)]:
        for symbol in symbols:
            lengths[symbol] += 1
    return lengths


def codes_of(lengths: Sequence[int]) -> list[int]:
    """Canonical codes, their first bit lowest, as the stream has them; 0 where there is none."""
    codes, code, bits = [0] * len(lengths), 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        code <<= length - bits
        bits = length
        codes[symbol] = int(f"{code:0{bits}b}"[::-1], 2)
        code += 1
    return codes


def decoding_table(lengths: Sequence[int]) -> Words:
    """By the next MAX_BITS bits of a stream: symbol * 16 + length, uint16 [2^MAX_BITS]; 0 where no code begins so."""
    table = np.zeros(1 << MAX_BITS, dtype=np.uint16)
    for symbol, (length, code) in enumerate(zip(lengths, codes_of(lengths), strict=True)):
        if length:
            table[code :: 1 << length] = symbol << 4 | length
    return table


def packed_lengths(lengths: Sequence[int]) -> bytes:
    """Lengths, four bits each, the first of two in the low half of a byte."""
    even = [*lengths, *[0] * (len(lengths) % 2)]
    return bytes(low | high << 4 for low, high in zip(even[0::2], even[1::2], strict=True))


def unpacked_lengths(packed: Bytes, symbols: int) -> list[int]:
    """The reverse."""
    found: list[int] = np.stack([packed & 15, packed >> 4], axis=-1).flatten()[:symbols].tolist()
    return found


def is_code(lengths: Sequence[int]) -> bool:
    """Whether an encoder can have made such lengths: those of a complete code, or of a single symbol's one bit."""
    used = [length for length in lengths if length]
    if max(used, default=0) > MAX_BITS:
        return False
    return used == [1] or sum(1 << (MAX_BITS - length) for length in used) == 1 << MAX_BITS
