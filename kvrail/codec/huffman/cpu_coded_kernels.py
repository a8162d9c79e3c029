"""A block of bytes as it is, as one byte that all are, or coded: table, ends and streams. Modes 0 to 2 of README.md.

All lengths come from outside: what does not fit is refused.
"""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type, operator"
# mypy: disable-error-code="call-arg, var-annotated"

import numpy as np
from numba import int64, njit
from numba import uint8 as u8

from kvrail.codec.huffman.cpu_block_kernels import STREAMS, copy_bytes, read_streams, write_streams
from kvrail.codec.huffman.cpu_code_kernels import WINDOW, code_lengths, write_codes, write_tables

RAW, CONSTANT, HUFFMAN, SPARSE, FIELDS = 0, 1, 2, 4, 5
"""How a block of bytes is coded."""
LEAST_SAVING = 32
"""A block is coded if that saves at least one byte in 32: less is not worth the time of decoding."""
_ENDS = 4 * (STREAMS - 1)


@njit(nogil=True)
def write_number(target, place, number):
    """A number of 32 bits to four bytes of `target` from `place` on, the lowest first."""
    for byte in range(4):
        target[place + byte] = u8((number >> (8 * byte)) & 255)


@njit(nogil=True)
def read_number(source, place):
    """The inverse of write_number."""
    number = int64(0)
    for byte in range(4):
        number |= int64(source[place + byte]) << (8 * byte)
    return number


@njit(nogil=True)
def coded_bits(counts, lengths):
    """Bits of all symbols; -1 where one that occurs has no code."""
    bits = int64(0)
    for symbol in range(256):
        if counts[symbol] and not lengths[symbol]:
            return int64(-1)
        bits += counts[symbol] * int64(lengths[symbol])
    return bits


@njit(nogil=True)
def entropy_bits(counts, size):
    """What no code of single bytes can be below, in bits."""
    bits = 0.0
    for symbol in range(256):
        if counts[symbol]:
            bits -= counts[symbol] * np.log2(counts[symbol] / size)
    return bits


@njit(nogil=True)
def _table_range(lengths):
    first, last = 256, 0
    for symbol in range(256):
        if lengths[symbol]:
            first, last = min(first, symbol), symbol
    return first, last


@njit(nogil=True)
def _write_lengths(lengths, target):
    """First and last symbol that have a code, and the lengths from one to the other, four bits each; bytes written."""
    first, last = _table_range(lengths)
    target[0], target[1] = u8(first), u8(last)
    size = 2 + (last - first + 2) // 2
    target[2:size] = 0
    for symbol in range(first, last + 1):
        target[2 + (symbol - first) // 2] |= u8(lengths[symbol] << (4 * ((symbol - first) & 1)))
    return size


@njit(nogil=True)
def _read_lengths(source, lengths):
    """The inverse; bytes read, or -1 where there are too few."""
    lengths[:] = 0
    if source.size < 2 or source[1] < source[0]:
        return -1
    first, last = int64(source[0]), int64(source[1])
    size = 2 + (last - first + 2) // 2
    if source.size < size:
        return -1
    for symbol in range(first, last + 1):
        lengths[symbol] = (source[2 + (symbol - first) // 2] >> (4 * ((symbol - first) & 1))) & 15
    return size


@njit(nogil=True)
def encode_block(source, counts, room, target):
    """Write a block no larger than `source` into `target`; its mode and its size."""
    size = source.size
    lengths = np.empty(256, np.uint8)
    if entropy_bits(counts, size) > 8 * (size - size // LEAST_SAVING):
        copy_bytes(source, target)
        return RAW, size
    if code_lengths(counts, lengths) == 1:
        target[0] = source[0]
        return CONSTANT, 1
    first, last = _table_range(lengths)
    table = 2 + (last - first + 2) // 2
    if table + _ENDS + coded_bits(counts, lengths) // 8 + STREAMS > size - size // LEAST_SAVING:
        copy_bytes(source, target)
        return RAW, size
    return HUFFMAN, write_block(source, lengths, room, target)


@njit(nogil=True)
def write_block(source, lengths, room, target):
    """Code `source`: its table, ends and streams; the size, which may be more than `target` has."""
    table = _write_lengths(lengths, target)
    write_codes(lengths, room.codes)
    ends = write_streams(source, room.codes, room.streams, target[table + _ENDS :])
    for stream in range(STREAMS - 1):
        write_number(target, table + 4 * stream, ends[stream])
    return table + _ENDS + ends[STREAMS - 1]


@njit(nogil=True)
def _decode_streams(source, singles, runs, target):
    """Fill `target` from ends and streams; False where they do not fit."""
    if source.size < _ENDS:
        return False
    streams = source[_ENDS:]
    ends = np.empty(STREAMS, np.int64)
    for stream in range(STREAMS - 1):
        ends[stream] = read_number(source, 4 * stream)
        if ends[stream] > streams.size or (stream and ends[stream] < ends[stream - 1]):
            return False
    ends[STREAMS - 1] = streams.size
    return read_streams(streams, ends, singles, runs, target)


@njit(nogil=True)
def decode_block(source, mode, room, target):
    """Fill `target` from a block; False where it does not fit."""
    size = target.size
    if mode == RAW:
        if source.size != size:
            return False
        copy_bytes(source, target)
        return True
    if mode == CONSTANT:
        if source.size != 1:
            return False
        target[:] = source[0]
        return True
    lengths = np.empty(256, np.uint8)
    table = _read_lengths(source, lengths) if mode == HUFFMAN else -1
    if table < 0 or not write_tables(lengths, room.singles, room.levels):
        return False
    return _decode_streams(source[table:], room.singles, room.levels[WINDOW:], target)
