"""Bytes cut into a field of bits that hardly shrink, which travel as they are, and the rest, which is coded.

In a byte of float8_e4m3fn, for example, the field is the lower bits of the mantissa and the sign. The rest has shorter
codes, so that one look-up finds more of them. README.md has the layout.
"""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type, operator"

import numpy as np
from numba import njit
from numba import uint8 as u8
from numba import uint64 as u64

from kvrail.codec.huffman.cpu_code_kernels import code_bits
from kvrail.codec.huffman.cpu_word_kernels import words_at

MOST_SHIFT = 1
"""Highest place of a field's lowest bit: below it is at most the sign, which rotation brought there."""
DEAREST = 300
"""A bit of a field may cost one bit in 300: it saves look-ups."""
NOTHING = 2000
"""One bit in 2,000 counts as none."""
ENOUGH = 5
"""Bits of a code from which on look-ups are to be spared: of shorter ones each look-up gives more than two."""
_BYTES = 0x0101010101010101


@njit(nogil=True)
def without_field(counts, shift, bits, rest):
    """How often each value of what `cut` leaves occurs, from how often each byte does: int64 [256] both."""
    rest[:] = 0
    low = (1 << shift) - 1
    for symbol in range(256):
        rest[symbol >> (shift + bits) << shift | symbol & low] += counts[symbol]


@njit(nogil=True)
def choose_field(counts, size):
    """The widest field of bytes, `size` of them, that costs next to nothing: its lowest bit, and its bits or 0.

    counts: int64 [256].
    """
    plain = code_bits(counts)
    best_shift, best = 0, 0
    rest = np.empty(256, np.int64)
    for shift in range(MOST_SHIFT + 1):
        left = plain
        for bits in range(1, 8 - shift + 1):
            without_field(counts, shift, bits, rest)
            was, left = left, code_bits(rest)
            loss = left + bits * size - plain
            if loss > plain * bits // DEAREST or (loss > plain // NOTHING and was <= ENOUGH * size):
                break
            if bits > best:
                best_shift, best = shift, bits
    return best_shift, best


@njit(nogil=True)
def field_bytes(bits, size):
    """Bytes that the fields of `size` bytes take."""
    total = 0
    for part in (4, 2, 1):
        if bits & part:
            total += _part_bytes(part, size)
    return total


@njit(nogil=True)
def _part_bytes(part, size):
    """Bytes that `part` bits of each of `size` bytes take, in whole words."""
    return (part * size + 63) // 64 * 8


@njit(nogil=True)
def cut(source, shift, bits, fields, rest):
    """Fields of the bytes of `source`, `bits` each from bit `shift` on, to `fields`, and what is left to `rest`."""
    size, place, done = source.size, 0, 0
    low, high = u64((1 << shift) - 1), u64((255 >> bits) & ~((1 << shift) - 1))
    words, out = words_at(source.ctypes.data, size // 8), words_at(rest.ctypes.data, size // 8)
    lows, highs = low * u64(_BYTES), high * u64(_BYTES)
    for word in range(words.size):
        out[word] = ((words[word] >> u64(bits)) & highs) | (words[word] & lows)
    for at in range(size // 8 * 8, size):
        one = u64(source[at])
        rest[at] = u8(((one >> u64(bits)) & high) | (one & low))
    for part in (4, 2, 1):
        if bits & part:
            step = _part_bytes(part, size)
            _cut_part(source, u64(shift + done), part, fields[place : place + step])
            place += step
            done += part


@njit(nogil=True)
def _cut_part(source, shift, part, fields):
    """`part` bits of each byte of `source`, from bit `shift` on: byte j has those of bytes j, j + fields.size, ..."""
    mask, size, step = u64((1 << part) - 1), source.size, fields.size
    masks = mask * u64(_BYTES)
    fields[:] = 0
    for line in range(8 // part):
        start, up = line * step, u64(part * line)
        stop = min(start + step, size)
        whole = max(stop - start, 0) // 8
        words, out = words_at(source[start:].ctypes.data, whole), words_at(fields.ctypes.data, whole)
        for word in range(whole):
            out[word] |= ((words[word] >> shift) & masks) << up
        for at in range(start + 8 * whole, stop):
            fields[at - start] |= u8(((u64(source[at]) >> shift) & mask) << up)


@njit(nogil=True)
def paste(fields, shift, bits, target):
    """Put fields, which `cut` made, into the bytes of `target`, which has the rest."""
    size, place, done = target.size, 0, 0
    low, high = u64((1 << shift) - 1), u64((255 >> bits) & ~((1 << shift) - 1))
    for part in (4, 2, 1):
        if bits & part:
            step = _part_bytes(part, size)
            if done:
                _paste_part(fields[place : place + step], u64(shift + done), part, u64(255), u64(0), u64(0), target)
            else:
                _paste_part(fields[place : place + step], u64(shift), part, low, high, u64(bits), target)
            place += step
            done += part


@njit(nogil=True)
def _paste_part(fields, shift, part, stay, move, up, target):
    """Bits of `target` in `stay` stay, those in `move` go up by `up` bits, `part` bits of a field from `shift` on."""
    mask, size, step = u64((1 << part) - 1), target.size, fields.size
    masks, stays, moves = mask * u64(_BYTES), stay * u64(_BYTES), move * u64(_BYTES)
    for line in range(8 // part):
        start, down = line * step, u64(part * line)
        stop = min(start + step, size)
        whole = max(stop - start, 0) // 8
        words, out = words_at(fields.ctypes.data, whole), words_at(target[start:].ctypes.data, whole)
        for word in range(whole):
            field = ((words[word] >> down) & masks) << shift
            out[word] = (out[word] & stays) | (out[word] & moves) << up | field
        for at in range(start + 8 * whole, stop):
            one = u64(target[at])
            field = ((u64(fields[at - start]) >> down) & mask) << shift
            target[at] = u8((one & stay) | (one & move) << up | field)
