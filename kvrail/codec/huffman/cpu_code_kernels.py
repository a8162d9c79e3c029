"""Canonical Huffman codes of bytes: lengths from counts, codes from lengths, and the tables that decode them.

README.md has the rules; reference.py is the same in plain Python.
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
    themselves. Beside it 3/4 of a bit for each symbol but one: so much less the sample seems to take than what it
    stands for, whose shares differ from its own (Miller 1955). counts: int64 [256].
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
def _longer(entry, single):
    """The entry of a run that begins with a single symbol and goes on as `entry`, which has room for one more."""
    symbols = ((entry & u64((1 << 56) - (1 << 8))) | (single & u64(255))) << u64(8)
    number = (entry >> u64(56)) + u64(1)
    return symbols | number << u64(56) | (entry & u64(63)) + (single >> u64(8))


@njit(nogil=True)
def write_tables(lengths, singles, levels):
    """What the next MAX_BITS bits stand for; False where the lengths are no prefix code.

    singles: uint16 [WINDOW], a symbol, and from bit 8 on its length. levels: uint64 [2 * WINDOW], of which the upper
    half is the table of runs: all symbols that end within the window, up to MAX_RUN, the first from bit 8 on; their
    bits together from bit 0, their number from bit 56 on. From 2^b on lie the runs of windows of b bits: a run is its
    first symbol, and the run of the bits behind it, whose place is its own without that symbol's bits.
    """
    firsts = np.zeros(MAX_BITS + 1, np.int64)
    if not first_codes(lengths, firsts):
        return False
    singles[:] = u16(1 << 8)  # of a code of one symbol, the bit that it does not use
    shortest = MAX_BITS
    for symbol in range(SYMBOLS):
        bits = int64(lengths[symbol])
        if bits:
            code = _reversed(firsts[bits], bits)
            firsts[bits] += 1
            shortest = min(shortest, bits)
            for window in range(code, WINDOW, 1 << bits):
                singles[window] = u16(symbol | bits << 8)
    levels[1] = 0
    for level in range(1, MAX_BITS + 1):
        if MAX_BITS - shortest < level < MAX_BITS:
            continue  # no run of a whole window goes on with so many bits
        first = uint64(1) << uint64(level)
        for window in range(first):
            single = u64(singles[window])
            used = single >> u64(8)
            if used > uint64(level):
                levels[first | window] = u64(0)
                continue
            entry = levels[(first | window) >> used]
            if entry >> u64(56) == u64(MAX_RUN):  # its last symbol has no place any more
                last = lengths[(entry >> u64(8 * MAX_RUN)) & u64(255)]
                entry = (entry & u64((1 << 8 * MAX_RUN) - 1)) - u64(last) | u64(MAX_RUN - 1) << u64(56)
            levels[first | window] = _longer(entry, single)
    return True
