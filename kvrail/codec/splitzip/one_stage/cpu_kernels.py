"""SplitZip on a CPU: loops that LLVM vectorises, a tile at a time, so that all between page and payload stays in L1.

Staged as in kvrail/codec/splitzip/tiles/cpu_kernels.py, whose parts these are made of: `values` uint16 [8 * J],
`distances` and `fields` (the significand's bits that no plane of eight takes) uint8 [8 * J].
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import numpy as np
from numba import int64, njit, types, void
from numba import uint8 as u8
from numba import uint16 as u16

from kvrail.codec.core.cpu_compile import compiled
from kvrail.codec.splitzip.one_stage.cpu_geometry import Geometry
from kvrail.codec.splitzip.tiles.cpu_kernels import (
    BFLOAT16,
    E5M2,
    FLOAT16,
    apply_escapes,
    choose_tops,
    copy,
    list_escapes,
    load_tile,
    pack_four,
    pad,
    read_tops,
    store_tile,
    unpack_four,
)


@njit(nogil=True)
def _add(source, target):
    for j in range(target.size):
        target[j] |= u16(source[j])


def _format_kernels(exponent_bits, mantissa_bits, low_bits):
    """Kernels of one element type that take values apart and put them together; what they close over are constants.

    A field is the significand without its `low_bits` low bits.
    """
    shift, mask, base = u16(mantissa_bits), u8((1 << exponent_bits) - 1), u16(low_bits)
    high, sign = u8((1 << mantissa_bits - low_bits) - 1), u8(1 << mantissa_bits - low_bits)
    sign_shift = u16(low_bits + exponent_bits)

    @njit(nogil=True)
    def split(values, tops, fields, distances):
        size = tops.size
        for s in range(8):
            bits, field, distance = values[s * size :][:size], fields[s * size :][:size], distances[s * size :][:size]
            for j in range(size):
                field[j] = (u8(bits[j] >> base) & high) | (u8(bits[j] >> sign_shift) & sign)
                distance[j] = u8(tops[j] - u8(bits[j] >> shift)) & mask

    @njit(nogil=True)
    def join(values, tops, fields, distances):
        size = tops.size
        for s in range(8):
            bits, field, distance = values[s * size :][:size], fields[s * size :][:size], distances[s * size :][:size]
            for j in range(size):
                exponent = u16(u16(u8(tops[j] - distance[j]) & mask) << shift)
                bits[j] = exponent | u16(u16(field[j] & high) << base) | u16(u16(field[j] & sign) << sign_shift)

    return split, join


_split_bfloat16, _join_bfloat16 = _format_kernels(8, 7, 0)
_split_float16, _join_float16 = _format_kernels(5, 10, 8)
_split_e5m2, _join_e5m2 = _format_kernels(5, 2, 0)
_split_e4m3, _join_e4m3 = _format_kernels(4, 3, 0)


@njit(nogil=True)
def _split(values, tops, geometry, low, fields, distances):
    """Take values apart. From the significand, the plane `low` takes the low eight bits where it has as many."""
    if geometry.mantissa_bits == BFLOAT16:
        _split_bfloat16(values, tops, low, distances)
    elif geometry.mantissa_bits == FLOAT16:
        _split_float16(values, tops, fields, distances)
        copy(values, low)
    elif geometry.mantissa_bits == E5M2:
        _split_e5m2(values, tops, fields, distances)
    else:
        _split_e4m3(values, tops, fields, distances)


@njit(nogil=True)
def _join(values, tops, geometry, low, fields, distances):
    """Put values together: the inverse of _split."""
    if geometry.mantissa_bits == BFLOAT16:
        _join_bfloat16(values, tops, low, distances)
    elif geometry.mantissa_bits == FLOAT16:
        _join_float16(values, tops, fields, distances)
        _add(low, values)
    elif geometry.mantissa_bits == E5M2:
        _join_e5m2(values, tops, fields, distances)
    else:
        _join_e4m3(values, tops, fields, distances)


@njit(nogil=True)
def _pack(fields, bits, tile, dense, first, second):
    """The low bits of `fields`: four into the plane at `first`, or three into those of two and of one bit."""
    size = fields.size // 8
    if bits == 4:
        pack_four(fields, dense[first + tile * 4 * size :][: 4 * size])
    elif bits == 3:
        _pack_two(fields, dense[first + tile * 2 * size :][: 2 * size])
        _pack_third(fields, dense[second + tile * size :][:size])


@njit(nogil=True)
def _unpack(fields, bits, tile, dense, first, second):
    """The inverse of _pack."""
    size = fields.size // 8
    if bits == 4:
        unpack_four(fields, dense[first + tile * 4 * size :][: 4 * size])
    elif bits == 3:
        _unpack_three(fields, dense[first + tile * 2 * size :][: 2 * size], dense[second + tile * size :][:size])


@njit(nogil=True)
def _pack_two(fields, plane):
    for quarter in range(4):
        source = fields[quarter * plane.size :][: plane.size]
        for i in range(source.size):
            plane[i] = u8(plane[i] >> u8(2)) | u8(source[i] << u8(6))


@njit(nogil=True)
def _pack_third(fields, plane):
    for s in range(8):
        source = fields[s * plane.size :][: plane.size]
        for j in range(source.size):
            plane[j] = u8(plane[j] >> u8(1)) | u8(u8(source[j] << u8(5)) & u8(128))


@njit(nogil=True)
def _unpack_three(fields, two, one):
    size = one.size
    for s in range(8):
        target, pair = fields[s * size :][:size], two[s % 2 * size :][:size]
        for j in range(size):
            low = u8(pair[j] >> u8(s // 2 * 2)) & u8(3)
            target[j] = low | u8(u8(u8(one[j] >> u8(s)) & u8(1)) << u8(2))


_GEOMETRY = types.NamedUniTuple(int64, len(Geometry._fields), Geometry)
_PAYLOAD = types.Array(u8, 1, "C", readonly=True)
_ENCODE = types.UniTuple(int64, 2)(
    u8[:, :, ::1], int64[::1], int64, int64, _GEOMETRY, u8[::1], u8[::1], u16[::1], u8[::1]
)
_DECODE = void(u8[:, :, ::1], int64[::1], int64, int64, _GEOMETRY, u8[::1], _PAYLOAD, _PAYLOAD, _PAYLOAD)


@compiled(_ENCODE)
def encode_tiles(pool, pages, first, last, geometry, window_tops, dense, records, extensions):
    """Write tiles `first` to `last` into `dense` and list their escapes.

    pool: [layers, pool pages, bytes of a page]; pages: [num_pages]; window_tops: [layers]; records and extensions:
    of one size, filled from their start. Returns how many of each there are, or -1 twice, with tiles left undone,
    as soon as the records of a tile might not fit.
    """
    segment = geometry.segment_rows * geometry.tile_width
    values, largest, tops = (
        np.empty(8 * segment, np.uint16),
        np.empty(segment, np.uint16),
        np.empty(segment, np.uint8),
    )
    distances, fields = np.empty(8 * segment, np.uint8), np.empty(8 * segment, np.uint8)
    marks = np.zeros((segment + 7) // 8, np.uint64)
    num_records, num_extensions = 0, 0
    for tile in range(first, last):
        if num_records + 8 * segment > records.size:
            return -1, -1
        whole = load_tile(pool, pages, geometry, tile, values)
        if geometry.per_channel:
            choose_tops(values, geometry, tile, dense, largest)
            read_tops(geometry, tile, dense, tops)
        else:
            tops[:] = window_tops[tile // geometry.tiles_per_page // geometry.num_pages]
        if not whole:
            pad(values, tops, geometry, tile % geometry.tiles_per_page)
        _split(values, tops, geometry, dense[geometry.low + tile * 8 * segment :], fields, distances)
        _pack(fields, geometry.field_bits, tile, dense, geometry.field0, geometry.field1)
        _pack(distances, geometry.code_bits, tile, dense, geometry.code0, geometry.code1)
        left = records[num_records:], extensions[num_extensions:]
        count, extended = list_escapes(distances, geometry, tile, dense, marks, *left)
        num_records, num_extensions = num_records + count, num_extensions + extended
    return num_records, num_extensions


@compiled(_DECODE)
def decode_tiles(pool, pages, first, last, geometry, window_tops, dense, records, extensions):
    """Write tiles `first` to `last` into the pages; arguments as of encode_tiles, but records are bytes.

    Records and extensions begin with those of tile `first`; none may be stray.
    """
    segment = geometry.segment_rows * geometry.tile_width
    values, tops = np.empty(8 * segment, np.uint16), np.empty(segment, np.uint8)
    distances, fields = np.empty(8 * segment, np.uint8), np.empty(8 * segment, np.uint8)
    next_record, next_extension = 0, 0
    for tile in range(first, last):
        if geometry.per_channel:
            read_tops(geometry, tile, dense, tops)
        else:
            tops[:] = window_tops[tile // geometry.tiles_per_page // geometry.num_pages]
        _unpack(distances, geometry.code_bits, tile, dense, geometry.code0, geometry.code1)
        left = records[2 * next_record :], extensions[next_extension:]
        count, extended = apply_escapes(distances, geometry, tile, dense, *left)
        next_record, next_extension = next_record + count, next_extension + extended
        _unpack(fields, geometry.field_bits, tile, dense, geometry.field0, geometry.field1)
        _join(values, tops, geometry, dense[geometry.low + tile * 8 * segment :], fields, distances)
        store_tile(pool, pages, geometry, tile, values)
