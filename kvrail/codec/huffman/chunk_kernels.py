"""A chunk of words cut into planes of bytes, each coded, and back. Only these are called from Python.

Numba keeps what it compiled by this file's time of change: touch it when the kernels that it takes in are changed.
"""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type, operator"

import numpy as np
from numba import int64, njit
from numba import uint8 as u8
from numba import uint32 as u32
from numba import uint64 as u64

from kvrail.codec.huffman.block_kernels import copy_bytes, count_bytes
from kvrail.codec.huffman.code_kernels import code_lengths, write_tables
from kvrail.codec.huffman.plane_kernels import decode_plane, encode_plane


def kept(function):
    """Compile a function when it is first called; keep it for the next process where there is a place for that."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no directory for its cache
        return njit(nogil=True)(function)


@njit(nogil=True)
def _split(words, base, rotated, planes):
    """Bytes of `words` to planes [itemsize, n], the lowest byte first."""
    top = u64(8 * words.itemsize - 1)
    for plane in range(words.itemsize):
        target, shift = planes[plane], u64(8 * plane)
        if rotated and base.size:
            for place in range(words.size):
                word = u64(words[place] ^ base[place])
                target[place] = u8(((word << u64(1)) | (word >> top)) >> shift)
        elif rotated:
            for place in range(words.size):
                word = u64(words[place])
                target[place] = u8(((word << u64(1)) | (word >> top)) >> shift)
        elif base.size:
            for place in range(words.size):
                target[place] = u8(u64(words[place] ^ base[place]) >> shift)
        else:
            for place in range(words.size):
                target[place] = u8(u64(words[place]) >> shift)


@njit(nogil=True)
def _join(planes, base, rotated, words):
    """The inverse of _split."""
    top = u64(8 * words.itemsize - 1)
    mask = ~u64(0) >> u64(64 - 8 * words.itemsize)
    if words.itemsize == 2:
        low, high = planes[0], planes[1]
        for place in range(words.size):
            words[place] = u64(low[place]) | u64(high[place]) << u64(8)
    else:
        words[:] = 0
        for plane in range(words.itemsize):
            source, shift = planes[plane], u64(8 * plane)
            for place in range(words.size):
                words[place] |= u64(source[place]) << shift
    if rotated:
        for place in range(words.size):
            word = u64(words[place])
            words[place] = (word >> u64(1)) | ((word << top) & mask)
    if base.size:
        for place in range(words.size):
            words[place] ^= base[place]


@njit(nogil=True)
def _split_chunk(raw, base, item, rotated, planes):
    if item == 1 and base.size == 0:
        copy_bytes(raw, planes[0])
    elif item == 1:
        _split(raw, base, False, planes)
    elif item == 2:
        _split(raw.view(np.uint16), base.view(np.uint16), rotated, planes)
    elif item == 4:
        _split(raw.view(np.uint32), base.view(np.uint32), rotated, planes)
    else:
        _split(raw.view(np.uint64), base.view(np.uint64), rotated, planes)


@njit(nogil=True)
def _join_chunk(planes, base, item, rotated, raw):
    if item == 1:
        for place in range(base.size):
            raw[place] ^= base[place]
    elif item == 2:
        _join(planes, base.view(np.uint16), rotated, raw.view(np.uint16))
    elif item == 4:
        _join(planes, base.view(np.uint32), rotated, raw.view(np.uint32))
    else:
        _join(planes, base.view(np.uint64), rotated, raw.view(np.uint64))


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
def encode_chunk(raw, base, item, rotated, static, room, target, row):
    """Code a chunk, no larger than it is, into `target`; its size.

    raw: uint8 [n * item], aligned: words of item bytes (1, 2, 4 or 8); base: as many or none: what is taken off by
    exclusive or. rotated: whether words are rotated left by one bit first. static: uint8 [item, 256], lengths of codes
    that need not be written, 0 where there are none. row: uint32 [item], gets each plane's size and, from bit 28 on,
    its mode.
    """
    planes = room.planes[:, : raw.size // item]
    _split_chunk(raw, base, item, rotated, planes)
    written = 0
    for plane in range(item):
        mode, size = encode_plane(planes[plane], static[plane], room, target[written:])
        row[plane] = u32(size | mode << 28)
        written += size
    return written


@kept
def decode_chunk(source, row, singles, runs, base, item, rotated, room, raw):
    """Fill `raw` from a coded chunk; the number of the first plane that does not fit, or -1 where all do.

    singles, runs: tables of the codes that are not written, [item, WINDOW]; no columns where there are none. The sizes
    in `row` add up to `source`. The rest as in encode_chunk.
    """
    values = raw.size // item
    planes = room.planes[:, :values]
    read = 0
    for plane in range(item):
        size, mode = int64(row[plane] & u32((1 << 28) - 1)), int64(row[plane] >> u32(28))
        target = raw if item == 1 else planes[plane]
        if not decode_plane(source[read : read + size], mode, singles[plane], runs[plane], room, target):
            return plane
        read += size
    _join_chunk(planes, base, item, rotated, raw)
    return -1


@kept
def static_lengths(counts, lengths):
    """Lengths of an optimal code for these counts, int64 [256] to uint8 [256]; how many symbols occur."""
    return code_lengths(counts, lengths)


@kept
def static_tables(lengths, singles, runs):
    """Tables of a code, uint16 and uint64 [WINDOW]; False where the lengths are no prefix code."""
    return write_tables(lengths, singles, runs)
