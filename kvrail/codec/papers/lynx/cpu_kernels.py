"""Lynx on a CPU: loops that LLVM vectorises, a few columns of a page at a time, so that all between stays in the cache.

A block of columns is staged as float32 [rows * width], whatever the element type. No result depends on the order of
operations within a loop: minimum and maximum do not, and all else is one value at a time.
"""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type, operator"

import numpy as np
from numba import float32 as f32
from numba import int32 as i32
from numba import int64, njit, types, void
from numba import uint8 as u8
from numba import uint16 as u16
from numba import uint32 as u32

from kvrail.codec.core.cpu_compile import compiled
from kvrail.codec.papers.lynx.cpu_float_kernels import TINY, load, read_chunk, round_to, store, units_of, widen
from kvrail.codec.papers.lynx.plan import Geometry, Stage

BLOCK_COLUMNS = 256


@njit(nogil=True)
def _extremes(bits, rows, width, low, high):
    """Least and largest finite value of each column of a block, [width]; infinities, the wrong way, where none is."""
    low[:], high[:] = f32(np.inf), f32(-np.inf)
    for row in range(rows):
        line = bits[row * width :][:width]
        numbers = line.view(np.float32)
        for j in range(width):
            finite = line[j] & u32(0x7FFFFFFF) < u32(0x7F800000)
            least = numbers[j] if finite else f32(np.inf)
            most = numbers[j] if finite else f32(-np.inf)
            low[j] = least if least < low[j] else low[j]
            high[j] = most if most > high[j] else high[j]


@njit(nogil=True)
def _write_page_scales(low, high, mantissa_bits, minima, first, scales):
    """Write minima, from number `first` on, and scales, uint16; `low` is left as it is stored."""
    for j in range(low.size):
        some = low[j] <= high[j]
        low[j] = (low[j] if some else f32(0)) + f32(0)  # -0 becomes 0
        high[j] = (high[j] if some else f32(0)) + f32(0)
    half = np.empty(low.size, np.float32)
    for j in range(low.size):
        half[j] = f32(0.5) * high[j] - f32(0.5) * low[j]
    bits = half.view(np.uint32)
    for j in range(low.size):
        bits[j] = min(u32(bits[j] + u32(0xFFFF)) >> u32(16), u32(0x7F7F)) << u32(16)
    for j in range(low.size):
        scales[j] = u16(0) if half[j] < f32(TINY) else u16(bits[j] >> u32(16))
    elements, stored = np.empty(low.size, np.uint32), low.copy()
    round_to(stored, mantissa_bits, elements)
    store(elements, minima, first, mantissa_bits)


@njit(nogil=True)
def _write_chunk(low, scales, first, last, lows, widths):
    """Write one chunk's lows and widths, given its extremes and the page's minima and scales."""
    for j in range(low.size):
        some = first[j] <= last[j]
        rate = f32(127.5) / scales[j] if scales[j] > f32(0) else f32(0)
        begin = ((first[j] if some else low[j]) - low[j]) * rate
        end = ((last[j] if some else low[j]) - low[j]) * rate
        begin = min(max(begin, f32(0)), f32(255))
        end = min(max(end, f32(0)), f32(255))
        lows[j] = u8(np.floor(begin))
        widths[j] = u8(np.ceil(end)) - lows[j]


@njit(nogil=True)
def _cells(away, edges, cells):
    """Number of the cell on its side, by the distance from the centre in units; of NaN 0."""
    e1, e2, e3, e4, e5, e6, e7 = edges[1], edges[2], edges[3], edges[4], edges[5], edges[6], edges[7]
    for j in range(away.size):
        a = abs(away[j])
        low = i32(a >= e1) + i32(a >= e2) + i32(a >= e3) + i32(a >= e4)
        cells[j] = low + i32(a >= e5) + i32(a >= e6) + i32(a >= e7)


@njit(nogil=True)
def _coarse(codes, curved, middles, centres, units, numbers):
    """Middles of the cells that anchor codes name."""
    if curved:
        for j in range(codes.size):
            distance = middles[7 - codes[j] if codes[j] < u8(8) else codes[j] - 8] * units[j]
            numbers[j] = centres[j] + (-distance if codes[j] < u8(8) else distance)
    else:
        for j in range(codes.size):
            numbers[j] = centres[j] + f32(i32(codes[j]) * i32(16) - i32(120)) * units[j]


@njit(nogil=True)
def _refine(numbers, codes, curved, edges, steps, centres, units, slopes, away, cells):
    """Put coarse values into the middles of their residual's steps."""
    if curved:
        for j in range(numbers.size):
            away[j] = (numbers[j] - centres[j]) * slopes[j]
        _cells(away, edges, cells)
        for j in range(numbers.size):
            numbers[j] = numbers[j] + (f32(codes[j]) - f32(7.5)) * (steps[cells[j]] * units[j])
    else:
        for j in range(numbers.size):
            numbers[j] = numbers[j] + (f32(codes[j]) - f32(7.5)) * units[j]


@njit(nogil=True)
def _straight_codes(numbers, centres, units, slopes, codes):
    """Codes of eight bits of a linear map, in the order of the numbers. NaN: 0."""
    for j in range(numbers.size):
        away = (numbers[j] - (centres[j] + f32(0.5) * units[j])) * slopes[j]
        away = away if away > f32(-128) else f32(-128)
        away = away if away < f32(127) else f32(127)
        codes[j] = u8(i32(away + f32(12583040)) & i32(255))  # 1.5 * 2^23 + 128: the sum is rounded to an integer


@njit(nogil=True)
def _curved_codes(numbers, centres, slopes, edges, rates, away, cells, codes):
    """As above, with a logarithmic map."""
    for j in range(numbers.size):
        away[j] = (numbers[j] - centres[j]) * slopes[j]
    _cells(away, edges, cells)
    for j in range(numbers.size):
        within = (abs(away[j]) - edges[cells[j]]) * rates[cells[j]]
        within = within if within > f32(0) else f32(0)
        outward = (cells[j] << i32(4)) + i32(within if within < f32(15) else f32(15))
        code = i32(127) - outward if away[j] < f32(0) else i32(128) + outward
        codes[j] = u8(code) if away[j] == away[j] else u8(0)


@njit(nogil=True)
def _put_codes(codes, anchors, residuals, anchor_start, residual_start, geometry, row):
    """Write a row's codes, the upper four bits and the lower, into its half of their bytes."""
    line = row % geometry.half_rows * geometry.columns
    high, low = anchors[anchor_start + line :][: codes.size], residuals[residual_start + line :][: codes.size]
    if row < geometry.half_rows:
        for j in range(codes.size):
            high[j], low[j] = codes[j] >> u8(4), codes[j] & u8(15)
    else:
        for j in range(codes.size):
            high[j] |= codes[j] & u8(240)
            low[j] |= u8(codes[j] << u8(4))


@njit(nogil=True)
def _get_codes(dense, start, geometry, row, codes):
    """The inverse of _put_codes."""
    if row < geometry.half_rows:
        source = dense[start + row * geometry.columns :][: codes.size]
        for j in range(codes.size):
            codes[j] = source[j] & u8(15)
    else:
        source = dense[start + (row - geometry.half_rows) * geometry.columns :][: codes.size]
        for j in range(codes.size):
            codes[j] = source[j] >> u8(4)


@njit(nogil=True)
def _write_metadata(bits, width, number, left, geometry, anchors, stage):
    """Write minima and scales of a block, and its chunks' lows and widths."""
    low, high = np.empty(width, np.float32), np.empty(width, np.float32)
    place = number * geometry.columns + left
    _extremes(bits, geometry.rows, width, low, high)
    stored = anchors[stage.scales + 2 * place :][: 2 * width].view(np.uint16)
    _write_page_scales(low, high, geometry.mantissa_bits, anchors[stage.minima :], place, stored)
    if geometry.chunks == 1:
        return
    scales, first, last = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    for j in range(width):
        scales.view(np.uint32)[j] = u32(stored[j]) << u32(16)
    for chunk in range(geometry.chunks):
        begin = chunk * geometry.chunk
        _extremes(bits[begin * width :], min(geometry.chunk, geometry.rows - begin), width, first, last)
        place = (number * geometry.chunks + chunk) * geometry.columns + left
        _write_chunk(low, scales, first, last, anchors[stage.lows + place :], anchors[stage.widths + place :])


_GEOMETRY = types.NamedUniTuple(int64, len(Geometry._fields), Geometry)
_STAGE = types.NamedUniTuple(int64, len(Stage._fields), Stage)
_PAYLOAD = types.Array(u8, 1, "C", readonly=True)
_TABLE = types.Array(f32, 1, "C", readonly=True)
_POOL = u8[:, :, ::1]
_RANGE = (int64[::1], int64, int64, _GEOMETRY)
_ENCODE = void(_POOL, *_RANGE, _STAGE, _STAGE, _TABLE, _TABLE, u8[::1], u8[::1])
_DECODE = void(_POOL, *_RANGE, _STAGE, _STAGE, int64, _TABLE, _TABLE, _TABLE, _PAYLOAD, _PAYLOAD)


@compiled(_ENCODE)
def encode_pages(pool, pages, first, last, geometry, anchor, residual, edges, rates, anchors, residuals):
    """Write pages `first` to `last` into the fixed sections of ANCHOR, and the codes of RESIDUAL.

    pool: [layers, pool pages, bytes of a page]; pages: [num_pages]; edges and rates: LynxCode's tables.
    """
    rows, columns = geometry.rows, geometry.columns
    for number in range(first, last):
        page = pool[number // geometry.num_pages, pages[number % geometry.num_pages]]
        for left in range(0, columns, BLOCK_COLUMNS):
            width = min(BLOCK_COLUMNS, columns - left)
            bits, elements = np.empty(rows * width, np.uint32), np.empty(width, np.uint32)
            for row in range(rows):
                load(page, row * columns + left, geometry.mantissa_bits, elements)
                widen(elements, geometry.mantissa_bits, bits[row * width :][:width])
            _write_metadata(bits, width, number, left, geometry, anchors, anchor)
            centres, scales = np.empty(width, np.float32), np.empty(width, np.float32)
            units, slopes = np.empty(width, np.float32), np.empty(width, np.float32)
            away, cells, codes = np.empty(width, np.float32), np.empty(width, np.int32), np.empty(width, np.uint8)
            start = number * geometry.half_rows * columns + left
            for row in range(rows):
                if row % geometry.chunk == 0:
                    read_chunk(anchors, anchor, geometry, number, row // geometry.chunk, left, centres, scales)
                    units_of(scales, units, slopes)
                numbers = bits[row * width :][:width].view(np.float32)
                if geometry.curved:
                    _curved_codes(numbers, centres, slopes, edges, rates, away, cells, codes)
                else:
                    _straight_codes(numbers, centres, units, slopes, codes)
                _put_codes(codes, anchors, residuals, anchor.codes + start, residual.codes + start, geometry, row)


@compiled(_DECODE)
def decode_pages(
    pool, pages, first, last, geometry, anchor, residual, refines, edges, middles, steps, anchors, residuals
):
    """Write pages `first` to `last` from the codes of ANCHOR or, where one refines, from those of both stages.

    pool and pages: as of encode_pages; edges, middles and steps: LynxCode's tables; anchors and residuals: the stages'
    fixed sections; the second's are not read where nothing refines.
    """
    rows, columns = geometry.rows, geometry.columns
    for number in range(first, last):
        page = pool[number // geometry.num_pages, pages[number % geometry.num_pages]]
        for left in range(0, columns, BLOCK_COLUMNS):
            width = min(BLOCK_COLUMNS, columns - left)
            centres, scales = np.empty(width, np.float32), np.empty(width, np.float32)
            units, slopes = np.empty(width, np.float32), np.empty(width, np.float32)
            away, numbers = np.empty(width, np.float32), np.empty(width, np.float32)
            cells, codes, elements = np.empty(width, np.int32), np.empty(width, np.uint8), np.empty(width, np.uint32)
            start = number * geometry.half_rows * columns + left
            for row in range(rows):
                if row % geometry.chunk == 0:
                    read_chunk(anchors, anchor, geometry, number, row // geometry.chunk, left, centres, scales)
                    units_of(scales, units, slopes)
                _get_codes(anchors, anchor.codes + start, geometry, row, codes)
                _coarse(codes, geometry.curved, middles, centres, units, numbers)
                round_to(numbers, geometry.mantissa_bits, elements)
                if refines:
                    widen(elements, geometry.mantissa_bits, numbers.view(np.uint32))
                    _get_codes(residuals, residual.codes + start, geometry, row, codes)
                    _refine(numbers, codes, geometry.curved, edges, steps, centres, units, slopes, away, cells)
                    round_to(numbers, geometry.mantissa_bits, elements)
                store(elements, page, row * columns + left, geometry.mantissa_bits)
