"""rANS on a CPU: the lanes of a block in turn, whose chains of operations the processor works on side by side."""

# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"

import numpy as np
from numba import int64, njit, types, void
from numba import uint8 as u8
from numba import uint16 as u16
from numba import uint32 as u32
from numba import uint64 as u64

from kvrail.codec.core.cpu_compile import compiled
from kvrail.codec.splitzip.entropy import format as code

_LANES, _RUN, _BLOCK, _STATE_WORDS = code.LANES, code.RUN, code.BLOCK_BYTES, code.STATE_WORDS
_ROW = _LANES * _RUN
_BITS, _SLOTS, _TOTAL = u64(code.PROBABILITY_BITS), u64(code.TOTAL - 1), u64(code.TOTAL)
_LOWEST, _RECIPROCAL_BITS = u64(code.LOWEST_STATE), u64(code.RECIPROCAL_BITS)
_FULL_SHIFT = u64(32 - code.PROBABILITY_BITS)
_WORD_BITS, _WORD = u64(16), u64(0xFFFF)

_READ = types.Array(u8, 1, "C", readonly=True)
_READ_WORDS = types.Array(u16, 1, "C", readonly=True)


@compiled(void(_READ, int64[:, ::1]))
def count_symbols(piece, counts):
    """Add to counts, [4, 256], how often each byte occurs: four tables, so that equal neighbours do not wait."""
    whole = piece.size // 4 * 4
    for i in range(0, whole, 4):
        counts[0, piece[i]] += 1
        counts[1, piece[i + 1]] += 1
        counts[2, piece[i + 2]] += 1
        counts[3, piece[i + 3]] += 1
    for i in range(whole, piece.size):
        counts[0, piece[i]] += 1


@njit(nogil=True)
def _push(symbol, lane, states, model, reciprocals, words, at):
    """Code a symbol; where the next word goes. A word is always written and counted only where it is needed."""
    x, entry = states[lane], u64(model[symbol])
    frequency = entry >> u64(16)
    full = u64((x >> _FULL_SHIFT) >= frequency)
    words[at] = u16(x)
    x >>= full << u64(4)
    quotient = (x * reciprocals[symbol]) >> _RECIPROCAL_BITS
    states[lane] = x + quotient * (_TOTAL - frequency) + (entry & _WORD)
    return at + full


@compiled(int64(_READ, int64, int64, u32[::1], u64[::1], u16[::1], int64[::1]))
def encode_blocks(piece, first, last, model, reciprocals, words, sizes):
    """Code blocks `first` to `last` of a piece, one after the other into `words`; how many words they have in all.

    model: frequency << 16 | frequencies before it, [256]; reciprocals: [256]; words: with room for BLOCK_BYTES +
    STATE_WORDS a block, and one more; sizes: words of each block of the piece.
    """
    states = np.empty(_LANES, np.uint64)
    at = u64(0)
    for block in range(first, last):
        begin, start = at, block * _BLOCK
        size = min(_BLOCK, piece.size - start)
        states[:] = _LOWEST
        for row in range((size - 1) // _ROW, -1, -1):
            symbols = piece[start + row * _ROW : start + min((row + 1) * _ROW, size)]
            for number in range(_RUN - 1, -1, -1):
                for back in range(_LANES):
                    lane = u64(_LANES - 1 - back)
                    place = lane * u64(_RUN) + u64(number)
                    if place < u64(symbols.size):
                        at = _push(symbols[place], lane, states, model, reciprocals, words, at)
        for lane in range(_LANES):
            words[at + u64(lane)] = u16(states[lane])
            words[at + u64(_LANES + lane)] = u16(states[lane] >> _WORD_BITS)
        at += u64(_STATE_WORDS)
        sizes[block] = int64(at - begin)
    return int64(at)


@njit(nogil=True)
def _pop(lane, states, table, words, at):
    """The next symbol, and how many words are left; `at` must not be 0 where a word is needed."""
    x = states[lane]
    entry = u64(table[x & _SLOTS])
    x = ((entry >> u64(8) & _SLOTS) + u64(1)) * (x >> _BITS) + (entry >> u64(20))
    short = u64(int64(x - _LOWEST) >> int64(63))  # all ones where a word is needed, which is read in any case
    at += short
    states[lane] = x << (short & _WORD_BITS) | u64(words[at]) & short
    return u8(entry), at


@njit(nogil=True)
def _pop_row(symbols, states, table, words, at):
    """Decode a row that may be incomplete; how many words are left, or more than there are: too few."""
    for number in range(_RUN):
        for lane in range(_LANES):
            place = lane * _RUN + number
            if place < symbols.size:
                if at == 0:  # the state must do without
                    entry = u64(table[states[lane] & _SLOTS])
                    if ((entry >> u64(8) & _SLOTS) + u64(1)) * (states[lane] >> _BITS) + (entry >> u64(20)) < _LOWEST:
                        return u64(words.size + 1)
                symbols[place], at = _pop(u64(lane), states, table, words, at)
    return at


@compiled(int64(_READ_WORDS, int64[::1], int64, int64, u32[::1], u8[::1]))
def decode_blocks(words, ends, first, last, table, piece):
    """Decode blocks `first` to `last` into their places of `piece`; 1 where one is corrupt, else 0.

    ends: where each block of the piece ends in `words`, ascending, STATE_WORDS apart at least; table: of each slot
    the symbol, its frequency - 1 (<< 8), and the slot's number among those of the symbol (<< 20).
    """
    states = np.empty(_LANES, np.uint64)
    for block in range(first, last):
        own = words[ends[block - 1] if block > 0 else 0 : ends[block]]
        left, start = own.size - _STATE_WORDS, block * _BLOCK
        size = min(_BLOCK, piece.size - start)
        for lane in range(_LANES):
            states[lane] = u64(own[left + lane]) | u64(own[left + _LANES + lane]) << _WORD_BITS
        at = u64(left)
        for row in range((size + _ROW - 1) // _ROW):
            symbols = piece[start + row * _ROW : start + min((row + 1) * _ROW, size)]
            if symbols.size < _ROW or at < u64(_ROW):
                at = _pop_row(symbols, states, table, own, at)
                if at > u64(own.size):
                    return 1
                continue
            for number in range(_RUN):
                for lane in range(_LANES):
                    symbol, at = _pop(u64(lane), states, table, own, at)
                    symbols[u64(lane * _RUN + number)] = symbol
        if at != u64(0) or not np.all(states == _LOWEST):
            return 1
    return 0
