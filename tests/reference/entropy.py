"""rANS symbol by symbol: slow, and what the coders on a CPU and on CUDA equal bit for bit. README.md has the code."""

import numpy as np

from kvrail.codec.base import CodecError
from kvrail.codec.core.arrays import Bytes, Ints
from kvrail.codec.splitzip.entropy.format import (
    BLOCK_BYTES,
    LANES,
    LOWEST_STATE,
    PROBABILITY_BITS,
    RUN,
    SYMBOLS,
    TOTAL,
    frequencies_of,
)
from kvrail.codec.splitzip.entropy.payload import checked_head, coded_bytes, head_bytes


def encode(piece: Bytes) -> bytes:
    """The coded form of a piece that is not empty, whether it is smaller or not."""
    frequencies = frequencies_of(np.bincount(piece, minlength=SYMBOLS).astype(np.int64))
    blocks = [_encode_block(piece[at : at + BLOCK_BYTES], frequencies) for at in range(0, piece.size, BLOCK_BYTES)]
    ends = np.cumsum([len(block) for block in blocks])
    words = np.array([word for block in blocks for word in block], dtype="<u2")
    coded = frequencies.astype("<u2").tobytes() + ends.astype("<u4").tobytes() + words.tobytes()
    return coded.ljust(coded_bytes(piece.size, words.size), b"\0")


def decode(coded: Bytes, size: int) -> bytes:
    """The `size` bytes that a piece was; raises CodecError where its coded form is of no such piece."""
    frequencies, ends = checked_head(coded, size)
    words = coded[head_bytes(size) :].view("<u2")
    begin, blocks = 0, []
    for number, end in enumerate(ends.tolist()):
        block_bytes = min(BLOCK_BYTES, size - number * BLOCK_BYTES)
        blocks.append(_decode_block(words[begin:end].tolist(), block_bytes, frequencies))
        begin = end
    return b"".join(blocks)


def turns_of(size: int) -> list[tuple[int, int]]:
    """Whose turn it is when a block of `size` bytes is decoded: lanes, and the places of their symbols."""
    rows = range(0, size, LANES * RUN)
    turns = [(lane, row + lane * RUN + number) for row in rows for number in range(RUN) for lane in range(LANES)]
    return [(lane, place) for lane, place in turns if place < size]


def _encode_block(block: Bytes, frequencies: Ints) -> list[int]:
    """Words of sixteen bits: those of the renormalisations, then the states."""
    below = (np.cumsum(frequencies) - frequencies).tolist()
    states, words = [LOWEST_STATE] * LANES, []
    for lane, place in reversed(turns_of(block.size)):
        symbol, state = int(block[place]), states[lane]
        frequency = int(frequencies[symbol])
        if state >= frequency << 32 - PROBABILITY_BITS:
            words.append(state & 0xFFFF)
            state >>= 16
        states[lane] = (state // frequency << PROBABILITY_BITS) + state % frequency + below[symbol]
    return [*words, *(state & 0xFFFF for state in states), *(state >> 16 for state in states)]


def _decode_block(words: list[int], size: int, frequencies: Ints) -> bytes:
    """The block's bytes; raises CodecError where its words are too few or too many, or a state ends elsewhere."""
    symbols = np.repeat(np.arange(SYMBOLS), frequencies).tolist()
    below = (np.cumsum(frequencies) - frequencies).tolist()
    low, high = words[-2 * LANES : -LANES], words[-LANES:]
    states = [a | b << 16 for a, b in zip(low, high, strict=True)]
    left, block = len(words) - 2 * LANES, bytearray(size)
    for lane, place in turns_of(size):
        slot = states[lane] & TOTAL - 1
        symbol = block[place] = symbols[slot]
        state = int(frequencies[symbol]) * (states[lane] >> PROBABILITY_BITS) + slot - below[symbol]
        if state < LOWEST_STATE:
            left -= 1
            if left < 0:
                raise CodecError("a coded piece of a payload is corrupt: a block has too few words")
            state = state << 16 | words[left]
        states[lane] = state
    if left or any(state != LOWEST_STATE for state in states):
        raise CodecError("a coded piece of a payload is corrupt: a block doesn't end as it began")
    return bytes(block)
