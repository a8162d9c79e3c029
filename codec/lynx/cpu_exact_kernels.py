"""Lynx's last stage on a CPU: what leads from the refined values to the exact ones, a tile at a time."""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type, operator"

import numpy as np
from numba import float32 as f32
from numba import int64, njit, types, void
from numba import uint8 as u8
from numba import uint32 as u32
from numba import uint64 as u64

from codec.lynx.cpu_float_kernels import BFLOAT16, FLOAT16, load, read_chunk, round_to, store, units_of, widen
from codec.lynx.cpu_geometry import Geometry, Stage


@njit(nogil=True)
def _ordered(elements, mantissa_bits, keys):
    """Integers in the order of the elements; -0 comes just before 0."""
    size = int64(16 if mantissa_bits in (BFLOAT16, FLOAT16) else 32)
    for j in range(elements.size):
        sign = int64(elements[j]) >> size - 1
        keys[j] = int64(elements[j]) - (sign << size) ^ -sign & (int64(1) << size - 1) - 1


@njit(nogil=True)
def _intervals(refined, reach, units, mantissa_bits, low, spans, widths):
    """Of each exact value, given the refined one: the least that it can be, how many more there are, bits of a code."""
    size, half_ulp = refined.size, f32(2.0 ** -(mantissa_bits + 1))
    exact, numbers, reaches = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    elements, high = np.empty(size, np.uint32), np.empty(size, np.int64)
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
            if elements[j] >> u32(mantissa_bits) != refined[j] >> u32(mantissa_bits):
                keys[j] += side
    sizes = np.empty(size, np.float64)
    for j in range(size):
        spans[j] = max(high[j] - low[j], 0)
        sizes[j] = np.float64(spans[j])
    exponents = sizes.view(np.int64)
    for j in range(size):
        widths[j] = max((exponents[j] >> 52) - 1022, 0)


_GEOMETRY = types.NamedUniTuple(int64, len(Geometry._fields), Geometry)
_STAGE = types.NamedUniTuple(int64, len(Stage._fields), Stage)
_PAYLOAD = types.Array(u8, 1, "C", readonly=True)
_POOL = u8[:, :, ::1]
_RANGE = (int64[::1], int64, int64, _GEOMETRY, _STAGE, f32)
_ENCODE = types.UniTuple(int64, 2)(_POOL, _POOL, *_RANGE, u8[::1], u32[::1], u32[::1], u32[::1])
_DECODE = void(_POOL, *_RANGE, _PAYLOAD, _PAYLOAD)


def _compiled(signature):
    """Compile when this module is imported; keep it where a directory can be written (../splitzip/README.md)."""

    def decorate(function):
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except RuntimeError:  # numba found no directory for its cache
            return njit(signature, nogil=True)(function)

    return decorate


@_compiled(_ENCODE)
def encode_exact_pages(pool, refined, pages, first, last, geometry, stage, reach, dense, stream, positions, elements):
    """Write the tiles of pages `first` to `last`: their lengths into `dense`, their words from the start of `stream`.

    pool: [layers, pool pages, bytes of a page]; refined: what RESIDUAL leaves, [layers, num_pages, bytes of a page];
    dense: EXACT's fixed sections, with scales and widths in them. Returns how many words and escapes there are, or -1
    twice as soon as the escapes of a tile might not fit.
    """
    words, escapes, wide = 0, 0, geometry.tile_columns
    lengths = dense[stage.lengths :][: 4 * geometry.tiles_per_page * last].view(np.uint32)
    centres, scales = np.empty(wide, np.float32), np.empty(wide, np.float32)
    units, slopes = np.empty(wide, np.float32), np.empty(wide, np.float32)
    found, near, keys = np.empty(wide, np.uint32), np.empty(wide, np.uint32), np.empty(wide, np.int64)
    low, spans, widths = np.empty(wide, np.int64), np.empty(wide, np.int64), np.empty(wide, np.int64)
    for tile in range(first * geometry.tiles_per_page, last * geometry.tiles_per_page):
        if escapes + geometry.rows * wide > positions.size:
            return -1, -1
        number, left = tile // geometry.tiles_per_page, tile % geometry.tiles_per_page * wide
        layer, place, here = (
            number // geometry.num_pages,
            number % geometry.num_pages,
            min(wide, geometry.columns - left),
        )
        bits, filled, start = u64(0), u64(0), words
        for row in range(geometry.rows):
            if row % geometry.chunk == 0:
                chunk = row // geometry.chunk
                read_chunk(dense, stage, geometry, number, chunk, left, centres[:here], scales[:here])
                units_of(scales[:here], units, slopes)
            load(pool[layer, pages[place]], row * geometry.columns + left, geometry.mantissa_bits, found[:here])
            load(refined[layer, place], row * geometry.columns + left, geometry.mantissa_bits, near[:here])
            _ordered(found[:here], geometry.mantissa_bits, keys)
            _intervals(near[:here], reach, units, geometry.mantissa_bits, low, spans, widths)
            for j in range(here):
                code = keys[j] - low[j]
                if code < 0 or code > spans[j]:
                    positions[escapes] = u32((tile * geometry.rows + row) * wide + j)
                    elements[escapes] = found[j]
                    escapes, code = escapes + 1, 0
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


@_compiled(_DECODE)
def decode_exact_pages(pool, pages, first, last, geometry, stage, reach, dense, stream):
    """Restore pages `first` to `last` where they lie refined; stream: bytes, from the first of their words on.

    What a tile's words do not reach is read as zeros.
    """
    wide, mantissa_bits = geometry.tile_columns, geometry.mantissa_bits
    size = int64(16 if mantissa_bits in (BFLOAT16, FLOAT16) else 32)
    magnitude, whole = (int64(1) << size - 1) - 1, (int64(1) << size) - 1
    lengths = dense[stage.lengths :][: 4 * geometry.tiles_per_page * last].view(np.uint32)
    centres, scales = np.empty(wide, np.float32), np.empty(wide, np.float32)
    units, slopes, near = np.empty(wide, np.float32), np.empty(wide, np.float32), np.empty(wide, np.uint32)
    low, spans, widths = np.empty(wide, np.int64), np.empty(wide, np.int64), np.empty(wide, np.int64)
    begin = 0
    for tile in range(first * geometry.tiles_per_page, last * geometry.tiles_per_page):
        number, left = tile // geometry.tiles_per_page, tile % geometry.tiles_per_page * wide
        here, page = (
            min(wide, geometry.columns - left),
            pool[number // geometry.num_pages, pages[number % geometry.num_pages]],
        )
        bits, filled, word = u64(0), u64(0), 0
        words = stream[4 * begin :][: 4 * int64(lengths[tile])].view(np.uint32)
        begin += words.size
        for row in range(geometry.rows):
            if row % geometry.chunk == 0:
                chunk = row // geometry.chunk
                read_chunk(dense, stage, geometry, number, chunk, left, centres[:here], scales[:here])
                units_of(scales[:here], units, slopes)
            load(page, row * geometry.columns + left, mantissa_bits, near[:here])
            _intervals(near[:here], reach, units, mantissa_bits, low, spans, widths)
            for j in range(here):
                if filled < u64(widths[j]):
                    bits |= u64(words[word] if word < words.size else u32(0)) << filled
                    word, filled = word + 1, filled + u64(32)
                key = low[j] + int64(bits & (u64(1) << u64(widths[j])) - u64(1))
                bits, filled = bits >> u64(widths[j]), filled - u64(widths[j])
                near[j] = u32((key if key >= 0 else key ^ magnitude) & whole)
            store(near[:here], page, row * geometry.columns + left, mantissa_bits)
