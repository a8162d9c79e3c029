"""A chunk of words cut into planes of bytes, each coded, and back; and the loops in which a thread takes chunks.

Only these are called from Python: several threads at once, each with its own `room`, and never for one chunk alone, for
between calls threads wait for the interpreter.
"""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type, operator"

import numpy as np
from numba import int64, njit
from numba import uint8 as u8
from numba import uint16 as u16
from numba import uint32 as u32
from numba import uint64 as u64

from kvrail.codec.core.cpu_compile import compiled_when_called
from kvrail.codec.huffman.cpu_block_kernels import copy_bytes
from kvrail.codec.huffman.cpu_coded_kernels import RAW
from kvrail.codec.huffman.cpu_digest_kernels import SHORT, copied_digest, long_digest
from kvrail.codec.huffman.cpu_plane_kernels import decode_plane, encode_plane
from kvrail.codec.huffman.cpu_shared_kernels import is_known, publish, stop_all, take, wait_for
from kvrail.codec.huffman.cpu_word_kernels import bytes_at

HELD = 4
"""Coded chunks that a thread holds until it is known where they begin: until those before are coded."""


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


@njit(nogil=True)
def _part(whole, chunk, chunk_bytes):
    """A chunk's bytes of a tensor, or none of none."""
    return whole[chunk * chunk_bytes : min((chunk + 1) * chunk_bytes, whole.size)]


@njit(nogil=True)
def _encode_chunk(raw, base, item, rotated, room, row, coded):
    """Code a chunk, no larger than it is, into `coded`; its size. As encode_chunks."""
    planes = room.planes[:, : raw.size // item]
    _split_chunk(raw, base, item, rotated, planes)
    written = 0
    for plane in range(item):
        mode, size = encode_plane(planes[plane], room, coded[written:])
        row[plane] = u32(size | mode << 28)
        written += size
    return written


@compiled_when_called
def encode_chunks(raw, base, item, rotated, room, chunk_bytes, numbers, most, rows, digests, places, out):
    """Code chunks that no other thread has taken, `most` of them, one behind the other; whether there may be more.

    raw: uint8 [n * item], aligned: words of item bytes (1, 2, 4 or 8); base: as many or none: what is taken off by
    exclusive or. rotated: whether words are rotated left by one bit first. numbers: int64 [1], the next chunk. rows:
    uint32 [chunks, item], get each plane's size and, from bit 28 on, its mode; digests: uint64 [chunks], but for SHORT
    bytes and less; places: int64 [chunks + 1], where in `out` each begins, the first one known, the others -1.
    """
    chunks = places.size - 1
    held, sizes = np.empty(HELD, np.int64), np.empty(HELD, np.int64)
    first, count, taken, chunk = 0, 0, 0, 0
    while chunk < chunks:
        chunk = take(numbers) if taken < most else chunks
        taken += 1
        if chunk < chunks:
            line = (first + count) % HELD
            part, taken_off = _part(raw, chunk, chunk_bytes), _part(base, chunk, chunk_bytes)
            held[line] = chunk
            sizes[line] = _encode_chunk(part, taken_off, item, rotated, room, rows[chunk], room.coded[line])
            count += 1
        while count and (chunk >= chunks or count == HELD or is_known(places, held[first])):
            done, size = held[first], sizes[first]
            place = wait_for(places, done)
            publish(places, done + 1, place + size)
            if size > SHORT:
                digests[done] = copied_digest(room.coded[first, :size], out[place:], False)
            else:
                copy_bytes(room.coded[first, :size], out[place:])
            first, count = (first + 1) % HELD, count - 1
        first = first if count else 0  # what was used last is nearest
    return taken > most


@njit(nogil=True)
def _decode_chunk(source, row, base, item, rotated, room, raw):
    """Fill `raw` from a coded chunk; the number of the first plane that does not fit, or -1 where all do.

    The sizes in `row` add up to `source`. The rest as in encode_chunks.
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
            if not decode_plane(coded, mode, room, target):
                return plane
        read += size
    _join_chunk(places, base, item, rotated, raw)
    return -1


@njit(nogil=True)
def _is_plain(row, base, raw):
    """Whether a coded chunk is the very bytes of `raw`."""
    return row.size == 1 and base.size == 0 and row[0] == u32(raw.size | RAW << 28)


@compiled_when_called
def decode_chunks(source, ends, digests, rows, base, item, rotated, room, size, past_caches, numbers, most, raw):
    """Fill `raw` with chunks that no other thread has taken, `most` of them, each checked against its digest.

    Checked before it is decoded; what is only copied, as it is, for reading memory twice takes longer than the rest.
    ends: int64 [chunks], where each ends in `source`; digests: uint64 [chunks]; rows: [chunks, item]; those of SHORT
    bytes and less were checked before. size: bytes of a whole chunk of `raw`. past_caches: whether what is only copied
    is stored past them, as in copied_digest. Gives the number of a chunk that does not fit and whether it has its
    digest; -1 where all do, and whether there may be more. The rest as in _decode_chunk and encode_chunks.
    """
    for _ in range(most):
        chunk = take(numbers)
        if chunk >= ends.size:
            return -1, False
        coded = source[ends[chunk - 1] if chunk else 0 : ends[chunk]]
        part, taken_off = _part(raw, chunk, size), _part(base, chunk, size)
        row, found, copied = rows[chunk], digests[chunk], False
        if coded.size > SHORT and _is_plain(row, taken_off, part):
            found, copied = copied_digest(coded, part, past_caches), True
        elif coded.size > SHORT:
            found = long_digest(coded)
        if found != digests[chunk]:
            stop_all(numbers, ends.size)
            return chunk, False
        if not copied and _decode_chunk(coded, row, taken_off, item, rotated, room, part) >= 0:
            stop_all(numbers, ends.size)
            return chunk, True
    return -1, True
