"""Blocks of bytes as four interleaved streams of Huffman codes, and back.

Four streams, for a stream's next code is known only when the one before has been looked up: the four wait in turn. A
look-up gives all symbols that end within its window, three to four of them for exponents of weights.
"""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, operator, var-annotated"

import numpy as np
from numba import int64, njit, uint64
from numba import uint8 as u8
from numba import uint64 as u64

from kvrail.codec.huffman.code_kernels import MAX_RUN, WINDOW
from kvrail.codec.huffman.words import load_word, store_word

STREAMS = 4
TURN = 4
"""Symbols whose codes fit into a word beside the seven bits that are left of those before."""
LOOKUPS = 4
"""Windows that the 57 bits or more of a loaded word have."""
MARGIN = (LOOKUPS - 1) * MAX_RUN + 8
"""Bytes that a turn of the loop writes at most; of the last eight some are rubbish, which is overwritten."""
_WINDOW = WINDOW - 1


@njit(nogil=True)
def count_bytes(source, counts):
    """How often each byte occurs, int64 [256]; four tables, so that equal neighbours do not wait for each other."""
    tables = np.zeros((4, 256), np.uint32)
    first, second, third, fourth = tables[0], tables[1], tables[2], tables[3]
    words = source.size // 8
    address = uint64(source.ctypes.data)
    for word in range(words):
        eight = load_word(address + uint64(8 * word))
        first[eight & u64(255)] += 1
        second[(eight >> u64(8)) & u64(255)] += 1
        third[(eight >> u64(16)) & u64(255)] += 1
        fourth[(eight >> u64(24)) & u64(255)] += 1
        first[(eight >> u64(32)) & u64(255)] += 1
        second[(eight >> u64(40)) & u64(255)] += 1
        third[(eight >> u64(48)) & u64(255)] += 1
        fourth[eight >> u64(56)] += 1
    for place in range(8 * words, source.size):
        first[source[place]] += 1
    for symbol in range(256):
        counts[symbol] = int64(first[symbol]) + second[symbol] + third[symbol] + fourth[symbol]


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
    """Write the last symbols of a stream byte by byte; where it ends."""
    for index in range(start, stop):
        entry = u64(codes[source[index]])
        held |= (entry & u64(0xFFFF)) << bits
        bits += entry >> u64(16)
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
    """Complete streams of which `done` symbols are written, then put them one behind the other; where each ends."""
    ends = np.zeros(STREAMS, np.int64)
    segment = (source.size + STREAMS - 1) // STREAMS
    written = 0
    for stream in range(STREAMS):
        start, stop = min(stream * segment, source.size), min((stream + 1) * segment, source.size)
        line, place = scratch[stream], int64(places[stream])
        size = _write_stream_end(source, start + done, stop, codes, held[stream], bits[stream], line, place)
        copy_bytes(line[:size], target[written:])
        written += size
        ends[stream] = written
    return ends


@njit(nogil=True)
def write_streams(source, codes, scratch, target):  # the four streams side by side
    """Code `source` as STREAMS streams, one behind the other, into `target`; where each ends, int64 [STREAMS].

    codes: of write_codes, of every byte that occurs. scratch: uint8 [STREAMS, at least 2 * segment + 16]; target has
    room for all streams.
    """
    segment = (source.size + STREAMS - 1) // STREAMS
    room = scratch.shape[1]
    short = source.size - (STREAMS - 1) * segment  # the last segment is the shortest
    turns = max(short - 8, 0) // TURN
    out = uint64(scratch.ctypes.data)
    s0 = uint64(source.ctypes.data)
    s1, s2, s3 = s0 + uint64(segment), s0 + uint64(2 * segment), s0 + uint64(3 * segment)
    h0, h1, h2, h3 = uint64(0), uint64(0), uint64(0), uint64(0)
    b0, b1, b2, b3 = uint64(0), uint64(0), uint64(0), uint64(0)
    p0, p1 = out, out + uint64(room)
    p2, p3 = out + uint64(2 * room), out + uint64(3 * room)
    for turn in range(turns):
        at = uint64(TURN * turn)
        w0, w1, w2, w3 = load_word(s0 + at), load_word(s1 + at), load_word(s2 + at), load_word(s3 + at)
        for _ in range(TURN):
            e0, e1 = u64(codes[w0 & u64(255)]), u64(codes[w1 & u64(255)])
            e2, e3 = u64(codes[w2 & u64(255)]), u64(codes[w3 & u64(255)])
            w0 >>= u64(8)
            w1 >>= u64(8)
            w2 >>= u64(8)
            w3 >>= u64(8)
            h0 |= (e0 & u64(0xFFFF)) << b0
            h1 |= (e1 & u64(0xFFFF)) << b1
            h2 |= (e2 & u64(0xFFFF)) << b2
            h3 |= (e3 & u64(0xFFFF)) << b3
            b0 += e0 >> u64(16)
            b1 += e1 >> u64(16)
            b2 += e2 >> u64(16)
            b3 += e3 >> u64(16)
        store_word(p0, h0)
        store_word(p1, h1)
        store_word(p2, h2)
        store_word(p3, h3)
        p0 += b0 >> u64(3)
        p1 += b1 >> u64(3)
        p2 += b2 >> u64(3)
        p3 += b3 >> u64(3)
        h0 >>= b0 & u64(56)
        h1 >>= b1 & u64(56)
        h2 >>= b2 & u64(56)
        h3 >>= b3 & u64(56)
        b0 &= u64(7)
        b1 &= u64(7)
        b2 &= u64(7)
        b3 &= u64(7)
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
def read_streams(source, ends, singles, runs, target):
    """Decode target.size symbols into `target`; False where the streams do not fit.

    source: uint8, all streams; ends: int64 [STREAMS], rising, the last is source.size. Reads and writes nothing
    outside `source` and `target`, whatever the streams hold.
    """
    size = target.size
    segment = (size + STREAMS - 1) // STREAMS
    base, out = uint64(source.ctypes.data), uint64(target.ctypes.data)
    b0, b1, b2, b3 = uint64(0), uint64(8 * ends[0]), uint64(8 * ends[1]), uint64(8 * ends[2])
    p0, p1, p2, p3 = uint64(0), uint64(segment), uint64(2 * segment), uint64(3 * segment)
    l0, l1 = min(segment, size) - MARGIN, min(2 * segment, size) - MARGIN
    l2, l3 = min(3 * segment, size) - MARGIN, size - MARGIN
    c0, c1, c2, c3 = 8 * ends[0] - 64, 8 * ends[1] - 64, 8 * ends[2] - 64, 8 * ends[3] - 64
    while (
        int64(p0) <= l0
        and int64(p1) <= l1
        and int64(p2) <= l2
        and int64(p3) <= l3
        and int64(b0) <= c0
        and int64(b1) <= c1
        and int64(b2) <= c2
        and int64(b3) <= c3
    ):
        w0 = load_word(base + (b0 >> u64(3))) >> (b0 & u64(7))
        w1 = load_word(base + (b1 >> u64(3))) >> (b1 & u64(7))
        w2 = load_word(base + (b2 >> u64(3))) >> (b2 & u64(7))
        w3 = load_word(base + (b3 >> u64(3))) >> (b3 & u64(7))
        for _ in range(LOOKUPS):
            e0, e1 = runs[w0 & u64(_WINDOW)], runs[w1 & u64(_WINDOW)]
            e2, e3 = runs[w2 & u64(_WINDOW)], runs[w3 & u64(_WINDOW)]
            store_word(out + p0, e0)
            store_word(out + p1, e1)
            store_word(out + p2, e2)
            store_word(out + p3, e3)
            n0, n1 = (e0 >> u64(48)) & u64(255), (e1 >> u64(48)) & u64(255)
            n2, n3 = (e2 >> u64(48)) & u64(255), (e3 >> u64(48)) & u64(255)
            w0 >>= n0
            w1 >>= n1
            w2 >>= n2
            w3 >>= n3
            b0 += n0
            b1 += n1
            b2 += n2
            b3 += n3
            p0 += e0 >> u64(56)
            p1 += e1 >> u64(56)
            p2 += e2 >> u64(56)
            p3 += e3 >> u64(56)
    bits, places = (b0, b1, b2, b3), (p0, p1, p2, p3)
    fits = True
    for stream in range(STREAMS):
        stop = min((stream + 1) * segment, size)
        fits &= _read_stream_end(
            source, int64(bits[stream]), 8 * ends[stream], singles, target, min(int64(places[stream]), stop), stop
        )
    return fits
