"""Lynx's last stage on a CPU: what leads from the refined values to the exact ones, a tile at a time."""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type, operator"

import numpy as np
from numba import float32 as f32
from numba import float64 as f64
from numba import int32 as i32
from numba import int64, njit, types, void
from numba import uint8 as u8
from numba import uint32 as u32
from numba import uint64 as u64

from kvrail.codec.core.cpu_compile import compiled
from kvrail.codec.papers.lynx.cpu_float_kernels import (
    BFLOAT16,
    FLOAT16,
    load,
    read_chunk,
    round_to,
    store,
    units_of,
    widen,
)
from kvrail.codec.papers.lynx.plan import Geometry, Stage


@njit(nogil=True)
def _ordered(elements, mantissa_bits, keys):
    """Integers, int32, in the order of the elements; -0 comes just before 0."""
    if mantissa_bits in (BFLOAT16, FLOAT16):
        for j in range(elements.size):
            bits = i32(elements[j] << u32(16)) >> i32(16)
            keys[j] = bits ^ (bits >> i32(31) & i32(0x7FFF))
    else:
        for j in range(elements.size):
            keys[j] = i32(elements[j]) ^ (i32(elements[j]) >> i32(31) & i32(0x7FFFFFFF))


@njit(nogil=True)
def _elements(keys, mantissa_bits, elements):
    """The inverse of _ordered."""
    if mantissa_bits in (BFLOAT16, FLOAT16):
        for j in range(elements.size):
            elements[j] = u32(keys[j] ^ (keys[j] >> i32(31) & i32(0x7FFF))) & u32(0xFFFF)
    else:
        for j in range(elements.size):
            elements[j] = u32(keys[j] ^ (keys[j] >> i32(31) & i32(0x7FFFFFFF)))


@njit(nogil=True)
def _bit_lengths(spans, mantissa_bits, widths):
    """Bits of unsigned numbers; none of 0."""
    if mantissa_bits in (BFLOAT16, FLOAT16):  # below 2^17, which float32 holds
        singles = np.empty(spans.size, np.float32)
        for j in range(spans.size):
            singles[j] = f32(i32(spans[j]))
        exponents = singles.view(np.int32)
        for j in range(spans.size):
            widths[j] = max((exponents[j] >> i32(23)) - i32(126), i32(0))
    else:
        doubles = np.empty(spans.size, np.float64)
        for j in range(spans.size):
            doubles[j] = f64(spans[j])
        long = doubles.view(np.int64)
        for j in range(spans.size):
            widths[j] = max(i32(long[j] >> 52) - i32(1022), i32(0))


@njit(nogil=True)
def _intervals(refined, reach, units, mantissa_bits, low, spans, widths):
    """For each exact value, given the refined one: the least it can be, how many more there are, bits of a code."""
    size, half_ulp = refined.size, f32(2.0 ** -(mantissa_bits + 1))
    exact, numbers, reaches = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    elements, high = np.empty(size, np.uint32), np.empty(size, np.int32)
    widen(refined, mantissa_bits, exact.view(np.uint32))
    for j in range(size):
        reaches.view(np.uint32)[j] = exact.view(np.uint32)[j] & u32(0x7F800000)
    for j in range(size):
        reaches[j] = reach * units[j] + reaches[j] * half_ulp
    for side, keys in ((-1, low), (1, high)):
        for j in range(size):
            numbers[j] = exact[j] + f32(side) * reaches[j]
        round_to(numbers, mantissa_bits, elements)
        _ordered(elements, mantissa_bits, keys)
        for j in range(size):
            other = (elements[j] ^ refined[j]) >> u32(mantissa_bits) != u32(0)
            keys[j] += i32(side) if other else i32(0)
    for j in range(size):
        spans[j] = u32(u32(high[j]) - u32(low[j])) if high[j] > low[j] else u32(0)
    _bit_lengths(spans, mantissa_bits, widths)


@njit(nogil=True)
def _load_rows(page, top, left, here, geometry, elements):
    """Rows of a tile from `top` on, one after the other."""
    for row in range(elements.size // here):
        load(page, (top + row) * geometry.columns + left, geometry.mantissa_bits, elements[row * here :][:here])


@njit(nogil=True)
def _chunk_units(dense, stage, geometry, number, chunk, left, here, units):
    """The unit of each value of a chunk's rows in a tile."""
    centres, scales, rates = np.empty(here, np.float32), np.empty(here, np.float32), np.empty(here, np.float32)
    read_chunk(dense, stage, geometry, number, chunk, left, centres, scales)
    units_of(scales, units[:here], rates)
    for row in range(1, units.size // here):
        units[row * here :][:here] = units[:here]


_GEOMETRY = types.NamedUniTuple(int64, len(Geometry._fields), Geometry)
_STAGE = types.NamedUniTuple(int64, len(Stage._fields), Stage)
_PAYLOAD = types.Array(u8, 1, "C", readonly=True)
_POOL = u8[:, :, ::1]
_RANGE = (int64[::1], int64, int64, _GEOMETRY, _STAGE, f32)
_ENCODE = types.UniTuple(int64, 2)(_POOL, _POOL, *_RANGE, u8[::1], u32[::1], u32[::1], u32[::1])
_DECODE = void(_POOL, *_RANGE, _PAYLOAD, _PAYLOAD)


@compiled(_ENCODE)
def encode_exact_pages(pool, refined, pages, first, last, geometry, stage, reach, dense, stream, positions, elements):
    """Write the tiles of pages `first` to `last`: their lengths into `dense`, their words from the start of `stream`.

    pool: [layers, pool pages, bytes of a page]; refined: what RESIDUAL leaves, [layers, num_pages, bytes of a page];
    dense: EXACT's fixed sections, with scales and widths in them. Returns how many words and escapes there are, or -1
    twice as soon as the escapes of a tile might not fit.
    """
    words, escapes, wide = 0, 0, geometry.tile_columns
    lengths = dense[stage.lengths :][: 4 * geometry.tiles_per_page * last].view(np.uint32)
    most = min(geometry.chunk, geometry.rows) * wide
    units, found, near = np.empty(most, np.float32), np.empty(most, np.uint32), np.empty(most, np.uint32)
    low, spans, widths = np.empty(most, np.int32), np.empty(most, np.uint32), np.empty(most, np.int32)
    keys = np.empty(most, np.int32)
    for tile in range(first * geometry.tiles_per_page, last * geometry.tiles_per_page):
        if escapes + geometry.rows * wide > positions.size:
            return -1, -1
        number, left = tile // geometry.tiles_per_page, tile % geometry.tiles_per_page * wide
        layer, place = number // geometry.num_pages, number % geometry.num_pages
        here = min(wide, geometry.columns - left)
        bits, filled, start = u64(0), u64(0), words
        for top in range(0, geometry.rows, geometry.chunk):
            size = min(geometry.chunk, geometry.rows - top) * here
            _chunk_units(dense, stage, geometry, number, top // geometry.chunk, left, here, units[:size])
            _load_rows(pool[layer, pages[place]], top, left, here, geometry, found[:size])
            _load_rows(refined[layer, place], top, left, here, geometry, near[:size])
            _ordered(found[:size], geometry.mantissa_bits, keys)
            _intervals(near[:size], reach, units, geometry.mantissa_bits, low, spans[:size], widths)
            for j in range(size):
                code = u32(u32(keys[j]) - u32(low[j]))
                if code > spans[j]:  # also where the key is below
                    positions[escapes] = u32((tile * geometry.rows + top + j // here) * wide + j % here)
                    elements[escapes] = found[j]
                    escapes, code = escapes + 1, u32(0)
                bits |= u64(code) << filled
                filled += u64(widths[j])
                if filled >= u64(32):
                    stream[words] = u32(bits)
                    words, bits, filled = words + 1, bits >> u64(32), filled - u64(32)
        if filled > u64(0):
            stream[words] = u32(bits)
            words += 1
        lengths[tile] = u32(words - start)
    return words, escapes


@compiled(_DECODE)
def decode_exact_pages(pool, pages, first, last, geometry, stage, reach, dense, stream):
    """Restore pages `first` to `last` where they lie refined; stream: bytes, from the first of their words on.

    What a tile's words do not reach is read as zeros.
    """
    wide, mantissa_bits = geometry.tile_columns, geometry.mantissa_bits
    lengths = dense[stage.lengths :][: 4 * geometry.tiles_per_page * last].view(np.uint32)
    most = min(geometry.chunk, geometry.rows) * wide
    units, near = np.empty(most, np.float32), np.empty(most, np.uint32)
    low, spans, widths = np.empty(most, np.int32), np.empty(most, np.uint32), np.empty(most, np.int32)
    begin = 0
    for tile in range(first * geometry.tiles_per_page, last * geometry.tiles_per_page):
        number, left = tile // geometry.tiles_per_page, tile % geometry.tiles_per_page * wide
        here = min(wide, geometry.columns - left)
        page = pool[number // geometry.num_pages, pages[number % geometry.num_pages]]
        bits, filled, word = u64(0), u64(0), 0
        words = stream[4 * begin :][: 4 * int64(lengths[tile])].view(np.uint32)
        begin += words.size
        for top in range(0, geometry.rows, geometry.chunk):
            size = min(geometry.chunk, geometry.rows - top) * here
            _chunk_units(dense, stage, geometry, number, top // geometry.chunk, left, here, units[:size])
            _load_rows(page, top, left, here, geometry, near[:size])
            _intervals(near[:size], reach, units, mantissa_bits, low, spans[:size], widths)
            for j in range(size):
                if filled < u64(widths[j]):
                    bits |= u64(words[word] if word < words.size else u32(0)) << filled
                    word, filled = word + 1, filled + u64(32)
                low[j] += i32(bits & (u64(1) << u64(widths[j])) - u64(1))
                bits, filled = bits >> u64(widths[j]), filled - u64(widths[j])
            _elements(low[:size], mantissa_bits, near[:size])
            for row in range(size // here):
                store(near[row * here :][:here], page, (top + row) * geometry.columns + left, mantissa_bits)
