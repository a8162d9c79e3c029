"""Blocks of bytes as four interleaved streams of Huffman codes, and back.

Four streams, for a stream's next code is known only when the one before has been looked up: the four wait in turn. A
look-up gives all symbols that end within its window, three to four of them for exponents of weights. What bounds both
ways is how many instructions a symbol takes, so loops check nothing: how often they may run is reckoned before.
"""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, operator, var-annotated"

import numpy as np
from numba import int64, njit, uint64
from numba import uint8 as u8
from numba import uint64 as u64

from kvrail.codec.huffman.code_kernels import MAX_BITS, MAX_RUN, WINDOW
from kvrail.codec.huffman.words import leading_zeros, load_word, store_word

STREAMS = 4
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

    Of what is left behind the last whole line nothing is counted, unless `stride` is 1.
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
    """Copy all of `source` to the start of `target`, by words: five times as fast as a slice's assignment."""
    words = source.size // 8
    first, out = uint64(source.ctypes.data), uint64(target.ctypes.data)
    for word in range(words):
        store_word(out + uint64(8 * word), load_word(first + uint64(8 * word)))
    for place in range(8 * words, source.size):
        target[place] = source[place]


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
def _finish_streams(source, codes, done, held, bits, places, scratch, target):
    """Complete streams of which `done` symbols are written, then put them one behind the other; where each ends.

    What has no room in `target` is left out; the end of the last stream says how many bytes there would have been.
    """
    ends = np.zeros(STREAMS, np.int64)
    segment = (source.size + STREAMS - 1) // STREAMS
    written = 0
    for stream in range(STREAMS):
        start, stop = min(stream * segment, source.size), min((stream + 1) * segment, source.size)
        line, place = scratch[stream], int64(places[stream])
        left = (held[stream] >> (u64(64) - bits[stream])) if bits[stream] else uint64(0)
        size = _write_stream_end(source, start + done, stop, codes, left, bits[stream], line, place)
        if written + size <= target.size:
            copy_bytes(line[:size], target[written:])
        written += size
        ends[stream] = written
    return ends


@njit(nogil=True)
def _append(held, entry):
    """A code on top of those before, which move down; its length below them is shifted out before it matters."""
    return (held >> (entry & u64(63))) | entry


@njit(nogil=True)
def write_streams(source, codes, scratch, target):
    """Code `source` as STREAMS streams, one behind the other, into `target`; where each ends, int64 [STREAMS].

    codes: of write_codes, of every byte that occurs. scratch: uint8 [STREAMS, at least 2 * segment + 16]. Where the
    last stream ends behind `target`, that does not have all of them.
    """
    segment = (source.size + STREAMS - 1) // STREAMS
    room = scratch.shape[1]
    short = source.size - (STREAMS - 1) * segment  # the last segment is the shortest
    turns = max(short - 8, 0) // TURN
    out = uint64(scratch.ctypes.data)
    s0 = uint64(source.ctypes.data)
    s1, s2, s3 = s0 + uint64(segment), s0 + uint64(2 * segment), s0 + uint64(3 * segment)
    # Codes that are held lie at the top of a word, the last one highest; bits count those that are not yet written.
    h0, h1, h2, h3 = uint64(0), uint64(0), uint64(0), uint64(0)
    b0, b1, b2, b3 = uint64(0), uint64(0), uint64(0), uint64(0)
    p0, p1 = out, out + uint64(room)
    p2, p3 = out + uint64(2 * room), out + uint64(3 * room)
    for turn in range(turns):
        at = uint64(TURN * turn)
        w0, w1, w2, w3 = load_word(s0 + at), load_word(s1 + at), load_word(s2 + at), load_word(s3 + at)
        for _ in range(TURN):
            e0, e1, e2, e3 = codes[w0 & u64(255)], codes[w1 & u64(255)], codes[w2 & u64(255)], codes[w3 & u64(255)]
            w0, w1, w2, w3 = w0 >> u64(8), w1 >> u64(8), w2 >> u64(8), w3 >> u64(8)
            h0, h1, h2, h3 = _append(h0, e0), _append(h1, e1), _append(h2, e2), _append(h3, e3)
            b0, b1, b2, b3 = b0 + e0, b1 + e1, b2 + e2, b3 + e3
        b0, b1, b2, b3 = b0 & u64(63), b1 & u64(63), b2 & u64(63), b3 & u64(63)
        store_word(p0, h0 >> (-b0 & u64(63)))
        store_word(p1, h1 >> (-b1 & u64(63)))
        store_word(p2, h2 >> (-b2 & u64(63)))
        store_word(p3, h3 >> (-b3 & u64(63)))
        p0, p1, p2, p3 = p0 + (b0 >> u64(3)), p1 + (b1 >> u64(3)), p2 + (b2 >> u64(3)), p3 + (b3 >> u64(3))
        b0, b1, b2, b3 = b0 & u64(7), b1 & u64(7), b2 & u64(7), b3 & u64(7)
    ends = (p0 - out, p1 - out - uint64(room), p2 - out - uint64(2 * room), p3 - out - uint64(3 * room))
    return _finish_streams(source, codes, TURN * turns, (h0, h1, h2, h3), (b0, b1, b2, b3), ends, scratch, target)


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
def _read_on(base, bit, stop_bit, place, stop, runs):
    """Read on in one stream where another has ended; how far it came. stop: the address behind its last symbol."""
    while True:
        turns = min((stop - 8 - int64(place)) // _TURN_SYMBOLS, (stop_bit - 64 - int64(bit)) // _TURN_BITS)
        if turns <= 0:
            return bit, place
        for _ in range(turns):
            word = _loaded(base, bit)
            for _ in range(LOOKUPS):
                word, place = _look_up(word, place, runs)
            bit += leading_zeros(word)


@njit(nogil=True)
def read_streams(source, ends, singles, runs, target):
    """Decode target.size symbols into `target`; False where the streams do not fit.

    source: uint8, all streams; ends: int64 [STREAMS], rising, the last is source.size. Reads and writes nothing
    outside `source` and `target`, whatever the streams hold.
    """
    size = target.size
    segment = (size + STREAMS - 1) // STREAMS
    base, out = uint64(source.ctypes.data), uint64(target.ctypes.data)
    b0, b1, b2, b3 = uint64(0), uint64(8 * ends[0]), uint64(8 * ends[1]), uint64(8 * ends[2])
    p0, p1, p2, p3 = out, out + uint64(segment), out + uint64(2 * segment), out + uint64(3 * segment)
    # A turn stores eight bytes at a time: of the last some are rubbish, which is overwritten.
    l0, l1, l2, l3 = int64(p1) - 8, int64(p2) - 8, int64(p3) - 8, int64(out) + size - 8
    c0, c1, c2, c3 = 8 * ends[0] - 64, 8 * ends[1] - 64, 8 * ends[2] - 64, 8 * ends[3] - 64
    while True:
        room = min(l0 - int64(p0), l1 - int64(p1), l2 - int64(p2), l3 - int64(p3))
        left = min(c0 - int64(b0), c1 - int64(b1), c2 - int64(b2), c3 - int64(b3))
        turns = min(room // _TURN_SYMBOLS, left // _TURN_BITS)
        if turns <= 0:
            break
        for _ in range(turns):
            w0, w1, w2, w3 = _loaded(base, b0), _loaded(base, b1), _loaded(base, b2), _loaded(base, b3)
            for _ in range(LOOKUPS):
                w0, p0 = _look_up(w0, p0, runs)
                w1, p1 = _look_up(w1, p1, runs)
                w2, p2 = _look_up(w2, p2, runs)
                w3, p3 = _look_up(w3, p3, runs)
            b0, b1 = b0 + leading_zeros(w0), b1 + leading_zeros(w1)
            b2, b3 = b2 + leading_zeros(w2), b3 + leading_zeros(w3)
    bits, places = (b0, b1, b2, b3), (p0, p1, p2, p3)
    fits = True
    for stream in range(STREAMS):
        stop = min((stream + 1) * segment, size)
        bit, place = _read_on(base, bits[stream], 8 * ends[stream], places[stream], int64(out) + stop, runs)
        at = min(int64(place - out), stop)
        fits &= _read_stream_end(source, int64(bit), 8 * ends[stream], singles, target, at, stop)
    return fits
