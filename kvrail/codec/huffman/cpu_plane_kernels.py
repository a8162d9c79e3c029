"""A plane of bytes coded as suits it, and back: the modes of README.md.

All lengths come from outside: what does not fit is refused.
"""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type, operator"
# mypy: disable-error-code="call-arg, var-annotated"

import numpy as np
from numba import float64, int64, njit, uint64
from numba import uint8 as u8
from numba import uint64 as u64

from kvrail.codec.huffman.cpu_block_kernels import (
    STREAMS,
    copy_bytes,
    count_bytes,
    count_lines,
    read_streams,
    write_streams,
)
from kvrail.codec.huffman.cpu_code_kernels import WINDOW, code_lengths, write_codes, write_tables
from kvrail.codec.huffman.cpu_field_kernels import choose_field, cut, field_bytes, paste, without_field
from kvrail.codec.huffman.cpu_word_kernels import load_word, trailing_zeros

RAW, CONSTANT, HUFFMAN, STATIC, SPARSE, FIELDS = range(6)
"""How a block of bytes is coded."""
SPARSE_SHARE = 0.6
"""Share of the commonest byte from which on marking it by one bit a value is tried: below, its code has two bits."""
SPARSE_HEADER = 12
SPARSE_LEAST = 256
"""Bytes of the smallest block with marks: header and marks of a smaller one may not fit into its place."""
LEAST_SAVING = 32
"""A block is coded where that saves at least one of so many bytes: less is not worth the time of decoding."""
SAMPLED = 5
"""Of so many lines one is looked at to find out whether, and how, a plane is coded."""
SAMPLE_LEAST = 1 << 14
"""Bytes of the smallest plane of which only a sample is looked at, and that is cut into fields."""
FIELDS_HEADER = 8
_ENDS = 4 * (STREAMS - 1)


@njit(nogil=True)
def _write_number(target, place, number):
    for byte in range(4):
        target[place + byte] = u8((number >> (8 * byte)) & 255)


@njit(nogil=True)
def _read_number(source, place):
    number = int64(0)
    for byte in range(4):
        number |= int64(source[place + byte]) << (8 * byte)
    return number


@njit(nogil=True)
def _coded_bits(counts, lengths):
    """Bits of all symbols; -1 where one that occurs has no code."""
    bits = int64(0)
    for symbol in range(256):
        if counts[symbol] and not lengths[symbol]:
            return int64(-1)
        bits += counts[symbol] * int64(lengths[symbol])
    return bits


@njit(nogil=True)
def _entropy_bits(counts, size):
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
def _encode_block(source, counts, static, room, target):
    """Write a block no larger than `source` into `target`; its mode and its size.

    static: lengths of a code that need not be written, all 0 where there is none.
    """
    size = source.size
    lengths = np.empty(256, np.uint8)
    if _entropy_bits(counts, size) > 8 * (size - size // LEAST_SAVING):
        copy_bytes(source, target)
        return RAW, size
    if code_lengths(counts, lengths) == 1:
        target[0] = source[0]
        return CONSTANT, 1
    first, last = _table_range(lengths)
    table = 2 + (last - first + 2) // 2
    mode, bits = HUFFMAN, _coded_bits(counts, lengths)
    static_bits = _coded_bits(counts, static)
    if 0 <= static_bits <= bits + bits // 256 + 8 * table:
        mode, bits, table = STATIC, static_bits, 0
        lengths[:] = static
    if table + _ENDS + bits // 8 + STREAMS > size - size // LEAST_SAVING:
        copy_bytes(source, target)
        return RAW, size
    return mode, _write_block(source, lengths, mode == HUFFMAN, room, target)


@njit(nogil=True)
def _write_block(source, lengths, with_table, room, target):
    """Code `source`: its table, or none, ends and streams; the size, which may be more than `target` has."""
    table = _write_lengths(lengths, target) if with_table else 0
    write_codes(lengths, room.codes)
    ends = write_streams(source, room.codes, room.streams, target[table + _ENDS :])
    for stream in range(STREAMS - 1):
        _write_number(target, table + 4 * stream, ends[stream])
    return table + _ENDS + ends[STREAMS - 1]


@njit(nogil=True)
def _decode_streams(source, singles, runs, target):
    """Fill `target` from ends and streams; False where they do not fit."""
    if source.size < _ENDS:
        return False
    streams = source[_ENDS:]
    ends = np.empty(STREAMS, np.int64)
    for stream in range(STREAMS - 1):
        ends[stream] = _read_number(source, 4 * stream)
        if ends[stream] > streams.size or (stream and ends[stream] < ends[stream - 1]):
            return False
    ends[STREAMS - 1] = streams.size
    return read_streams(streams, ends, singles, runs, target)


@njit(nogil=True)
def _decode_block(source, mode, static_singles, static_levels, room, target):
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
    table = 0
    singles, levels = static_singles, static_levels
    if mode == HUFFMAN:
        lengths = np.empty(256, np.uint8)
        table = _read_lengths(source, lengths)
        if table < 0 or not write_tables(lengths, room.singles, room.levels):
            return False
        singles, levels = room.singles, room.levels
    elif mode != STATIC or singles.size == 0:
        return False
    return _decode_streams(source[table:], singles, levels[WINDOW:], target)


@njit(nogil=True)
def _is_sparse(counts, commonest, size):
    """Whether codes of all bytes stay far above the entropy, to which marks and codes of the rest come near."""
    share = float64(counts[commonest]) / size
    if size < SPARSE_LEAST or share < SPARSE_SHARE or share == 1.0:
        return False
    lengths = np.empty(256, np.uint8)
    code_lengths(counts, lengths)
    return _entropy_bits(counts, size) < 0.97 * _coded_bits(counts, lengths)


@njit(nogil=True)
def _encode_sparse(source, counts, commonest, room, target):
    """Marks of the bytes that are not the commonest, then those bytes; the size, or -1 where that is not smaller."""
    none, size = np.zeros(256, np.uint8), source.size
    marks, rest = room.spare[0, : (size + 7) // 8], room.spare[1]
    marked = uint64(0)
    for group in range(size // 8):
        bits = u64(0)
        for bit in range(8):
            symbol = source[8 * group + bit]
            other = u64(symbol != commonest)
            bits |= other << u64(bit)
            rest[marked] = symbol
            marked += other
        marks[group] = u8(bits)
    if size & 7:
        marks[size // 8] = 0
    for place in range(size // 8 * 8, size):
        other = u64(source[place] != commonest)
        marks[place >> 3] |= u8(other << u64(place & 7))
        rest[marked] = source[place]
        marked += other
    found = int64(marked)
    mark_counts = np.empty(256, np.int64)
    count_bytes(marks, mark_counts)
    mark_mode, mark_size = _encode_block(marks, mark_counts, none, room, target[SPARSE_HEADER:])
    start = SPARSE_HEADER + mark_size
    rest_counts = counts.copy()
    rest_counts[commonest] = 0
    if start + found > size:
        return -1
    rest_mode, rest_size = _encode_block(rest[:found], rest_counts, none, room, target[start:])
    target[0], target[1], target[2], target[3] = u8(commonest), u8(mark_mode), u8(rest_mode), u8(0)
    _write_number(target, 4, found)
    _write_number(target, 8, mark_size)
    return start + rest_size


@njit(nogil=True)
def _scatter(marks, rest, commonest, target):
    """Fill `target` with the commonest byte and, at marks, the next of the rest; whether these come out even."""
    set_marks = np.empty(256, np.int64)
    for mark in range(256):
        set_marks[mark] = sum([mark >> bit & 1 for bit in range(8)])
    total, size = 0, target.size
    for mark in range(marks.size):
        total += set_marks[marks[mark]]
    if total != rest.size or (size & 7 and marks[marks.size - 1] >> (size & 7) != 0):
        return False
    target[:] = commonest
    taken = uint64(0)  # never above the number of marks, so that no check is needed below
    first = uint64(marks.ctypes.data)
    for word in range(marks.size // 8):
        bits = load_word(first + uint64(8 * word))
        while bits:
            target[uint64(64 * word) + trailing_zeros(bits)] = rest[taken]
            taken += u64(1)
            bits &= bits - u64(1)
    for place in range(marks.size // 8 * 64, size):
        if marks[place >> 3] >> (place & 7) & 1:
            target[place] = rest[taken]
            taken += u64(1)
    return True


@njit(nogil=True)
def _decode_sparse(source, none_singles, none_levels, room, target):
    """Fill `target`; False where the block does not fit."""
    if source.size < SPARSE_HEADER:
        return False
    found, mark_size = _read_number(source, 4), _read_number(source, 8)
    if found >= target.size or SPARSE_HEADER + mark_size > source.size or source[3] != 0:
        return False
    marks, rest = room.spare[0, : (target.size + 7) // 8], room.spare[1, :found]
    body = source[SPARSE_HEADER:]
    if not _decode_block(body[:mark_size], int64(source[1]), none_singles, none_levels, room, marks):
        return False
    if not _decode_block(body[mark_size:], int64(source[2]), none_singles, none_levels, room, rest):
        return False
    return _scatter(marks, rest, source[0], target)


@njit(nogil=True)
def _encode_fields(source, sample, shift, bits, room, target):
    """Fields of `bits` bits as they are, then the rest, coded; the size, or -1 where that is not smaller.

    sample: how often each byte occurs in a part of them, int64 [256]. Where nearly all values that the rest may have
    are in it, the code is made for it, and for once more each value: counting all takes longer than that costs.
    """
    size, values = source.size, 256 >> bits
    start = FIELDS_HEADER + field_bytes(bits, size)
    most = size - size // LEAST_SAVING - start
    rest, coded = room.spare[0, :size], room.spare[1]
    cut(source, shift, bits, room.fields, rest)
    counts, lengths = np.empty(256, np.int64), np.zeros(256, np.uint8)
    without_field(sample, shift, bits, counts)
    if 4 * (counts[:values] == 0).sum() <= values:
        counts[:values] += 1
        code_lengths(counts, lengths)
        mode, written = HUFFMAN, _write_block(rest, lengths, True, room, coded)
    else:
        count_bytes(rest, counts)
        mode, written = _encode_block(rest, counts, lengths, room, coded)
    if written > most:
        return -1
    target[:FIELDS_HEADER] = 0
    target[0], target[1], target[2] = u8(shift), u8(bits), u8(mode)
    copy_bytes(room.fields[: start - FIELDS_HEADER], target[FIELDS_HEADER:])
    copy_bytes(coded[:written], target[start:])
    return start + written


@njit(nogil=True)
def _decode_fields(source, none_singles, none_levels, room, target):
    """Fill `target`; False where the block does not fit."""
    if source.size < FIELDS_HEADER:
        return False
    shift, bits = int64(source[0]), int64(source[1])
    if bits < 1 or shift + bits > 8:
        return False
    start = FIELDS_HEADER + field_bytes(bits, target.size)
    if start > source.size:
        return False
    if not _decode_block(source[start:], int64(source[2]), none_singles, none_levels, room, target):
        return False
    paste(source[FIELDS_HEADER:start], shift, bits, target)
    return True


@njit(nogil=True)
def encode_plane(source, static, room, target):
    """Code a plane, no larger than it is, into `target`; its mode and its size."""
    counts, size = np.empty(256, np.int64), source.size
    if size >= SAMPLE_LEAST:
        count_lines(source, SAMPLED, counts)
        seen = counts.sum()
        if _entropy_bits(counts, seen) > 8 * (seen - seen // LEAST_SAVING):
            copy_bytes(source, target)
            return RAW, size
        if counts.max() < SPARSE_SHARE * seen and not static.any():
            shift, bits = choose_field(counts, seen)
            if bits:
                coded = _encode_fields(source, counts, shift, bits, room, target)
                if coded >= 0:
                    return FIELDS, coded
    count_bytes(source, counts)
    commonest = int64(np.argmax(counts))
    if _is_sparse(counts, commonest, size):
        coded = _encode_sparse(source, counts, commonest, room, target)
        if 0 <= coded < size:
            return SPARSE, coded
    return _encode_block(source, counts, static, room, target)


@njit(nogil=True)
def decode_plane(source, mode, singles, levels, room, target):
    """Fill `target` from a coded plane; False where it does not fit."""
    if mode == SPARSE:
        return _decode_sparse(source, singles[:0], levels[:0], room, target)
    if mode == FIELDS:
        return _decode_fields(source, singles[:0], levels[:0], room, target)
    return _decode_block(source, mode, singles, levels, room, target)
