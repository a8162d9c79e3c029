"""Blocks of bytes as six interleaved streams of Huffman codes, and back.

Six streams, for a stream's next code is known only when the one before has been looked up, some nine cycles later: the
six wait in turn. A look-up gives all symbols that end within its window, three to four of them for exponents of
weights.
Loops check nothing: how often they may run is reckoned before.
"""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, operator, var-annotated"

import numpy as np
from numba import int64, njit, uint64
from numba import uint8 as u8
from numba import uint64 as u64

from kvrail.codec.huffman.cpu_code_kernels import MAX_BITS, MAX_RUN, WINDOW
from kvrail.codec.huffman.cpu_word_kernels import copy_memory, leading_zeros, load_word, store_word

STREAMS = 6
LINE = 64
"""Bytes that are counted, or not, together."""
TURN = 4
"""Symbols whose codes fit into a word beside the seven bits that are left of those before."""
LOOKUPS = 4
"""Windows that the 56 bits of a loaded word below its mark have."""
_TURN_BITS = LOOKUPS * MAX_BITS
_TURN_SYMBOLS = LOOKUPS * MAX_RUN
_WINDOW = WINDOW - 1
_MARK = 1 << 63


@njit(nogil=True)
def count_bytes(source, counts):
    """How often each byte occurs, int64 [256]; eight tables, so that equal neighbours do not wait for each other."""
    count_lines(source, 1, counts)


@njit(nogil=True)
def count_lines(source, stride, counts):
    """How often each byte occurs in every `stride`-th line of 64 bytes, from the first one on; int64 [256].

    Bytes behind the last whole line are counted only if `stride` is 1.
    """
    tables = np.zeros((8, 256), np.uint32)
    t0, t1, t2, t3 = tables[0], tables[1], tables[2], tables[3]
    t4, t5, t6, t7 = tables[4], tables[5], tables[6], tables[7]
    lines = source.size // LINE
    address = uint64(source.ctypes.data)
    for line in range(0, lines, stride):
        for word in range(LINE // 8):
            eight = load_word(address + uint64(LINE * line + 8 * word))
            t0[eight & u64(255)] += 1
            t1[(eight >> u64(8)) & u64(255)] += 1
            t2[(eight >> u64(16)) & u64(255)] += 1
            t3[(eight >> u64(24)) & u64(255)] += 1
            t4[(eight >> u64(32)) & u64(255)] += 1
            t5[(eight >> u64(40)) & u64(255)] += 1
            t6[(eight >> u64(48)) & u64(255)] += 1
            t7[eight >> u64(56)] += 1
    if stride == 1:
        for place in range(LINE * lines, source.size):
            t0[source[place]] += 1
    for symbol in range(256):
        found = int64(0)
        for table in range(8):
            found += int64(tables[table, symbol])
        counts[symbol] = found


@njit(nogil=True)
def copy_bytes(source, target):
    """Copy all of `source` to the start of `target`."""
    copy_memory(uint64(target.ctypes.data), uint64(source.ctypes.data), uint64(source.size))


@njit(nogil=True)
def _write_stream_end(source, start, stop, codes, held, bits, target, place):
    """Write the last symbols of a stream byte by byte; where it ends. held: `bits` bits, at most 7, first lowest."""
    for index in range(start, stop):
        entry = codes[source[index]]
        length = entry & u64(63)
        held |= (entry >> (u64(64) - length)) << bits
        bits += length
        while bits >= u64(8):
            target[place] = u8(held & u64(255))
            place += 1
            held >>= u64(8)
            bits -= u64(8)
    if bits:
        target[place] = u8(held & u64(255))
        place += 1
    return place


@njit(nogil=True)
def _append(held, entry):
    """A code on top of those before, which move down; its length below them is shifted out before it matters."""
    return (held >> (entry & u64(63))) | entry


@njit(nogil=True)
def _write_two(first, second, turns, codes, one, two):
    """Code TURN symbols a turn from `first` and `second` on, to `one` and `two`: all that a core has registers for.

    Gives for both where they end, and what is left: bits, and how many, seven at most.
    """
    # Codes that are held lie at the top of a word, the last one highest; bits count those that are not yet written.
    h0, h1, b0, b1 = uint64(0), uint64(0), uint64(0), uint64(0)
    for turn in range(turns):
        w0, w1 = load_word(first + uint64(TURN * turn)), load_word(second + uint64(TURN * turn))
        for _ in range(TURN):
            e0, e1 = codes[w0 & u64(255)], codes[w1 & u64(255)]
            w0, w1 = w0 >> u64(8), w1 >> u64(8)
            h0, h1 = _append(h0, e0), _append(h1, e1)
            b0, b1 = b0 + e0, b1 + e1
        b0, b1 = b0 & u64(63), b1 & u64(63)
        store_word(one, h0 >> (-b0 & u64(63)))
        store_word(two, h1 >> (-b1 & u64(63)))
        one, two = one + (b0 >> u64(3)), two + (b1 >> u64(3))
        b0, b1 = b0 & u64(7), b1 & u64(7)
    left0 = (h0 >> (u64(64) - b0)) if b0 else uint64(0)
    left1 = (h1 >> (u64(64) - b1)) if b1 else uint64(0)
    return (one, two), (left0, left1), (b0, b1)


@njit(nogil=True)
def write_streams(source, codes, scratch, target):
    """Code `source` as STREAMS streams, one behind the other, into `target`; where each ends, int64 [STREAMS].

    codes: of write_codes, of every byte that occurs. scratch: uint8 [STREAMS, at least 2 * segment + 16]. Where the
    last stream ends behind `target`, that does not have all of them.
    """
    size = source.size
    segment, room = (size + STREAMS - 1) // STREAMS, scratch.shape[1]
    turns = max(size - (STREAMS - 1) * segment - 8, 0) // TURN  # the last segment is the shortest
    first, out = uint64(source.ctypes.data), uint64(scratch.ctypes.data)
    ends = np.zeros(STREAMS, np.int64)
    written = 0
    for pair in range(0, STREAMS, 2):
        begin = first + uint64(pair * segment)
        line = out + uint64(pair * room)
        places, held, bits = _write_two(begin, begin + uint64(segment), turns, codes, line, line + uint64(room))
        for each in range(2):
            stream = pair + each
            start, stop = min(stream * segment, size), min((stream + 1) * segment, size)
            place = int64(places[each] - out) - stream * room
            row = scratch[stream]
            length = _write_stream_end(source, start + TURN * turns, stop, codes, held[each], bits[each], row, place)
            if written + length <= target.size:
                copy_bytes(row[:length], target[written:])
            written += length
            ends[stream] = written
    return ends


@njit(nogil=True)
def _read_stream_end(source, bit, stop_bit, singles, target, place, stop):
    """Decode symbols one at a time, reading no byte behind the stream's; whether the stream ends where it should."""
    last = stop_bit >> 3
    while place < stop:
        held, at = 0, bit >> 3
        for byte in range(3):
            if at + byte < last:
                held |= int64(source[at + byte]) << (8 * byte)
        entry = int64(singles[(held >> (bit & 7)) & _WINDOW])
        target[place] = u8(entry & 255)
        place += 1
        bit += entry >> 8
        if bit > stop_bit:
            return False
    return stop_bit - bit < 8


@njit(nogil=True)
def _loaded(base, bit):
    """The 56 bits or more from `bit` on, the first lowest, and a mark on top: zeros above it count what was used."""
    return (load_word(base + (bit >> u64(3))) >> (bit & u64(7))) | u64(_MARK)


@njit(nogil=True)
def _look_up(word, place, runs):
    """Write the symbols of one window; the word and the place behind them."""
    entry = runs[word & u64(_WINDOW)]
    store_word(place, (entry >> u64(8)) | (entry << u64(56)))  # rotated, which is one instruction
    return word >> (entry & u64(63)), place + (entry >> u64(56))


@njit(nogil=True)
def _turns(bit, stop_bit, place, stop):
    """How many turns a stream has at least before its last bits or symbols; stop: the address behind its last symbol.

    A turn stores eight bytes at a time: of the last some are rubbish, which is overwritten.
    """
    return min((stop - 8 - int64(place)) // _TURN_SYMBOLS, (stop_bit - 64 - int64(bit)) // _TURN_BITS)


@njit(nogil=True)
def _read_on(base, bit, stop_bit, place, stop, runs):
    """Read on in one stream where another has ended; how far it came."""
    turns = _turns(bit, stop_bit, place, stop)
    while turns > 0:
        for _ in range(turns):
            word = _loaded(base, bit)
            for _ in range(LOOKUPS):
                word, place = _look_up(word, place, runs)
            bit += leading_zeros(word)
        turns = _turns(bit, stop_bit, place, stop)
    return bit, place


@njit(nogil=True)
def read_streams(source, ends, singles, runs, target):
    """Decode target.size symbols into `target`; False where the streams do not fit.

    source: uint8, all streams; ends: int64 [STREAMS], rising, the last is source.size. Reads and writes nothing
    outside `source` and `target`, whatever the streams hold.
    """
    size = target.size
    segment = (size + STREAMS - 1) // STREAMS
    base, out = uint64(source.ctypes.data), uint64(target.ctypes.data)
    starts, stops = np.zeros(STREAMS, np.int64), np.empty(STREAMS, np.int64)
    for stream in range(STREAMS):
        stops[stream] = min((stream + 1) * segment, size)
    starts[1:] = 8 * ends[:-1]
    b0, b1, b2 = uint64(starts[0]), uint64(starts[1]), uint64(starts[2])
    b3, b4, b5 = uint64(starts[3]), uint64(starts[4]), uint64(starts[5])
    p0, p1, p2 = out, out + uint64(segment), out + uint64(2 * segment)
    p3, p4, p5 = out + uint64(3 * segment), out + uint64(4 * segment), out + uint64(5 * segment)
    while True:
        places, bits = (p0, p1, p2, p3, p4, p5), (b0, b1, b2, b3, b4, b5)
        turns = int64(size)
        for stream in range(STREAMS):
            turns = min(turns, _turns(bits[stream], 8 * ends[stream], places[stream], int64(out) + stops[stream]))
        if turns <= 0:
            break
        for _ in range(turns):
            w0, w1, w2 = _loaded(base, b0), _loaded(base, b1), _loaded(base, b2)
            w3, w4, w5 = _loaded(base, b3), _loaded(base, b4), _loaded(base, b5)
            for _ in range(LOOKUPS):
                w0, p0 = _look_up(w0, p0, runs)
                w1, p1 = _look_up(w1, p1, runs)
                w2, p2 = _look_up(w2, p2, runs)
                w3, p3 = _look_up(w3, p3, runs)
                w4, p4 = _look_up(w4, p4, runs)
                w5, p5 = _look_up(w5, p5, runs)
            b0, b1, b2 = b0 + leading_zeros(w0), b1 + leading_zeros(w1), b2 + leading_zeros(w2)
            b3, b4, b5 = b3 + leading_zeros(w3), b4 + leading_zeros(w4), b5 + leading_zeros(w5)
    fits = True
    for stream in range(STREAMS):
        stop = stops[stream]
        bit, place = _read_on(base, bits[stream], 8 * ends[stream], places[stream], int64(out) + stop, runs)
        at = min(int64(place - out), stop)
        fits &= _read_stream_end(source, int64(bit), 8 * ends[stream], singles, target, at, stop)
    return fits
