"""Significands cut in two, put together and completed on a CPU: a tile at a time, so that all between stays in L1.

`fields` are uint16 [8 * J], one a value, segment after segment. Planes are those of README.md in `splitzip`; `bits`, of
a field, says which there are.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import numpy as np
from numba import int64, njit, types, void
from numba import uint8 as u8
from numba import uint16 as u16

from kvrail.codec.core.cpu_compile import compiled
from kvrail.codec.splitzip.one_stage.cpu_geometry import Geometry
from kvrail.codec.splitzip.tiles.cpu_kernels import load_tile, store_tile


@njit(nogil=True)
def _read_plane(source, width, shift, fields):
    """Add a tile's part of a plane of `width` bits to its fields, from bit `shift` on."""
    size, mask, up = fields.size // 8, u8((1 << width) - 1), u16(shift)
    for s in range(8):
        part, field, down = source[s % width * size :][:size], fields[s * size :][:size], u8(s // width * width)
        for j in range(size):
            field[j] |= u16(u16(u8(part[j] >> down) & mask) << up)


@njit(nogil=True)
def _write_plane(fields, width, shift, target):
    """Write bits `shift` to `shift + width` of a tile's fields as its part of a plane."""
    size, mask, down = fields.size // 8, u16((1 << width) - 1), u16(shift)
    target[: width * size] = u8(0)
    for s in range(8):
        field, part, up = fields[s * size :][:size], target[s % width * size :][:size], u8(s // width * width)
        for j in range(size):
            part[j] |= u8(u8(u16(field[j] >> down) & mask) << up)


@njit(nogil=True)
def _aligned(size):
    return (size + 15) // 16 * 16


@njit(nogil=True)
def _read(source, bits, tile, tiles, fields):
    """A tile's fields, from the planes of all tiles."""
    size, offset, shift, width = fields.size // 8, 0, 0, 8
    fields[:] = u16(0)
    while width:
        if bits & width:
            _read_plane(source[offset + tile * width * size :], width, shift, fields)
            offset, shift = offset + _aligned(tiles * width * size), shift + width
        width //= 2


@njit(nogil=True)
def _write(fields, bits, first, tile, tiles, target):
    """Write `bits` bits of a tile's fields, from bit `first` on, into the planes of all tiles."""
    size, offset, shift, width = fields.size // 8, 0, first, 8
    while width:
        if bits & width:
            _write_plane(fields, width, shift, target[offset + tile * width * size :])
            offset, shift = offset + _aligned(tiles * width * size), shift + width
        width //= 2


@njit(nogil=True)
def _raise_to_middles(fields, rest_bits):
    """Give fields without their low bits those of the middle."""
    up, middle = u16(rest_bits), u16(1 << rest_bits - 1)
    for j in range(fields.size):
        fields[j] = u16(fields[j] << up) | middle


@njit(nogil=True)
def _replace_low(values, fields, rest_bits):
    high = u16(~((1 << rest_bits) - 1))
    for j in range(values.size):
        values[j] = u16(values[j] & high) | fields[j]


_GEOMETRY = types.NamedUniTuple(int64, len(Geometry._fields), Geometry)
_READ = types.Array(u8, 1, "C", readonly=True)


@compiled(void(_READ, int64, int64, int64, int64, int64, int64, u8[::1], u8[::1]))
def cut_tiles(source, first, last, tiles, segment, field_bits, rest_bits, shown, rest):
    """Write the planes of tiles `first` to `last` of both stages.

    source: planes of all `tiles`, of `field_bits` a field; segment: J; shown: planes of the fields without their
    `rest_bits` low bits, and rest: of these, both of all tiles.
    """
    fields = np.empty(8 * segment, np.uint16)
    for tile in range(first, last):
        _read(source, field_bits, tile, tiles, fields)
        _write(fields, rest_bits, 0, tile, tiles, rest)
        _write(fields, field_bits - rest_bits, rest_bits, tile, tiles, shown)


@compiled(void(_READ, int64, int64, int64, int64, int64, int64, u8[::1]))
def join_tiles(shown, first, last, tiles, segment, field_bits, rest_bits, target):
    """Write the planes of tiles `first` to `last` of whole fields, whose low bits are those of the middle."""
    fields = np.empty(8 * segment, np.uint16)
    for tile in range(first, last):
        _read(shown, field_bits - rest_bits, tile, tiles, fields)
        if rest_bits:
            _raise_to_middles(fields, rest_bits)
        _write(fields, field_bits, 0, tile, tiles, target)


@compiled(void(u8[:, :, ::1], int64[::1], int64, int64, int64, _GEOMETRY, int64, _READ))
def complete_tiles(pool, pages, first, last, tiles, geometry, rest_bits, rest):
    """Replace the `rest_bits` low bits of the values of tiles `first` to `last` in their pages."""
    segment = geometry.segment_rows * geometry.tile_width
    values, fields = np.empty(8 * segment, np.uint16), np.empty(8 * segment, np.uint16)
    for tile in range(first, last):
        load_tile(pool, pages, geometry, tile, values)
        _read(rest, rest_bits, tile, tiles, fields)
        _replace_low(values, fields, rest_bits)
        store_tile(pool, pages, geometry, tile, values)
