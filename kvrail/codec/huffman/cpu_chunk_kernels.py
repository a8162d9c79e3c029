"""A chunk of words cut into planes of bytes, each coded, and back. Only these are called from Python.

Numba keeps what it compiled until this file is another, and does not look at the files whose kernels it takes in.
"""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type, operator"

import numpy as np
from numba import int64, njit
from numba import uint8 as u8
from numba import uint16 as u16
from numba import uint32 as u32
from numba import uint64 as u64

from kvrail.codec.huffman.cpu_block_kernels import copy_bytes, count_bytes
from kvrail.codec.huffman.cpu_code_kernels import code_lengths, write_tables
from kvrail.codec.huffman.cpu_plane_kernels import RAW, decode_plane, encode_plane
from kvrail.codec.huffman.cpu_word_kernels import bytes_at

KERNELS = "c2ca0a4c0c1e6a5b"
"""XXH3-64 of the kernels that are taken in, so that this file changes with them: tests/codec/test_huffman.py."""


def kept(function):
    """Compile a function when it is first called; keep it for the next process where there is a place for that."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no directory for its cache
        return njit(nogil=True)(function)


@njit(nogil=True)
def _split(words, base, rotated, planes):
    """Bytes of `words` to planes [itemsize, n], the lowest byte first: two planes a pass over the words."""
    top = u64(8 * words.itemsize - 1)
    for plane in range(0, words.itemsize, 2):
        low, high, shift = planes[plane], planes[plane + 1], u64(8 * plane)
        if rotated and base.size:
            for place in range(words.size):
                word = u64(words[place] ^ base[place])
                word = ((word << u64(1)) | (word >> top)) >> shift
                low[place], high[place] = u8(word), u8(word >> u64(8))
        elif rotated:
            for place in range(words.size):
                word = u64(words[place])
                word = ((word << u64(1)) | (word >> top)) >> shift
                low[place], high[place] = u8(word), u8(word >> u64(8))
        elif base.size:
            for place in range(words.size):
                word = u64(words[place] ^ base[place]) >> shift
                low[place], high[place] = u8(word), u8(word >> u64(8))
        else:
            for place in range(words.size):
                word = u64(words[place]) >> shift
                low[place], high[place] = u8(word), u8(word >> u64(8))


@njit(nogil=True)
def _join_two(places, rotated, base, words):
    """Words of 16 bits of their planes; places: where these begin, uint64 [planes]. The inverse of _split."""
    low, high = bytes_at(places[0], words.size), bytes_at(places[1], words.size)
    if rotated:
        for place in range(words.size):
            word = u16(low[place]) | u16(u16(high[place]) << u16(8))
            words[place] = u16(word >> u16(1)) | u16(word << u16(15))
    else:
        for place in range(words.size):
            words[place] = u16(low[place]) | u16(u16(high[place]) << u16(8))
    if base.size:
        for place in range(words.size):
            words[place] ^= base[place]


@njit(nogil=True)
def _join_four(places, rotated, base, words):
    """Words of 32 bits, as _join_two."""
    b0, b1 = bytes_at(places[0], words.size), bytes_at(places[1], words.size)
    b2, b3 = bytes_at(places[2], words.size), bytes_at(places[3], words.size)
    for place in range(words.size):
        word = u32(b0[place]) | u32(b1[place]) << u32(8) | u32(b2[place]) << u32(16) | u32(b3[place]) << u32(24)
        words[place] = u32(word >> u32(1)) | u32(word << u32(31)) if rotated else word
    if base.size:
        for place in range(words.size):
            words[place] ^= base[place]


@njit(nogil=True)
def _join_eight(places, rotated, base, words):
    """Words of 64 bits, as _join_two."""
    words[:] = 0
    for plane in range(8):
        source, shift = bytes_at(places[plane], words.size), u64(8 * plane)
        for place in range(words.size):
            words[place] |= u64(source[place]) << shift
    if rotated:
        for place in range(words.size):
            words[place] = words[place] >> u64(1) | words[place] << u64(63)
    if base.size:
        for place in range(words.size):
            words[place] ^= base[place]


@njit(nogil=True)
def _split_chunk(raw, base, item, rotated, planes):
    if item == 1 and base.size == 0:
        copy_bytes(raw, planes[0])
    elif item == 1:
        for place in range(raw.size):
            planes[0, place] = raw[place] ^ base[place]
    elif item == 2:
        _split(raw.view(np.uint16), base.view(np.uint16), rotated, planes)
    elif item == 4:
        _split(raw.view(np.uint32), base.view(np.uint32), rotated, planes)
    else:
        _split(raw.view(np.uint64), base.view(np.uint64), rotated, planes)


@njit(nogil=True)
def _join_chunk(places, base, item, rotated, raw):
    if item == 1:
        for place in range(base.size):
            raw[place] ^= base[place]
    elif item == 2:
        _join_two(places, rotated, base.view(np.uint16), raw.view(np.uint16))
    elif item == 4:
        _join_four(places, rotated, base.view(np.uint32), raw.view(np.uint32))
    else:
        _join_eight(places, rotated, base.view(np.uint64), raw.view(np.uint64))


@kept
def count_chunk(raw, base, item, rotated, room, counts):
    """Add the bytes of a chunk's planes to `counts`, int64 [item, 256]; the rest as in encode_chunk."""
    planes = room.planes[:, : raw.size // item]
    _split_chunk(raw, base, item, rotated, planes)
    own = np.empty(256, np.int64)
    for plane in range(item):
        count_bytes(planes[plane], own)
        counts[plane] += own


@kept
def encode_chunk(raw, base, item, rotated, static, room, row):
    """Code a chunk, no larger than it is, into `room.coded`; its size.

    raw: uint8 [n * item], aligned: words of item bytes (1, 2, 4 or 8); base: as many or none: what is taken off by
    exclusive or. rotated: whether words are rotated left by one bit first. static: uint8 [item, 256], lengths of codes
    that need not be written, 0 where there are none. row: uint32 [item], gets each plane's size and, from bit 28 on,
    its mode.
    """
    planes = room.planes[:, : raw.size // item]
    _split_chunk(raw, base, item, rotated, planes)
    written = 0
    for plane in range(item):
        mode, size = encode_plane(planes[plane], static[plane], room, room.coded[written:])
        row[plane] = u32(size | mode << 28)
        written += size
    return written


@njit(nogil=True)
def _decode_chunk(source, row, singles, levels, base, item, rotated, room, raw):
    """Fill `raw` from a coded chunk; the number of the first plane that does not fit, or -1 where all do.

    singles, levels: tables of the codes that are not written, [item, WINDOW] and [item, 2 * WINDOW]; no columns where
    there are none. The sizes in `row` add up to `source`. The rest as in encode_chunk.
    """
    values = raw.size // item
    planes = room.planes[:, :values]
    places = np.empty(item, np.uint64)
    read = 0
    for plane in range(item):
        size, mode = int64(row[plane] & u32((1 << 28) - 1)), int64(row[plane] >> u32(28))
        coded = source[read : read + size]
        target = raw if item == 1 else planes[plane]
        if item > 1 and mode == RAW and size == values:  # it is read where it lies
            places[plane] = coded.ctypes.data
        else:
            places[plane] = target.ctypes.data
            if not decode_plane(coded, mode, singles[plane], levels[plane], room, target):
                return plane
        read += size
    _join_chunk(places, base, item, rotated, raw)
    return -1


@kept
def decode_chunks(source, ends, rows, singles, levels, base, item, rotated, room, raw, chunk_bytes):
    """Fill `raw` from chunks one behind the other; the number of the first that does not fit, or -1 where all do.

    ends: int64 [chunks], where each ends in `source`; rows: [chunks, item]; chunk_bytes: of each in `raw`, the last one
    what is left. The rest as in _decode_chunk.
    """
    start = 0
    for chunk in range(ends.size):
        first, stop = chunk * chunk_bytes, min((chunk + 1) * chunk_bytes, raw.size)
        taken_off = base[first:stop] if base.size else base
        coded, row = source[start : ends[chunk]], rows[chunk]
        if _decode_chunk(coded, row, singles, levels, taken_off, item, rotated, room, raw[first:stop]) >= 0:
            return chunk
        start = ends[chunk]
    return -1


@kept
def static_lengths(counts, lengths):
    """Lengths of an optimal code for these counts, int64 [256] to uint8 [256]; how many symbols occur."""
    return code_lengths(counts, lengths)


@kept
def static_tables(lengths, singles, levels):
    """Tables of a code, uint16 [WINDOW] and uint64 [2 * WINDOW]; False where the lengths are no prefix code."""
    return write_tables(lengths, singles, levels)
