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

from kvrail.codec.huffman.cpu_block_kernels import copy_bytes, count_bytes, count_lines
from kvrail.codec.huffman.cpu_code_kernels import code_lengths
from kvrail.codec.huffman.cpu_coded_kernels import (
    FIELDS,
    HUFFMAN,
    LEAST_SAVING,
    RAW,
    SPARSE,
    coded_bits,
    decode_block,
    encode_block,
    entropy_bits,
    read_number,
    write_block,
    write_number,
)
from kvrail.codec.huffman.cpu_field_kernels import choose_field, cut, field_bytes, paste, without_field
from kvrail.codec.huffman.cpu_word_kernels import (
    DEPOSITS,
    deposited,
    extracted,
    load_word,
    set_bits,
    store_word,
    trailing_zeros,
    words_at,
)

SPARSE_SHARE = 0.6
"""Share of the commonest byte from which on marking it by one bit a value is tried: below, its code has two bits."""
SPARSE_HEADER = 12
SPARSE_LEAST = 256
"""Bytes of the smallest block with marks: header and marks of a smaller one may not fit into its place."""
SAMPLED = 5
"""One line in five is sampled to decide whether, and how, a plane is coded."""
SAMPLE_LEAST = 1 << 14
"""Bytes of the smallest plane that is decided by a sample and cut into fields."""
SURPRISE = 64
"""A block may exceed the size that its sample predicts by one byte in 64, plus 64 bytes."""
FIELDS_HEADER = 8


@njit(nogil=True)
def _is_sparse(counts, commonest, size):
    """Whether codes of all bytes stay far above the entropy, to which marks and codes of the rest come near."""
    share = float64(counts[commonest]) / size
    if size < SPARSE_LEAST or share < SPARSE_SHARE or share == 1.0:
        return False
    lengths = np.empty(256, np.uint8)
    code_lengths(counts, lengths)
    return entropy_bits(counts, size) < 0.97 * coded_bits(counts, lengths)


@njit(nogil=True)
def gather_bits(source, commonest, marks, rest):
    """Mark which bytes of whole words of `source` are not the commonest, and put those to `rest`; how many they are."""
    marked = uint64(0)
    for group in range(source.size // 8):
        bits = u64(0)
        for bit in range(8):
            symbol = source[8 * group + bit]
            other = u64(symbol != commonest)
            bits |= other << u64(bit)
            rest[marked] = symbol
            marked += other
        marks[group] = u8(bits)
    return marked


@njit(nogil=True)
def gather_words(source, commonest, marks, rest):
    """The same, a word at a time; up to eight bytes behind those of the rest are written too."""
    first, out = uint64(source.ctypes.data), uint64(rest.ctypes.data)
    ones, place = u64(0x0101010101010101), out
    low, common = ones * u64(127), u64(commonest) * ones
    for group in range(source.size // 8):
        word = load_word(first + uint64(8 * group))
        other = word ^ common
        others = ((((other & low) + low) | other) >> u64(7)) & ones  # a one in each byte that is another
        marks[group] = u8((others * u64(0x0102040810204080)) >> u64(56))
        store_word(place, extracted(word, others * u64(255)))
        place += set_bits(others)
    return place - out


@njit(nogil=True)
def _encode_sparse(source, counts, commonest, room, target):
    """Marks of the bytes that are not the commonest, then those bytes; the size, or -1 where that is not smaller."""
    size = source.size
    marks, rest = room.spare[0, : (size + 7) // 8], room.spare[1]
    marked = gather_words(source, commonest, marks, rest) if DEPOSITS else gather_bits(source, commonest, marks, rest)
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
    mark_mode, mark_size = encode_block(marks, mark_counts, room, target[SPARSE_HEADER:])
    start = SPARSE_HEADER + mark_size
    rest_counts = counts.copy()
    rest_counts[commonest] = 0
    if start + found > size:
        return -1
    rest_mode, rest_size = encode_block(rest[:found], rest_counts, room, target[start:])
    target[0], target[1], target[2], target[3] = u8(commonest), u8(mark_mode), u8(rest_mode), u8(0)
    write_number(target, 4, found)
    write_number(target, 8, mark_size)
    return start + rest_size


@njit(nogil=True)
def scatter_bits(marks, rest, commonest, target):
    """Fill whole words of `target` with the commonest byte and, at marks, the next of the rest; how many those are."""
    taken = uint64(0)
    target[:] = commonest
    for mark in range(target.size // 8):
        bits = u64(marks[mark])
        while bits:
            target[uint64(8 * mark) + trailing_zeros(bits)] = rest[taken]
            taken += u64(1)
            bits &= bits - u64(1)
    return taken


@njit(nogil=True)
def scatter_words(marks, rest, commonest, target):
    """The same, a word at a time; eight bytes behind the rest are read too."""
    masks = np.zeros(256, np.uint64)
    for mark in range(256):
        for bit in range(8):
            masks[mark] |= u64(mark >> bit & 1) * u64(255) << u64(8 * bit)
    first, out = uint64(rest.ctypes.data), uint64(target.ctypes.data)
    source, common = first, u64(commonest) * u64(0x0101010101010101)
    for mark in range(target.size // 8):
        mask = masks[marks[mark]]
        store_word(out + uint64(8 * mark), deposited(load_word(source), mask) | (common & ~mask))
        source += set_bits(u64(marks[mark]))
    return source - first


@njit(nogil=True)
def _scatter(marks, rest, commonest, target):
    """Fill `target` with the commonest byte and, at marks, the next of the rest; whether these come out even."""
    size, total = target.size, u64(0)
    for word in words_at(marks.ctypes.data, marks.size // 8):
        total += set_bits(word)
    for mark in range(marks.size // 8 * 8, marks.size):
        total += set_bits(u64(marks[mark]))
    if total != u64(rest.size) or (size & 7 and marks[marks.size - 1] >> (size & 7) != 0):
        return False
    # What is taken is never above the number of marks, so that no check is needed below.
    taken = scatter_words(marks, rest, commonest, target) if DEPOSITS else scatter_bits(marks, rest, commonest, target)
    for place in range(size // 8 * 8, size):
        target[place] = commonest
        if marks[place >> 3] >> (place & 7) & 1:
            target[place] = rest[taken]
            taken += u64(1)
    return True


@njit(nogil=True)
def _decode_sparse(source, room, target):
    """Fill `target`; False where the block does not fit."""
    if source.size < SPARSE_HEADER:
        return False
    found, mark_size = read_number(source, 4), read_number(source, 8)
    if found >= target.size or SPARSE_HEADER + mark_size > source.size or source[3] != 0:
        return False
    marks, rest = room.spare[0, : (target.size + 7) // 8], room.spare[1, :found]
    body = source[SPARSE_HEADER:]
    if not decode_block(body[:mark_size], int64(source[1]), room, marks):
        return False
    if not decode_block(body[mark_size:], int64(source[2]), room, rest):
        return False
    return _scatter(marks, rest, source[0], target)


@njit(nogil=True)
def _ranges(source, top):
    """First and last value that occurs below `top`, a power of two, and those from it on: 0 and -1 where none does."""
    low, high = u8(255), u8(0)
    turned_low, turned_high = u8(255), u8(0)
    for place in range(source.size):
        one = source[place]
        turned = u8(one ^ u8(top))
        low, high = min(low, one), max(high, one)
        turned_low, turned_high = min(turned_low, turned), max(turned_high, turned)
    lower = (int64(low), int64(turned_high) ^ top) if low < top else (0, -1)
    upper = (int64(turned_low) ^ top, int64(high)) if high >= top else (0, -1)
    return lower, upper


@njit(nogil=True)
def _sampled_lengths(source, counts, values, lengths):
    """The code for a sample and once more each value that may occur; how many bytes all should take, or -1.

    values: a power of two that all are below. counts: int64 [256], of the sample; gets what the code is made for.
    -1 where more than one in four of what may occur is not in the sample.
    """
    lower, upper = _ranges(source, values // 2)
    unseen, possible = 0, 0
    for first, last in (lower, upper):
        for value in range(first, last + 1):
            unseen += counts[value] == 0
            possible += 1
            counts[value] += 1
    if 4 * unseen > possible or possible < 2:
        return int64(-1)
    code_lengths(counts, lengths)
    return coded_bits(counts, lengths) * source.size // (8 * counts.sum())


@njit(nogil=True)
def _encode_rest(source, sample, values, room, target):
    """Code a block of values below `values` by a sample, or where that does not suit by all; its mode and its size."""
    counts, lengths, size = sample.copy(), np.zeros(256, np.uint8), source.size
    expected = _sampled_lengths(source, counts, values, lengths)
    if expected >= 0:
        written = write_block(source, lengths, room, target)
        if written <= expected + expected // SURPRISE + SURPRISE:
            return HUFFMAN, written
    count_bytes(source, counts)
    return encode_block(source, counts, room, target[:size])


@njit(nogil=True)
def _encode_sampled(source, sample, room, target):
    """Code a plane by a sample of it, with fields cut off where that pays; mode and size, -1 where that saves nothing.

    sample: how often each byte occurs in a part of them, int64 [256]. Counting all takes longer than a sample costs.
    """
    size = source.size
    most = size - size // LEAST_SAVING
    shift, bits = choose_field(sample, sample.sum())
    if bits == 0:
        mode, written = _encode_rest(source, sample, 256, room, target)
        return mode, written if written <= most else -1
    start = FIELDS_HEADER + field_bytes(bits, size)
    rest, coded = room.spare[0, :size], room.spare[1]
    cut(source, shift, bits, room.fields, rest)
    counts = np.empty(256, np.int64)
    without_field(sample, shift, bits, counts)
    mode, written = _encode_rest(rest, counts, 256 >> bits, room, coded)
    if start + written > most:
        return FIELDS, -1
    target[:FIELDS_HEADER] = 0
    target[0], target[1], target[2] = u8(shift), u8(bits), u8(mode)
    copy_bytes(room.fields[: start - FIELDS_HEADER], target[FIELDS_HEADER:])
    copy_bytes(coded[:written], target[start:])
    return FIELDS, start + written


@njit(nogil=True)
def _decode_fields(source, room, target):
    """Fill `target`; False where the block does not fit."""
    if source.size < FIELDS_HEADER:
        return False
    shift, bits = int64(source[0]), int64(source[1])
    if bits < 1 or shift + bits > 8:
        return False
    start = FIELDS_HEADER + field_bytes(bits, target.size)
    if start > source.size:
        return False
    if not decode_block(source[start:], int64(source[2]), room, target):
        return False
    paste(source[FIELDS_HEADER:start], shift, bits, target)
    return True


@njit(nogil=True)
def encode_plane(source, room, target):
    """Code a plane, no larger than it is, into `target`; its mode and its size."""
    counts, size = np.empty(256, np.int64), source.size
    if size >= SAMPLE_LEAST:
        count_lines(source, SAMPLED, counts)
        seen = counts.sum()
        if entropy_bits(counts, seen) > 8 * (seen - seen // LEAST_SAVING):
            copy_bytes(source, target)
            return RAW, size
        if counts.max() < SPARSE_SHARE * seen:
            mode, coded = _encode_sampled(source, counts, room, target)
            if coded >= 0:
                return mode, coded
    count_bytes(source, counts)
    commonest = int64(np.argmax(counts))
    if _is_sparse(counts, commonest, size):
        coded = _encode_sparse(source, counts, commonest, room, target)
        if 0 <= coded < size:
            return SPARSE, coded
    return encode_block(source, counts, room, target)


@njit(nogil=True)
def decode_plane(source, mode, room, target):
    """Fill `target` from a coded plane; False where it does not fit."""
    if mode == SPARSE:
        return _decode_sparse(source, room, target)
    if mode == FIELDS:
        return _decode_fields(source, room, target)
    return decode_block(source, mode, room, target)
