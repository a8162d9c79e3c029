"""SplitZip on a CPU: loops that LLVM vectorises, a tile at a time, so that all between page and payload stays in L1.

A tile is staged as `values`, uint16 [8 * J] whatever the element type, segment after segment, padding as zeros; its
`distances` (how far exponents lie below their tops) and `fields` (the significand's bits that no plane of eight takes)
are uint8 [8 * J] likewise. A plane of b bits packs a field across segments (README.md), so no loop shuffles.

Every constant is typed and every intermediate cast: else a loop would widen to 64 bits and run five times slower.
All of it is one file because numba's cache does not see changes of functions in others.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import int64, njit, types, void
from numba import uint8 as u8
from numba import uint16 as u16
from numba import uint64 as u64
from numba.extending import intrinsic

BFLOAT16, FLOAT16, E5M2 = 7, 10, 2
"""Formats by their mantissa bits; the fourth, float8_e4m3fn, has 3."""


class Geometry(NamedTuple):
    """What kernels know of a TensorPlan: its attributes of the same names, and where sections begin in a dense part.

    exponent_mask: 2^E - 1; low: the significand plane of eight bits; tops and drops: 0 where the code is fixed.
    """

    item_bytes: int
    mantissa_bits: int
    exponent_mask: int
    code_bits: int
    position_bits: int
    per_channel: int
    num_pages: int
    rows: int
    columns: int
    segment_rows: int
    tile_width: int
    tiles_per_page: int
    low: int
    tops: int
    drops: int
    counts: int


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
def _copy(source, target):
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
            _copy(page[row * geometry.columns + left :][:here], values[row * width :])
    else:
        _copy(page[number * values.size :][: values.size], values)


@njit(nogil=True)
def _store(page, geometry, number, values):
    """Write a staged tile into a page [values], all but its padding."""
    width = geometry.tile_width
    if geometry.per_channel:
        left = number * width
        here = min(width, geometry.columns - left)
        for row in range(geometry.rows):
            _copy(values[row * width :][:here], page[row * geometry.columns + left :])
    else:
        here = page[number * values.size :]
        _copy(values[: here.size], here)


@njit(nogil=True)
def _pad(values, tops, geometry, number):
    """Give padding the exponent of its top, hence code 0."""
    for s in range(8):
        for j in range(tops.size):
            if not _is_value(geometry, number, s, j):
                values[s * tops.size + j] = u16(tops[j]) << geometry.mantissa_bits


@njit(nogil=True)
def _choose_tops(values, geometry, tile, dense, largest):
    """Write a tile's top and drops; `largest` [tile_width] is scratch."""
    width = geometry.tile_width
    magnitude = u16((geometry.exponent_mask + 1 << geometry.mantissa_bits) - 1)
    largest[:] = u16(0)
    for row in range(8 * geometry.segment_rows):
        line = values[row * width :][:width]
        for c in range(line.size):
            largest[c] = max(largest[c], u16(line[c] & magnitude))
    top = int64(largest.max()) >> geometry.mantissa_bits
    dense[geometry.tops + tile] = top
    half = (width + 1) // 2
    drops = dense[geometry.drops + tile * half :][:half]
    drops[:] = u8(0)
    for c in range(width):
        drop = min(top - (int64(largest[c]) >> geometry.mantissa_bits), 15)
        drops[c % half] |= u8(drop << 4 if c >= half else drop)


@njit(nogil=True)
def _read_tops(geometry, tile, dense, tops):
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
        _copy(tops[:width], tops[r * width :])


@njit(nogil=True)
def _split(values, tops, geometry, low, fields, distances):
    """Take values apart: `low` takes the significand's low eight bits where it has as many, `fields` the bits above."""
    if geometry.mantissa_bits == BFLOAT16:
        for i in range(values.size):
            low[i] = u8(values[i] & u16(0x7F)) | u8((values[i] >> u16(8)) & u16(0x80))
    elif geometry.mantissa_bits == FLOAT16:
        for i in range(values.size):
            low[i] = u8(values[i])
            fields[i] = u8((values[i] >> u16(8)) & u16(3)) | u8((values[i] >> u16(13)) & u16(4))
    elif geometry.mantissa_bits == E5M2:
        for i in range(values.size):
            fields[i] = u8(values[i] & u16(3)) | u8((values[i] >> u16(5)) & u16(4))
    else:
        for i in range(values.size):
            fields[i] = u8(values[i] & u16(7)) | u8((values[i] >> u16(4)) & u16(8))
    shift, mask = u16(geometry.mantissa_bits), u8(geometry.exponent_mask)
    for s in range(8):
        bits, distance = values[s * tops.size :][: tops.size], distances[s * tops.size :]
        for j in range(bits.size):
            distance[j] = u8(tops[j] - u8(bits[j] >> shift)) & mask


@njit(nogil=True)
def _join(values, tops, geometry, low, fields, distances):
    """Put values together: the inverse of _split. Exponents first, then the significand around them."""
    shift, mask = u16(geometry.mantissa_bits), u8(geometry.exponent_mask)
    for s in range(8):
        bits, distance = values[s * tops.size :][: tops.size], distances[s * tops.size :]
        for j in range(bits.size):
            bits[j] = u16(u8(tops[j] - distance[j]) & mask) << shift
    if geometry.mantissa_bits == BFLOAT16:
        for i in range(values.size):
            values[i] |= u16(low[i] & u8(0x7F)) | u16(u16(low[i] & u8(0x80)) << u16(8))
    elif geometry.mantissa_bits == FLOAT16:
        for i in range(values.size):
            values[i] |= u16(low[i]) | u16(u16(fields[i] & u8(3)) << u16(8)) | u16(u16(fields[i] & u8(4)) << u16(13))
    elif geometry.mantissa_bits == E5M2:
        for i in range(values.size):
            values[i] |= u16(fields[i] & u8(3)) | u16(u16(fields[i] & u8(4)) << u16(5))
    else:
        for i in range(values.size):
            values[i] |= u16(fields[i] & u8(7)) | u16(u16(fields[i] & u8(8)) << u16(4))


@njit(nogil=True)
def _pack(fields, shift, width, plane):
    """Bits `shift` to `shift + width` of `fields` into a plane [width * J]."""
    size, mask = fields.size // 8, u8((1 << width) - 1)
    for s in range(8):
        source, target = fields[s * size :][:size], plane[s % width * size :]
        place = u8(s // width * width)
        if s < width:
            for j in range(source.size):
                target[j] = u8(source[j] >> shift) & mask
        else:
            for j in range(source.size):
                target[j] |= u8((u8(source[j] >> shift) & mask) << place)


@njit(nogil=True)
def _unpack(plane, shift, width, fields):
    """The inverse of _pack. The plane of the lowest bits comes first and clears those above."""
    size, mask = fields.size // 8, u8((1 << width) - 1)
    for s in range(8):
        source, target = plane[s % width * size :][:size], fields[s * size :]
        place = u8(s // width * width)
        if shift == 0:
            for j in range(source.size):
                target[j] = u8(source[j] >> place) & mask
        else:
            for j in range(source.size):
                target[j] |= u8((u8(source[j] >> place) & mask) << shift)


@njit(nogil=True)
def _mark(distances, code_bits, marks):
    """Bit `s` of marks[j]: whether value `j` of segment `s` lies outside the window."""
    size, window = distances.size // 8, u8(1 << code_bits)
    for s in range(8):
        source, target = distances[s * size :][:size], marks
        for j in range(source.size):
            target[j] = u8(target[j] >> u8(1)) | (u8(128) if source[j] >= window else u8(0))


@intrinsic
def _trailing_zeros(typing_context, word):
    """Zero bits below the lowest one of a 64-bit word that is not 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return int64(u64), generate


@njit(nogil=True)
def _list_escapes(marks, distances, geometry, records, extensions):
    """Records and extensions of the marked values; how many, and whether the tile is wide."""
    window, size = 1 << geometry.code_bits, distances.size // 8
    far_bits = 16 - geometry.position_bits
    count, widest = 0, 0
    for word in range(marks.size):
        left = marks[word]
        while left:
            position = word * 64 + _trailing_zeros(left)  # type: ignore[call-arg]
            far = int64(distances[(position & 7) * size + (position >> 3)]) - window
            records[count] = u16(position | far << geometry.position_bits)
            extensions[count] = u8(far >> far_bits)
            widest |= far >> far_bits
            count += 1
            left &= left - u64(1)
    return count, widest != 0


@njit(nogil=True)
def _count(geometry, tile, dense):
    """How many escapes a tile has, and whether it is wide."""
    low, high = int64(dense[geometry.counts + 2 * tile]), int64(dense[geometry.counts + 2 * tile + 1])
    return low | (high & 127) << 8, high >> 7 != 0


@njit(nogil=True)
def _apply_escapes(distances, geometry, records):
    """Set the distances of a tile's escapes; records: bytes."""
    window, size, mask = 1 << geometry.code_bits, distances.size // 8, (1 << geometry.position_bits) - 1
    for index in range(records.size // 2):
        record = int64(records[2 * index]) | int64(records[2 * index + 1]) << 8
        position = record & mask
        distances[(position & 7) * size + (position >> 3)] = window + (record >> geometry.position_bits)


@njit(nogil=True)
def _apply_extensions(distances, geometry, records, extensions):
    """Add what the extensions of a wide tile's escapes say."""
    size, mask, far_bits = distances.size // 8, (1 << geometry.position_bits) - 1, 16 - geometry.position_bits
    for index in range(records.size // 2):
        position = (int64(records[2 * index]) | int64(records[2 * index + 1]) << 8) & mask
        distances[(position & 7) * size + (position >> 3)] += u8(int64(extensions[index]) << far_bits)


_GEOMETRY = types.NamedUniTuple(int64, len(Geometry._fields), Geometry)
_PAYLOAD = types.Array(u8, 1, "C", readonly=True)
_ENCODE = types.UniTuple(int64, 2)(
    u8[:, :, ::1], int64[::1], int64, int64, _GEOMETRY, int64[:, ::1], u8[::1], u8[::1], u16[::1], u8[::1]
)
_DECODE = void(u8[:, :, ::1], int64[::1], int64, int64, _GEOMETRY, int64[:, ::1], u8[::1], _PAYLOAD, _PAYLOAD, _PAYLOAD)


@njit(_ENCODE, nogil=True, cache=True)
def encode_tiles(pool, pages, first, last, geometry, planes, window_tops, dense, records, extensions):
    """Write tiles `first` to `last` into `dense` and list their escapes.

    pool: [layers, pool pages, bytes of a page]; pages: [num_pages]; planes: [n, 4] of offset in `dense`,
    width, shift, and whether of the codes, else of `fields`; window_tops: [layers]; records and extensions: of one
    size, filled from their start. Returns how many of each there are, or -1 twice, with tiles left undone, as soon as
    the records of a tile might not fit.
    """
    segment = geometry.segment_rows * geometry.tile_width
    values, tops = np.empty(8 * segment, np.uint16), np.empty(segment, np.uint8)
    distances, fields = np.empty(8 * segment, np.uint8), np.empty(8 * segment, np.uint8)
    marks = np.zeros((segment + 7) // 8, np.uint64)
    largest = np.empty(geometry.tile_width, np.uint16)
    num_records, num_extensions = 0, 0
    for tile in range(first, last):
        if num_records + 8 * segment > records.size:
            return -1, -1
        number, page = tile % geometry.tiles_per_page, tile // geometry.tiles_per_page
        layer = page // geometry.num_pages
        whole = _is_whole(geometry, number)
        if not whole:
            values[:] = u16(0)
        source = pool[layer, pages[page % geometry.num_pages]]
        if geometry.item_bytes == 2:
            _load(source.view(np.uint16), geometry, number, values)
        else:
            _load(source, geometry, number, values)
        if geometry.per_channel:
            _choose_tops(values, geometry, tile, dense, largest)
            _read_tops(geometry, tile, dense, tops)
        else:
            tops[:] = window_tops[layer]
        if not whole:
            _pad(values, tops, geometry, number)
        _split(values, tops, geometry, dense[geometry.low + tile * 8 * segment :], fields, distances)
        for plane in range(planes.shape[0]):
            offset, width, shift, of_codes = planes[plane]
            section = dense[offset + tile * width * segment :]
            _pack(distances if of_codes else fields, u8(shift), width, section)
        _mark(distances, geometry.code_bits, marks.view(np.uint8))
        count, wide = _list_escapes(marks, distances, geometry, records[num_records:], extensions[num_extensions:])
        dense[geometry.counts + 2 * tile] = u8(count)
        dense[geometry.counts + 2 * tile + 1] = u8(count >> 8) | u8(128 if wide else 0)
        num_records += count
        num_extensions += count if wide else 0
    return num_records, num_extensions


@njit(_DECODE, nogil=True, cache=True)
def decode_tiles(pool, pages, first, last, geometry, planes, window_tops, dense, records, extensions):
    """Write tiles `first` to `last` into the pages; arguments as of encode_tiles, but records are bytes.

    Records and extensions begin with those of tile `first`; none may be stray.
    """
    segment = geometry.segment_rows * geometry.tile_width
    values, tops = np.empty(8 * segment, np.uint16), np.empty(segment, np.uint8)
    distances, fields = np.empty(8 * segment, np.uint8), np.empty(8 * segment, np.uint8)
    next_record, next_extension = 0, 0
    for tile in range(first, last):
        number, page = tile % geometry.tiles_per_page, tile // geometry.tiles_per_page
        layer = page // geometry.num_pages
        if geometry.per_channel:
            _read_tops(geometry, tile, dense, tops)
        else:
            tops[:] = window_tops[layer]
        for plane in range(planes.shape[0]):
            offset, width, shift, of_codes = planes[plane]
            section = dense[offset + tile * width * segment :]
            _unpack(section, u8(shift), width, distances if of_codes else fields)
        count, wide = _count(geometry, tile, dense)
        _apply_escapes(distances, geometry, records[2 * next_record :][: 2 * count])
        if wide:
            _apply_extensions(distances, geometry, records[2 * next_record :][: 2 * count], extensions[next_extension:])
        next_record += count
        next_extension += count if wide else 0
        _join(values, tops, geometry, dense[geometry.low + tile * 8 * segment :], fields, distances)
        target = pool[layer, pages[page % geometry.num_pages]]
        if geometry.item_bytes == 2:
            _store(target.view(np.uint16), geometry, number, values)
        else:
            _store(target, geometry, number, values)


@njit(int64(_GEOMETRY, int64, _PAYLOAD, _PAYLOAD), nogil=True, cache=True)
def stray_record(geometry, tiles, dense, records):
    """The index of a record that lies on no value of its tile; -1 where there is none."""
    values = 8 * geometry.segment_rows * geometry.tile_width
    mask, start = (1 << geometry.position_bits) - 1, 0
    for tile in range(tiles):
        count, _ = _count(geometry, tile, dense)
        number = tile % geometry.tiles_per_page
        whole = _is_whole(geometry, number)
        if not whole or values <= mask:
            for index in range(start, start + count):
                position = (int64(records[2 * index]) | int64(records[2 * index + 1]) << 8) & mask
                if position >= values or not (whole or _is_value(geometry, number, position & 7, position >> 3)):
                    return index
        start += count
    return -1
