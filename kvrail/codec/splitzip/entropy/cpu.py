"""rANS on a CPU, as an entropy coder of pieces in host memory: blocks on several threads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrail.codec.base import CodecError
from kvrail.codec.core import buffers
from kvrail.codec.core.arrays import Bytes, Ints
from kvrail.codec.core.cpu import on_threads
from kvrail.codec.splitzip.entropy.cpu_kernels import count_symbols, decode_blocks, encode_blocks
from kvrail.codec.splitzip.entropy.format import (
    BLOCK_BYTES,
    RECIPROCAL_BITS,
    STATE_WORDS,
    SYMBOLS,
    frequencies_of,
    num_blocks,
)
from kvrail.codec.splitzip.entropy.payload import TABLE_BYTES, checked_head, coded_bytes, head_bytes

THREAD_SHARE = 4
"""Bytes of KV for each that is coded here, by which threads are given out: a byte is the codes of two values."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Some blocks of a piece, coded, in `memory` on loan: `coded` is a slice of it."""

    memory: Bytes
    coded: Bytes


class AnsCoder:
    """Each piece is a model, where its blocks end, and the blocks (README.md)."""

    finds_repeats = False

    def compress(self, pieces: Sequence[Bytes]) -> list[Bytes]:
        """Each piece, coded by itself."""
        return [_compress(piece) for piece in pieces]

    def decompress(self, coded: Sequence[Bytes], pieces: Sequence[Bytes]) -> None:
        """Fill each of `pieces`; raises CodecError where its coded form is corrupt or of another size."""
        for source, piece in zip(coded, pieces, strict=True):
            _decompress(source, piece)


def _compress(piece: Bytes) -> Bytes:
    blocks = num_blocks(piece.size)
    frequencies = frequencies_of(_counts(piece, blocks))
    below = np.cumsum(frequencies) - frequencies
    model = (frequencies << 16 | below).astype(np.uint32)
    reciprocals = ((1 << RECIPROCAL_BITS) // np.maximum(frequencies, 1) + 1).astype(np.uint64)
    sizes = np.zeros(blocks, dtype=np.int64)

    def on_range(first: int, last: int) -> _Blocks:
        memory = buffers.take(2 * (last - first) * (BLOCK_BYTES + STATE_WORDS) + 2)
        count = encode_blocks(piece, first, last, model, reciprocals, memory.view(np.uint16), sizes)
        return _Blocks(memory, memory[: 2 * count])

    found = on_threads(on_range, blocks, THREAD_SHARE * piece.size)
    head, words = head_bytes(piece.size), int(sizes.sum())
    coded = np.empty(coded_bytes(piece.size, words), dtype=np.uint8)
    coded[:TABLE_BYTES] = frequencies.astype("<u2").view(np.uint8)
    coded[TABLE_BYTES:head] = np.cumsum(sizes).astype("<u4").view(np.uint8)
    np.concatenate([each.coded for each in found], out=coded[head : head + 2 * words])
    coded[head + 2 * words :] = 0
    return coded


def _counts(piece: Bytes, blocks: int) -> Ints:
    """How often each byte occurs, int64 [256]."""

    def on_range(first: int, last: int) -> Ints:
        counts = np.zeros((4, SYMBOLS), dtype=np.int64)
        count_symbols(piece[first * BLOCK_BYTES : last * BLOCK_BYTES], counts)
        return counts

    total: Ints = np.sum(on_threads(on_range, blocks, THREAD_SHARE * piece.size), axis=(0, 1))
    return total


def _decompress(coded: Bytes, piece: Bytes) -> None:
    if coded.ctypes.data % 4:  # words of a payload that begins at an odd address
        coded = coded.copy()
    frequencies, ends = checked_head(coded, piece.size)
    words = coded[head_bytes(piece.size) :].view(np.uint16)
    symbols = np.repeat(np.arange(SYMBOLS), frequencies)
    within = np.arange(symbols.size) - (np.cumsum(frequencies) - frequencies)[symbols]
    table = (symbols | (frequencies[symbols] - 1) << 8 | within << 20).astype(np.uint32)

    def on_range(first: int, last: int) -> int:
        wrong: int = decode_blocks(words, ends, first, last, table, piece)
        return wrong

    if any(on_threads(on_range, num_blocks(piece.size), THREAD_SHARE * piece.size)):
        raise CodecError("a coded piece of a payload is corrupt: a block doesn't end as it began")
