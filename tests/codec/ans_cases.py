"""Pieces that rANS is tried on: what codes look like, and what is special."""

import numpy as np

from kvrail.codec.splitzip.entropy.format import BLOCK_BYTES
from kvrail.codec.splitzip.entropy.payload import TABLE_BYTES, head_bytes


def codes(size, seed=0, spread=2.2):
    """Pairs of codes of four bits, distributed as distances below a channel's largest exponent are."""
    rng = np.random.default_rng(seed)
    low, high = (np.clip(np.abs(rng.normal(0, spread, size)), 0, 15).astype(np.uint8) for _ in range(2))
    return low | high << 4


def rare(size, count=255, seed=0):
    """Zeros, and every other byte up to `count` once."""
    piece = np.zeros(size, dtype=np.uint8)
    where = np.random.default_rng(seed).permutation(size)[:count]
    piece[where] = np.arange(1, count + 1)
    return piece


def with_words_before(coded, size, count=4):
    """A coded piece of one block with words that no lane asks for, all else right; size: of the piece."""
    head = TABLE_BYTES + 4
    assert head == head_bytes(size)
    end = int(coded[TABLE_BYTES:head].view("<u4")[0]) + count
    ends = np.array([end], dtype="<u4").view(np.uint8)
    return np.concatenate([coded[:TABLE_BYTES], ends, np.ones(2 * count, np.uint8), coded[head:]])


def with_end(coded, size, number, end):
    """A coded piece in which a block ends elsewhere."""
    wrong = coded.copy()
    wrong[TABLE_BYTES : head_bytes(size)].view("<u4")[number] = end
    return wrong


def wrong_ends(coded, size):
    """Numbers of blocks of a piece of three, and where none can end."""
    first, second, third = coded[TABLE_BYTES : head_bytes(size)].view("<u4").tolist()
    return [(0, 0), (0, 63), (0, second), (0, second - 63), (0, 2**32 - 1), (1, first), (1, third + 1), (2, third + 4)]


SPECIAL = {
    "one byte": np.array([200], dtype=np.uint8),
    "two bytes": np.array([255, 0], dtype=np.uint8),
    "one symbol": np.full(5000, 7, dtype=np.uint8),
    "two symbols": np.arange(3000, dtype=np.int64).astype(np.uint8) & 1,
    "all symbols once": np.arange(256, dtype=np.int64).astype(np.uint8),
    "all symbols alike": np.arange(8192, dtype=np.int64).astype(np.uint8),
    "rare symbols": rare(20_000),
    "odd size": codes(12_345),
    "a row but one": codes(127),
    "a row and one": codes(129),
    "a block": codes(BLOCK_BYTES),
    "a block and one": codes(BLOCK_BYTES + 1),
    "random": np.random.default_rng(1).integers(0, 256, 9000, dtype=np.uint8),
}
