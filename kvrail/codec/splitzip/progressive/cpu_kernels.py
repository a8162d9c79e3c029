"""The two stages on a CPU: loops that LLVM vectorises, a tile at a time, so that all in between stays in L1.

Staged as in kvrail/codec/splitzip/tiles/cpu_kernels.py, whose parts these are made of: `values` uint16 [8 * J],
`distances`, `anchors` and `rests` (what no plane of eight takes of the low mantissa bits) uint8 [8 * J].
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import numpy as np
from numba import int64, njit, types, void
from numba import uint8 as u8
from numba import uint16 as u16

from kvrail.codec.core.cpu_compile import compiled, version_of
from kvrail.codec.splitzip.progressive.cpu_geometry import CutGeometry
from kvrail.codec.splitzip.progressive.format import CODE_BITS, unused_codes
from kvrail.codec.splitzip.tiles import cpu_kernels
from kvrail.codec.splitzip.tiles.cpu_kernels import (
    BFLOAT16,
    E5M2,
    FLOAT16,
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


def _level_kernels(octave, rest_bits):
    """README.md, "Levels": from depths to their places among levels of one size, and back for a level's middle."""

    @njit(nogil=True)
    def stretched(depth):
        if not rest_bits:
            return depth
        first = min(max(depth, u16(octave // 2)), u16(octave))
        second = min(max(depth, u16(3 * octave // 2)), u16(2 * octave))
        return u16(u16(u16(depth + first) + second) - u16(2 * octave))

    @njit(nogil=True)
    def shrunk(place):
        if not rest_bits:
            return place
        after = u16(place + u16(1))
        first = min(max(after, u16(octave // 2)), u16(3 * octave // 2))
        second = min(max(after, u16(2 * octave)), u16(3 * octave))
        return u16(place - u16(u16(u16(first + second) - u16(5 * octave // 2)) >> u16(1)))

    return stretched, shrunk


def _format_kernels(exponent_bits, mantissa_bits, kept_bits):
    """Kernels of one element type and cut that take values apart and put their first stage together.

    What they close over are constants. `rests` are the low mantissa bits without those that a plane of eight takes.
    """
    rest_bits, octave = mantissa_bits - kept_bits, 1 << mantissa_bits
    shift, cut, ones = u16(mantissa_bits), u16(rest_bits), u16(octave - 1)
    magnitude, window = u16((1 << exponent_bits + mantissa_bits) - 1), u8((1 << CODE_BITS) - unused_codes(rest_bits))
    base, rest_mask = u16(8 if rest_bits >= 8 else 0), u8((1 << rest_bits % 8) - 1)
    mask, last = u8((1 << CODE_BITS + kept_bits) - 1), u8((1 << CODE_BITS) - 1 << kept_bits)
    sign, sign_shift = u8(1 << CODE_BITS + kept_bits), u16(exponent_bits + rest_bits - CODE_BITS)
    stretched, shrunk = _level_kernels(octave, rest_bits)
    middle = u16((1 << rest_bits - 1) - 1 if rest_bits else 0)

    @njit(nogil=True)
    def split(values, tops, anchors, rests, distances):
        size = tops.size
        for s in range(8):
            bits, distance = values[s * size :][:size], distances[s * size :][:size]
            anchor, rest = anchors[s * size :][:size], rests[s * size :][:size]
            for j in range(size):
                top = u16(u16(tops[j]) << shift) | ones
                depth = u16(top - u16(bits[j] & magnitude))
                far = u8(depth >> shift)
                distance[j] = far
                level = u8(stretched(depth) >> cut) | (last if far >= window else u8(0))
                anchor[j] = u8(level & mask) | (u8(bits[j] >> sign_shift) & sign)
                rest[j] = u8(bits[j] >> base) & rest_mask

    @njit(nogil=True)
    def join(values, tops, anchors):
        size = tops.size
        for s in range(8):
            bits, anchor = values[s * size :][:size], anchors[s * size :][:size]
            for j in range(size):
                top = u16(u16(tops[j]) << shift) | ones
                depth = shrunk(u16(u16(u16(anchor[j] & mask) << cut) | middle))
                bits[j] = u16(u16(top - depth) & magnitude) | u16(u16(anchor[j] & sign) << sign_shift)

    return split, join


_split_bfloat16_1, _join_bfloat16_1 = _format_kernels(8, 7, 1)
_split_bfloat16_2, _join_bfloat16_2 = _format_kernels(8, 7, 2)
_split_bfloat16_3, _join_bfloat16_3 = _format_kernels(8, 7, 3)
_split_float16_1, _join_float16_1 = _format_kernels(5, 10, 1)
_split_float16_2, _join_float16_2 = _format_kernels(5, 10, 2)
_split_float16_3, _join_float16_3 = _format_kernels(5, 10, 3)
_split_e5m2, _join_e5m2 = _format_kernels(5, 2, 2)
_split_e4m3, _join_e4m3 = _format_kernels(4, 3, 3)


@njit(nogil=True)
def _split(values, tops, geometry, anchors, rests, distances):
    """Take values apart."""
    if geometry.mantissa_bits == BFLOAT16:
        if geometry.kept_bits == 1:
            _split_bfloat16_1(values, tops, anchors, rests, distances)
        elif geometry.kept_bits == 2:
            _split_bfloat16_2(values, tops, anchors, rests, distances)
        else:
            _split_bfloat16_3(values, tops, anchors, rests, distances)
    elif geometry.mantissa_bits == FLOAT16:
        if geometry.kept_bits == 1:
            _split_float16_1(values, tops, anchors, rests, distances)
        elif geometry.kept_bits == 2:
            _split_float16_2(values, tops, anchors, rests, distances)
        else:
            _split_float16_3(values, tops, anchors, rests, distances)
    elif geometry.mantissa_bits == E5M2:
        _split_e5m2(values, tops, anchors, rests, distances)
    else:
        _split_e4m3(values, tops, anchors, rests, distances)


@njit(nogil=True)
def _join(values, tops, geometry, anchors):
    """Put values together from what the first stage has of them."""
    if geometry.mantissa_bits == BFLOAT16:
        if geometry.kept_bits == 1:
            _join_bfloat16_1(values, tops, anchors)
        elif geometry.kept_bits == 2:
            _join_bfloat16_2(values, tops, anchors)
        else:
            _join_bfloat16_3(values, tops, anchors)
    elif geometry.mantissa_bits == FLOAT16:
        if geometry.kept_bits == 1:
            _join_float16_1(values, tops, anchors)
        elif geometry.kept_bits == 2:
            _join_float16_2(values, tops, anchors)
        else:
            _join_float16_3(values, tops, anchors)
    elif geometry.mantissa_bits == E5M2:
        _join_e5m2(values, tops, anchors)
    else:
        _join_e4m3(values, tops, anchors)


def _bit_kernels(position):
    """Kernels that pack and unpack bit `position` of fields."""
    up, down, one = u8(7 - position), u8(position), u8(1)

    @njit(nogil=True)
    def pack(fields, plane):
        for s in range(8):
            source = fields[s * plane.size :][: plane.size]
            for j in range(source.size):
                plane[j] = u8(plane[j] >> one) | u8(u8(source[j] << up) & u8(128))

    @njit(nogil=True)
    def unpack(fields, plane):
        for s in range(8):
            target = fields[s * plane.size :][: plane.size]
            for j in range(target.size):
                target[j] |= u8(u8(u8(plane[j] >> u8(s)) & one) << down)

    return pack, unpack


_pack_bit_0, _unpack_bit_0 = _bit_kernels(0)
_pack_bit_4, _unpack_bit_4 = _bit_kernels(4)
_pack_bit_6, _unpack_bit_6 = _bit_kernels(6)


@njit(nogil=True)
def _pack_bits_4_and_5(fields, plane):
    for quarter in range(4):
        source = fields[quarter * plane.size :][: plane.size]
        for i in range(source.size):
            plane[i] = u8(plane[i] >> u8(2)) | u8(u8(source[i] << u8(2)) & u8(192))


@njit(nogil=True)
def _unpack_bits_4_and_5(fields, plane):
    for quarter in range(4):
        target = fields[quarter * plane.size :][: plane.size]
        for i in range(target.size):
            target[i] |= u8(u8(u8(plane[i] >> u8(2 * quarter)) & u8(3)) << u8(4))


@njit(nogil=True)
def _pack(fields, bits, tile, dense, four, two, one):
    """The low `bits` of `fields`, from four to seven, into planes at `four`, `two` and `one`."""
    size = fields.size // 8
    pack_four(fields, dense[four + tile * 4 * size :][: 4 * size])
    if bits & 2:
        _pack_bits_4_and_5(fields, dense[two + tile * 2 * size :][: 2 * size])
    if bits == 5:
        _pack_bit_4(fields, dense[one + tile * size :][:size])
    elif bits == 7:
        _pack_bit_6(fields, dense[one + tile * size :][:size])


@njit(nogil=True)
def _unpack(fields, bits, tile, dense, four, two, one):
    """The inverse of _pack."""
    size = fields.size // 8
    unpack_four(fields, dense[four + tile * 4 * size :][: 4 * size])
    if bits & 2:
        _unpack_bits_4_and_5(fields, dense[two + tile * 2 * size :][: 2 * size])
    if bits == 5:
        _unpack_bit_4(fields, dense[one + tile * size :][:size])
    elif bits == 7:
        _unpack_bit_6(fields, dense[one + tile * size :][:size])


@njit(nogil=True)
def _pack_rest(values, rests, geometry, tile, rest):
    """Write a tile's part of the second stage."""
    if geometry.rest_bits >= 8:
        copy(values, rest[geometry.rest8 + tile * values.size :][: values.size])
        if geometry.rest_bits == 9:
            _pack_bit_0(rests, rest[geometry.rest1 + tile * (values.size // 8) :][: values.size // 8])
    elif geometry.rest_bits:
        _pack(rests, geometry.rest_bits, tile, rest, geometry.rest4, geometry.rest2, geometry.rest1)


@njit(nogil=True)
def _replace_low(values, lows, mask):
    for j in range(values.size):
        values[j] = u16(values[j] & mask) | u16(lows[j])


@njit(nogil=True)
def _replace_ninth(values, ninths):
    for j in range(values.size):
        values[j] = u16(values[j] & u16(0xFEFF)) | u16(u16(ninths[j]) << u16(8))


@njit(nogil=True)
def _replace_low_bits(values, geometry, tile, rest, rests):
    """Replace the low mantissa bits of a staged tile; `rests` is scratch."""
    bits, size = geometry.rest_bits, values.size
    if bits < 8:
        _unpack(rests, bits, tile, rest, geometry.rest4, geometry.rest2, geometry.rest1)
        _replace_low(values, rests, u16(~((1 << bits) - 1)))
        return
    _replace_low(values, rest[geometry.rest8 + tile * size :][:size], u16(0xFF00))
    if bits == 9:
        rests[:] = u8(0)
        _unpack_bit_0(rests, rest[geometry.rest1 + tile * (size // 8) :][: size // 8])
        _replace_ninth(values, rests)


@njit(nogil=True)
def _put_escapes(values, tops, geometry, count, wide, records, extensions):
    """Give a staged tile's `count` escapes their exponents, which records count from the window's lower end."""
    size, shift = tops.size, geometry.mantissa_bits
    exponents = geometry.exponent_mask << shift
    for index in range(count):
        record = int64(records[2 * index]) | int64(records[2 * index + 1]) << 8
        position, far = record & (1 << geometry.position_bits) - 1, record >> geometry.position_bits
        if wide:
            far += int64(extensions[index]) << 16 - geometry.position_bits
        j = position >> 3
        place = (position & 7) * size + j
        exponent = int64(tops[j]) - geometry.window - far & geometry.exponent_mask
        values[place] = u16(int64(values[place]) & ~exponents | exponent << shift)


@njit(nogil=True)
def _read_anchors(values, tops, geometry, tile, dense, anchors):
    """Stage a tile's values as the first stage has them, and its columns' tops; `anchors` is scratch."""
    read_tops(geometry, tile, dense, tops)
    _unpack(anchors, geometry.anchor_bits, tile, dense, geometry.anchor4, geometry.anchor2, geometry.anchor1)
    _join(values, tops, geometry, anchors)


@njit(nogil=True)
def _add_rest(values, tops, geometry, tile, rest, records, extensions, rests):
    """Complete a staged tile; how many records and extensions it has. `rests` is scratch."""
    tally = rest[geometry.counts + 2 * tile :]
    count, wide = int64(tally[0]) | int64(tally[1] & u8(127)) << 8, tally[1] >= u8(128)
    if geometry.rest_bits:
        _replace_low_bits(values, geometry, tile, rest, rests)
    _put_escapes(values, tops, geometry, count, wide, records, extensions)
    return count, count if wide else 0


_GEOMETRY = types.NamedUniTuple(int64, len(CutGeometry._fields), CutGeometry)
_PAYLOAD = types.Array(u8, 1, "C", readonly=True)
_TILES = (u8[:, :, ::1], int64[::1], int64, int64, _GEOMETRY)
_ENCODE = types.UniTuple(int64, 2)(*_TILES, u8[::1], u8[::1], u16[::1], u8[::1])
_DECODE = void(*_TILES, _PAYLOAD)
_DECODE_EXACT = void(*_TILES, _PAYLOAD, _PAYLOAD, _PAYLOAD, _PAYLOAD)


def _entry_points(version):
    """The kernels that are called; `version`, of the file that they take functions from, they only close over."""

    @compiled(_ENCODE)
    def encode_tiles(pool, pages, first, last, geometry, dense, rest, records, extensions):
        """Write tiles `first` to `last` of both stages into `dense` and `rest` and list their escapes.

        The other arguments and the result are those of splitzip's encode_tiles.
        """
        segment = geometry.segment_rows * geometry.tile_width
        values, largest = np.empty(8 * segment, np.uint16), np.empty(segment, np.uint16)
        tops = np.empty(segment, np.uint8)
        distances, anchors = np.empty(8 * segment, np.uint8), np.empty(8 * segment, np.uint8)
        rests, marks = np.empty(8 * segment, np.uint8), np.zeros((segment + 7) // 8, np.uint64)
        num_records, num_extensions = 0, 0 & version
        for tile in range(first, last):
            if num_records + 8 * segment > records.size:
                return -1, -1
            whole = load_tile(pool, pages, geometry, tile, values)
            choose_tops(values, geometry, tile, dense, largest)
            read_tops(geometry, tile, dense, tops)
            if not whole:
                pad(values, tops, geometry, tile % geometry.tiles_per_page)
            _split(values, tops, geometry, anchors, rests, distances)
            _pack(anchors, geometry.anchor_bits, tile, dense, geometry.anchor4, geometry.anchor2, geometry.anchor1)
            _pack_rest(values, rests, geometry, tile, rest)
            left = records[num_records:], extensions[num_extensions:]
            count, extended = list_escapes(distances, geometry, tile, rest, marks, *left)
            num_records, num_extensions = num_records + count, num_extensions + extended
        return num_records, num_extensions

    @compiled(_DECODE)
    def decode_tiles(pool, pages, first, last, geometry, dense):
        """Write tiles `first` to `last` of a first stage into the pages."""
        segment = geometry.segment_rows * geometry.tile_width
        values, tops = np.empty(8 * segment, np.uint16), np.empty(segment, np.uint8)
        anchors = np.empty(8 * segment, np.uint8)
        for tile in range(first, last + (0 & version)):
            _read_anchors(values, tops, geometry, tile, dense, anchors)
            store_tile(pool, pages, geometry, tile, values)

    @compiled(_DECODE_EXACT)
    def decode_exact_tiles(pool, pages, first, last, geometry, dense, rest, records, extensions):
        """Write tiles `first` to `last` of both stages into the pages.

        Records, as bytes, and extensions begin with those of tile `first`; none may be stray.
        """
        segment = geometry.segment_rows * geometry.tile_width
        values, tops = np.empty(8 * segment, np.uint16), np.empty(segment, np.uint8)
        anchors, rests = np.empty(8 * segment, np.uint8), np.empty(8 * segment, np.uint8)
        next_record, next_extension = 0, 0 & version
        for tile in range(first, last):
            _read_anchors(values, tops, geometry, tile, dense, anchors)
            left = records[2 * next_record :], extensions[next_extension:]
            count, extended = _add_rest(values, tops, geometry, tile, rest, *left, rests)
            next_record, next_extension = next_record + count, next_extension + extended
            store_tile(pool, pages, geometry, tile, values)

    return encode_tiles, decode_tiles, decode_exact_tiles


encode_tiles, decode_tiles, decode_exact_tiles = _entry_points(version_of(cpu_kernels))
