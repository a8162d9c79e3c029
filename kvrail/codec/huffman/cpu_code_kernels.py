"""Canonical Huffman codes of bytes: lengths from counts, codes from lengths, and the tables that decode them.

README.md has the rules; tests/reference/huffman.py is the same in plain Python.
"""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type, operator, call-arg"

import numpy as np
from numba import int64, njit, uint64
from numba import uint8 as u8
from numba import uint16 as u16
from numba import uint64 as u64

from kvrail.codec.huffman.cpu_word_kernels import reversed_bits

MAX_BITS = 12
"""Longest code. With 11, weights in float8_e4m3fn take 0.4 % more; a table of 2^12 runs fills 32 KiB of a cache."""
WINDOW = 1 << MAX_BITS
SYMBOLS = 256
MAX_RUN = 6
"""Symbols that one entry of the table of runs gives at most: six bytes, beside their number and their bits."""


@njit(nogil=True)
def _sorted_symbols(counts, order):
    """Symbols that occur, by count and then by value, into `order`; how many there are."""
    keys = np.empty(SYMBOLS, np.int64)
    found = 0
    for symbol in range(counts.size):
        keys[found] = counts[symbol] << 8 | symbol
        found += counts[symbol] > 0
    keys[:found].sort()
    for place in range(found):
        order[place] = keys[place] & 255
    return found


@njit(nogil=True)
def code_bits(counts):
    """Bits of all symbols of a sample in an optimal code without a limit to its lengths, were it made for all.

    That is the sum of all weights that are merged, with two queues: symbols, and packages, which come in order by
    themselves, plus 3/4 of a bit for each symbol but one: a sample's entropy is lower by that than the entropy of what
    it was drawn from (Miller 1955). counts: int64 [256].
    """
    order, weights = np.empty(SYMBOLS, np.int64), np.empty(SYMBOLS, np.int64)
    found = _sorted_symbols(counts, order)
    bits, symbol, package, made = 0, 0, 0, 0
    while made < found - 1:
        weight = 0
        for _ in range(2):
            if symbol < found and (package == made or counts[order[symbol]] <= weights[package]):
                weight += counts[order[symbol]]
                symbol += 1
            else:
                weight += weights[package]
                package += 1
        weights[made] = weight
        made += 1
        bits += weight
    return bits + 3 * max(found - 1, 0) // 4


@njit(nogil=True)
def code_lengths(counts, lengths):
    """Optimal code lengths of at most MAX_BITS bits, by package-merge; returns how many symbols occur.

    counts: int64 [256]; lengths: uint8 [256], 0 where a symbol does not occur. A single symbol gets one bit.
    Each level's list has the symbols' own coins and the packages of the level below, lightest first, coins before
    packages of equal weight (Larmore and Hirschberg 1990).
    """
    lengths[:] = 0
    order = np.empty(SYMBOLS, np.int64)
    found = _sorted_symbols(counts, order)
    if found < 2:
        if found:
            lengths[order[0]] = 1
        return found
    width = 2 * found
    weights, below = np.empty(width, np.int64), np.empty(width, np.int64)
    is_coin = np.zeros((MAX_BITS, width), np.uint8)
    below_size = 0
    for level in range(MAX_BITS):
        coin, package, size = 0, 0, 0
        while coin < found or package + 1 < below_size:
            pair = below[package] + below[package + 1] if package + 1 < below_size else int64(-1)
            if coin < found and (pair < 0 or counts[order[coin]] <= pair):
                weights[size] = counts[order[coin]]
                is_coin[level, size] = 1
                coin += 1
            else:
                weights[size] = pair
                package += 2
            size += 1
        below_size = size
        weights, below = below, weights
    taken = 2 * found - 2
    for level in range(MAX_BITS - 1, -1, -1):
        coins = 0
        for item in range(taken):
            if is_coin[level, item]:
                lengths[order[coins]] += u8(1)
                coins += 1
        taken = 2 * (taken - coins)
    return found


@njit(nogil=True)
def first_codes(lengths, firsts):
    """First canonical code of each length, int64 [MAX_BITS + 1]; False where the lengths are no prefix code.

    One symbol of one bit is allowed, all others must use up the code space.
    """
    per_length = np.zeros(MAX_BITS + 1, np.int64)
    for symbol in range(SYMBOLS):
        if lengths[symbol] > MAX_BITS:
            return False
        per_length[lengths[symbol]] += 1
    code, space, symbols = 0, 0, 0
    for bits in range(1, MAX_BITS + 1):
        firsts[bits] = code
        code = (code + per_length[bits]) << 1
        space += per_length[bits] << (MAX_BITS - bits)
        symbols += per_length[bits]
    return space == WINDOW or (symbols == 1 and per_length[1] == 1)


@njit(nogil=True)
def _reversed(code, bits):
    return int64(reversed_bits(u64(code)) >> u64(64 - bits))


@njit(nogil=True)
def write_codes(lengths, codes):
    """For each symbol its length, and in the word's highest bits its code, first bit lowest: uint64 [256]."""
    firsts = np.zeros(MAX_BITS + 1, np.int64)
    first_codes(lengths, firsts)
    for symbol in range(SYMBOLS):
        bits = int64(lengths[symbol])
        codes[symbol] = 0
        if bits:
            codes[symbol] = u64(_reversed(firsts[bits], bits)) << u64(64 - bits) | u64(bits)
            firsts[bits] += 1


@njit(nogil=True)
def _found_codes(lengths, codes):
    """Symbols that have a code, each with its code and its bits, int64 [256, 3]; how many, or 0 where it is no code.

    Where there is only one symbol, byte 0 gets the bit that it does not use.
    """
    firsts = np.zeros(MAX_BITS + 1, np.int64)
    if not first_codes(lengths, firsts):
        return 0
    found = 0
    for symbol in range(SYMBOLS):
        bits = int64(lengths[symbol])
        if bits:
            codes[found, 0], codes[found, 1], codes[found, 2] = symbol, _reversed(firsts[bits], bits), bits
            firsts[bits] += 1
            found += 1
    if found == 1:
        codes[1, 0], codes[1, 1], codes[1, 2] = 0, 1, 1
        return 2
    return found


@njit(nogil=True)
def _shorter(entry, lengths):
    """A run of MAX_RUN symbols without its last."""
    last = lengths[(entry >> u64(8 * MAX_RUN)) & u64(255)]
    return (entry & u64((1 << 8 * MAX_RUN) - 1)) - u64(last) | u64(MAX_RUN - 1) << u64(56)


@njit(nogil=True)
def _write_runs(symbol, code, bits, level, may_fill, lengths, levels):
    """Runs of windows of `level` bits that begin with a symbol: that, and the run of the bits behind its code.

    may_fill: whether that may have MAX_RUN symbols, whose last then has no place any more.
    """
    behind = uint64(1) << uint64(level - bits)  # where runs of this many bits begin, and how many there are
    place, step = (uint64(1) << uint64(level)) | uint64(code), uint64(1) << uint64(bits)
    one = (u64(symbol) << u64(8)) + (u64(1) << u64(56)) + u64(bits)
    moved, kept = u64((1 << 48) - (1 << 8)), u64((255 << 56) | 63)
    for run in range(behind):
        entry = levels[behind | uint64(run)]
        if may_fill and entry >> u64(56) == u64(MAX_RUN):
            entry = _shorter(entry, lengths)
        levels[place] = ((entry & moved) << u64(8)) + (entry & kept) + one
        place += step


@njit(nogil=True)
def write_tables(lengths, singles, levels):
    """What the next MAX_BITS bits stand for; False where the lengths are no prefix code.

    singles: uint16 [WINDOW], a symbol, and from bit 8 on its length. levels: uint64 [2 * WINDOW]; its upper
    half is the table of runs: all symbols that end within the window, up to MAX_RUN, the first from bit 8 on; their
    bits together from bit 0, their number from bit 56 on. From 2^b on lie the runs of windows of b bits: a run is its
    first symbol, and the run of the bits behind it, whose place is its own without that symbol's bits.
    """
    codes = np.empty((SYMBOLS, 3), np.int64)
    found = _found_codes(lengths, codes)
    if not found:
        return False
    for each in range(found):
        for window in range(codes[each, 1], WINDOW, 1 << codes[each, 2]):
            singles[window] = u16(codes[each, 0] | codes[each, 2] << 8)
    shortest = codes[:found, 2].min()
    levels[1] = 0
    for level in range(1, MAX_BITS + 1):
        if MAX_BITS - shortest < level < MAX_BITS:
            continue  # no run of a whole window continues with this many bits
        levels[1 << level : 2 << level] = 0
        for each in range(found):
            if codes[each, 2] <= level:
                _write_runs(codes[each, 0], codes[each, 1], codes[each, 2], level, shortest == 1, lengths, levels)
    return True
