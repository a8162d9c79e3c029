"""What the forms' kernels share on a CPU: loops that LLVM vectorises, a tile at a time, so that all stays in L1.

A tile is staged as `values`, uint16 [8 * J] whatever the element type, segment after segment, padding as zeros; its
`distances` (how far exponents lie below their tops) are uint8 [8 * J]. A plane of b bits packs a field across
segments (README.md), so no loop shuffles. Geometries are named tuples: numba compiles a function for each kind.

Constants are typed and intermediates cast: else a loop would widen to 64 bits and run five times slower.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import numpy as np
from numba import int64, njit
from numba import uint8 as u8
from numba import uint16 as u16
from numba import uint64 as u64

from kvrail.codec.core.cpu_compile import trailing_zeros

BFLOAT16, FLOAT16, E5M2 = 7, 10, 2
"""Formats by their mantissa bits; the fourth, float8_e4m3fn, has 3."""


@njit(nogil=True)
def _is_whole(geometry, number):
    """Whether tile `number` of a page has no padding."""
    if geometry.per_channel:
        return geometry.rows == 8 * geometry.segment_rows and (number + 1) * geometry.tile_width <= geometry.columns
    return (number + 1) * 8 * geometry.tile_width <= geometry.rows * geometry.columns


@njit(nogil=True)
def _is_value(geometry, number, s, j):
    """Whether value `j` of segment `s` of tile `number` of a page is one, not padding."""
    width = geometry.tile_width
    if geometry.per_channel:
        row, column = s * geometry.segment_rows + j // width, number * width + j % width
        return row < geometry.rows and column < geometry.columns
    return (number * 8 + s) * width + j < geometry.rows * geometry.columns


@njit(nogil=True)
def copy(source, target):
    """Copy `source` to the beginning of `target`, whose type may take the low bits only."""
    for j in range(source.size):
        target[j] = source[j]


@njit(nogil=True)
def _load(page, geometry, number, values):
    """Stage a tile of a page [values], all but its padding."""
    width = geometry.tile_width
    if geometry.per_channel:
        left = number * width
        here = min(width, geometry.columns - left)
        for row in range(geometry.rows):
            copy(page[row * geometry.columns + left :][:here], values[row * width :])
    else:
        copy(page[number * values.size :][: values.size], values)


@njit(nogil=True)
def _store(page, geometry, number, values):
    """Write a staged tile into a page [values], all but its padding."""
    width = geometry.tile_width
    if geometry.per_channel:
        left = number * width
        here = min(width, geometry.columns - left)
        for row in range(geometry.rows):
            copy(values[row * width :][:here], page[row * geometry.columns + left :])
    else:
        here = page[number * values.size :]
        copy(values[: here.size], here)


@njit(nogil=True)
def load_tile(pool, pages, geometry, tile, values):
    """Stage a tile, zeros for padding; whether it has none."""
    number, page = tile % geometry.tiles_per_page, tile // geometry.tiles_per_page
    whole = _is_whole(geometry, number)
    if not whole:
        values[:] = u16(0)
    source = pool[page // geometry.num_pages, pages[page % geometry.num_pages]]
    if geometry.item_bytes == 2:
        _load(source.view(np.uint16), geometry, number, values)
    else:
        _load(source, geometry, number, values)
    return whole


@njit(nogil=True)
def store_tile(pool, pages, geometry, tile, values):
    """Write a staged tile into its page."""
    number, page = tile % geometry.tiles_per_page, tile // geometry.tiles_per_page
    target = pool[page // geometry.num_pages, pages[page % geometry.num_pages]]
    if geometry.item_bytes == 2:
        _store(target.view(np.uint16), geometry, number, values)
    else:
        _store(target, geometry, number, values)


@njit(nogil=True)
def pad(values, tops, geometry, number):
    """Give padding the exponent of its top, hence code 0."""
    for s in range(8):
        for j in range(tops.size):
            if not _is_value(geometry, number, s, j):
                values[s * tops.size + j] = u16(tops[j]) << geometry.mantissa_bits


@njit(nogil=True)
def choose_tops(values, geometry, tile, dense, largest):
    """Write a tile's top and drops; `largest` [J] is scratch."""
    width, magnitude = geometry.tile_width, u16((geometry.exponent_mask + 1 << geometry.mantissa_bits) - 1)
    largest[:] = u16(0)
    for s in range(8):
        segment = values[s * largest.size :][: largest.size]
        for j in range(segment.size):
            largest[j] = max(largest[j], u16(segment[j] & magnitude))
    for r in range(1, geometry.segment_rows):
        line = largest[r * width :][:width]
        for c in range(line.size):
            largest[c] = max(largest[c], line[c])
    shift, half = u16(geometry.mantissa_bits), (width + 1) // 2
    top = u8(largest[:width].max() >> shift)
    dense[geometry.tops + tile] = top
    left, right, drops = largest[:half], largest[half:width], dense[geometry.drops + tile * half :]
    for c in range(left.size):
        drops[c] = min(u8(top - u8(left[c] >> shift)), u8(15))
    for c in range(right.size):
        drops[c] |= u8(min(u8(top - u8(right[c] >> shift)), u8(15)) << u8(4))


@njit(nogil=True)
def read_tops(geometry, tile, dense, tops):
    """Expand a tile's top and drops into the top of each value of a segment, `tops` [J]."""
    width = geometry.tile_width
    half = (width + 1) // 2
    top, mask = dense[geometry.tops + tile], u8(geometry.exponent_mask)
    drops = dense[geometry.drops + tile * half :][:half]
    left, right = tops[:half], tops[half:width]
    for c in range(left.size):
        left[c] = u8(top - (drops[c] & u8(15))) & mask
    for c in range(right.size):
        right[c] = u8(top - (drops[c] >> u8(4))) & mask
    for r in range(1, geometry.segment_rows):
        copy(tops[:width], tops[r * width :])


@njit(nogil=True)
def pack_four(fields, plane):
    """The low four bits of fields as a plane."""
    left, right = fields[: plane.size], fields[plane.size :]
    for i in range(plane.size):
        plane[i] = (left[i] & u8(15)) | u8(right[i] << u8(4))


@njit(nogil=True)
def unpack_four(fields, plane):
    """Fields of four bits from their plane."""
    left, right = fields[: plane.size], fields[plane.size :]
    for i in range(plane.size):
        left[i] = plane[i] & u8(15)
        right[i] = plane[i] >> u8(4)


@njit(nogil=True)
def _mark(distances, window, marks):
    """Bit `s` of marks[j]: whether value `j` of segment `s` lies outside the window."""
    size, window = distances.size // 8, u8(window)
    for s in range(8):
        source, target = distances[s * size :][:size], marks
        for j in range(source.size):
            target[j] = u8(target[j] >> u8(1)) | (u8(128) if source[j] >= window else u8(0))


@njit(nogil=True)
def list_escapes(distances, geometry, tile, dense, marks, records, extensions):
    """Write a tile's records and extensions, and its count; how many there are of each. `marks` is scratch."""
    _mark(distances, geometry.window, marks.view(np.uint8))
    window, size = geometry.window, distances.size // 8
    far_bits = 16 - geometry.position_bits
    count, widest = 0, 0
    for word in range(marks.size):
        left = marks[word]
        while left:
            position = word * 64 + trailing_zeros(left)
            far = int64(distances[(position & 7) * size + (position >> 3)]) - window
            records[count] = u16(position | far << geometry.position_bits)
            extensions[count] = u8(far >> far_bits)
            widest |= far >> far_bits
            count += 1
            left &= left - u64(1)
    tally = dense[geometry.counts + 2 * tile :]
    tally[0], tally[1] = u8(count), u8(count >> 8) | u8(128 if widest else 0)
    return count, count if widest else 0


@njit(nogil=True)
def apply_escapes(distances, geometry, tile, dense, records, extensions):
    """Set the distances of a tile's escapes; records: bytes, from the tile's first on. How many there are of each."""
    tally = dense[geometry.counts + 2 * tile :]
    count, wide = int64(tally[0]) | int64(tally[1] & u8(127)) << 8, tally[1] >= u8(128)
    window, size = geometry.window, distances.size // 8
    for index in range(count):
        record = int64(records[2 * index]) | int64(records[2 * index + 1]) << 8
        position, far = record & (1 << geometry.position_bits) - 1, record >> geometry.position_bits
        if wide:
            far += int64(extensions[index]) << 16 - geometry.position_bits
        distances[(position & 7) * size + (position >> 3)] = u8(window + far)
    return count, count if wide else 0
