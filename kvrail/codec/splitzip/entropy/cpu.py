"""`splitzip-ans` on a CPU: the payload in one stage, its pieces coded by rANS, blocks on several threads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrail.codec.base import CodecError, PagedBlock, Payload
from kvrail.codec.core import buffers
from kvrail.codec.core.arrays import Bytes, Ints
from kvrail.codec.core.cpu import CpuEncoding, on_threads
from kvrail.codec.core.host import host_bytes
from kvrail.codec.core.sections import HEADER_BYTES
from kvrail.codec.splitzip.entropy.cpu_kernels import count_symbols, decode_blocks, encode_blocks
from kvrail.codec.splitzip.entropy.format import (
    BLOCK_BYTES,
    RECIPROCAL_BITS,
    STATE_WORDS,
    SYMBOLS,
    frequencies_of,
    num_blocks,
)
from kvrail.codec.splitzip.entropy.payload import (
    BODY,
    CODED,
    LENGTHS,
    TABLE_BYTES,
    checked_head,
    coded_bytes,
    head_bytes,
    pieces_of,
    places_of,
)
from kvrail.codec.splitzip.one_stage import cpu as one_stage
from kvrail.codec.splitzip.one_stage.plan import Coding
from kvrail.codec.splitzip.tiles.format import WindowCode
from kvrail.codec.splitzip.tiles.payload import Layout, parse, parse_header
from kvrail.codec.splitzip.tiles.plan import plans_of

THREAD_SHARE = 4
"""Bytes of KV for each that is coded here, by which threads are given out: a byte is the codes of two values."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Some blocks of a piece, coded, in `memory` on loan: `coded` is a slice of it."""

    memory: Bytes
    coded: Bytes


def encode(pages: PagedBlock, code: WindowCode) -> CpuEncoding:
    """Encode pages in one stage, then code that payload. Raises CodecError where a pool's tensor is not contiguous."""
    encoding = one_stage.encode(pages, Coding(plans_of(pages.spec, code)))
    inner = host_bytes("splitzip-ans", encoding.stages()[0])
    layout = parse_header(inner, pages.spec, plans_of(pages.spec, code))
    pieces = coded_pieces([inner[place] for place in pieces_of(layout)])
    return CpuEncoding([joined_pieces(layout.header(), pieces)], encoding.stats())


def decode(payload: Payload, code: WindowCode, out: PagedBlock) -> None:
    """Restore the payload in one stage, check it and decode it into `out`.

    Raises CodecError, with `out` untouched, where the payload is not one of this code and spec, or a pool's tensor is
    not contiguous.
    """
    source = host_bytes("splitzip-ans", payload)
    layout = parse_header(source, out.spec, plans_of(out.spec, code))
    places = pieces_of(layout)
    came = places_of(source, source.size, places)
    memory = buffers.take(layout.size)
    restore_pieces([source[piece] for piece in came], [memory[place] for place in places])
    decode_inner(memory[: layout.size], layout, out)


def decode_inner(inner: Bytes, layout: Layout, out: PagedBlock) -> None:
    """Write the header of the payload in one stage, check all of that payload, and decode it into `out`.

    Raises CodecError, with `out` untouched, where the payload is wrong or a pool's tensor is not contiguous.
    """
    inner[:HEADER_BYTES] = np.frombuffer(layout.header(), dtype=np.uint8)
    plans = layout.parts[0].plan, layout.parts[1].plan
    one_stage.decode(0, [inner], [parse(inner, out.spec, plans)], Coding(plans), out)


def coded_pieces(pieces: Sequence[Bytes]) -> list[Bytes]:
    """The pieces as they travel: those in CODED by rANS, where that makes them smaller."""
    travelling = list(pieces)
    for number in CODED:
        piece = pieces[number]
        if piece.size:
            coded = compress(piece)
            if coded.size < piece.size:
                travelling[number] = coded
    return travelling


def joined_pieces(header: bytes, pieces: Sequence[Bytes]) -> memoryview:
    """A payload of pieces as they travel, with their lengths after its header."""
    head = np.frombuffer(header + LENGTHS.pack(*(piece.size for piece in pieces)), dtype=np.uint8)
    size = BODY + sum(piece.size for piece in pieces)
    memory = buffers.take(size)
    np.concatenate([head, *pieces], out=memory[:size])
    return memory.data[:size]


def restore_pieces(came: Sequence[Bytes], pieces: Sequence[Bytes]) -> None:
    """Fill each of `pieces` from what came of it; raises CodecError where a coded one doesn't give its bytes."""
    for source, target in zip(came, pieces, strict=True):
        if source.size < target.size:
            decompress(source, target)
        else:
            target[:] = source


def compress(piece: Bytes) -> Bytes:
    """A piece, not empty, coded: a model, where its blocks end, and the blocks (README.md)."""
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


def decompress(coded: Bytes, piece: Bytes) -> None:
    """Fill `piece` from its coded form; raises CodecError where that is corrupt or of another size."""
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
