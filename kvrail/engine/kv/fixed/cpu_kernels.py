"""Closing and opening of pages on a CPU, for numba's compiled code: bit for bit what tests/reference does.

Arrays are flat. `order` and `rows` are `form.code_places` and `form.row_places` of the tile's kind.
"""

# What numba compiles has no types that mypy can follow.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, misc"

import numpy as np
from numba import int32, int64, njit, types, uint8, uint16, void

from kvrail.codec.core.cpu_compile import compiled_when_needed
from kvrail.engine.kv.fixed import form
from kvrail.engine.kv.lossless.cpu_kernels import tiles_of, word_at
from kvrail.engine.kv.lossless.form import TOKENS

_REFUSED, _NO_SCALE = form.REFUSED, form.NO_SCALE
_LEAST_SCALE, _LEAST_OFFSET = np.float32(form.LEAST_SCALE), np.float32(form.LEAST_OFFSET)
_SCALE_SHIFT, _OFFSET_SHIFT, _HIGH_SHIFT = form.SCALE_SHIFT, form.OFFSET_SHIFT, form.HIGH_SHIFT
_SHARE_OF_4, _SHARE_OF_8 = np.float32(form.share(4)), np.float32(form.share(8))
SHRUNK = np.float32(form.SHRUNK)
OF_SCALE, _OF_HIGH_SCALE = np.float32(form.SHRUNK * 2.0**-133), np.float32(form.SHRUNK * 2.0**-129)
"""What a stored scale is multiplied by."""
_DROPPED = 45
"""Bits of a float64's mantissa that bfloat16 has not."""


@njit(nogil=True)
def put(out, at, bits):
    """Write 16 bits at byte `at`."""
    out[at] = bits & 0xFF
    out[at + 1] = bits >> 8


@njit(nogil=True)
def read_steps(closed, begin, rows, scales, offsets):
    """scales, offsets = the bits of steps that begin at byte `begin`, as float32."""
    for i in range(len(rows)):
        place, row = begin + 4 * i - 2 * (i % 4), rows[i]
        scales.view(np.uint32)[row] = int64(closed[place]) << 16 | int64(closed[place + 1]) << 24
        offsets.view(np.uint32)[row] = int64(closed[place + 8]) << 16 | int64(closed[place + 9]) << 24


@njit(nogil=True)
def nearest(both, parts):
    """The bfloat16 nearest to both[0], a float64, as float32; parts: its view as uint64."""
    odd = parts[0] >> np.uint64(_DROPPED) & np.uint64(1)
    parts[0] = (parts[0] + np.uint64((1 << (_DROPPED - 1)) - 1) + odd) >> np.uint64(_DROPPED) << np.uint64(_DROPPED)
    return np.float32(both[0])


@njit(nogil=True)
def widen(source, at, row, dim, tile):
    """Write a tile, `row` values from token to token, as float32 into `tile`; whether it is refused."""
    words, refused = tile.view(np.uint32), False
    for token in range(TOKENS):
        for channel in range(dim):
            value = int64(source[at + token * row + channel])
            refused |= (value & 0x7FFF) >= _REFUSED
            words[token * dim + channel] = value << 16
    if refused:
        tile[: TOKENS * dim] = 0
    return refused


@njit(nogil=True)
def put_tile(tile, dim, out, at, row):
    """Write a tile of bfloat16, as float32, from value `at` of `out` on; row: values from token to token."""
    words = tile.view(np.uint32)
    for place in range(TOKENS * dim):
        out[at + place // dim * row + place % dim] = words[place] >> np.uint32(16)


@njit(nogil=True)
def _step(low, high, bits, words, floats):
    """Scale and offset, float32, of a row by its smallest and largest value. words, floats: views of one buffer."""
    floats[0] = max((high - low) * (_SHARE_OF_4 if bits == 4 else _SHARE_OF_8), _LEAST_SCALE)
    words[0] = (int64(words[0]) + 0xFFFF) & 0xFFFF0000
    return floats[0], np.float32(0) if abs(low) <= floats[0] * _LEAST_OFFSET else low


@njit(nogil=True)
def _high(row, bits):
    """Whether a mask leaves a row's codes in bits 4 to 7."""
    return bits == 4 and row % 16 >= 8


@njit(nogil=True)
def _close_tile(source, at, row, dim, keys, bits, order, rows, out, to, tile, scales, offsets):
    """Close the tile of `source` that begins at `at` into `out` from byte `to` on.

    row: values from token to token. tile: float32 [64 * dim]; scales, offsets: float32 [rows]; all scratch.
    """
    count, most, step = len(rows), np.float32((1 << bits) - 1), 32 // bits
    refused = widen(source, at, row, dim, tile)
    both = np.empty(1, np.float32)
    for i in range(count):
        low = high = tile[i] if keys else tile[i * dim]
        for j in range(TOKENS if keys else dim):
            value = tile[j * dim + i] if keys else tile[i * dim + j]
            low, high = min(low, value), max(high, value)
        scales[i], offsets[i] = _step(low, high, bits, both.view(np.uint32), both)
    begin = to + TOKENS * dim * bits // 8
    for i in range(count):
        place, row_of = begin + 4 * i - 2 * (i % 4), rows[i]
        scale, offset = int64(scales.view(np.uint32)[row_of]) >> 16, int64(offsets.view(np.uint32)[row_of]) >> 16
        scale += _SCALE_SHIFT - (_HIGH_SHIFT if _high(row_of, bits) else 0)
        put(out, place, _NO_SCALE if refused else scale)
        put(out, place + 8, offset - _OFFSET_SHIFT if offset else 0)
    for number in range(TOKENS * dim // step):
        word = 0
        for i in range(step):
            place = order[number * step + i]
            row_of = place % dim if keys else place // dim
            code = (tile[place] - offsets[row_of]) / scales[row_of]
            code = np.rint(min(max(code, np.float32(0)), most))
            word |= int64(code) << (bits * (i // 2) + 16 * (i % 2))
        for byte in range(4):
            out[to + 4 * number + byte] = (word >> (8 * byte)) & 0xFF


@njit(nogil=True)
def open_tile(closed, at, dim, keys, bits, order, rows, out):
    """out[64 * dim] = the tile at byte `at` of `closed`, in float32, a token a row."""
    count, mask, step = len(rows), (1 << bits) - 1, 32 // bits
    scales, offsets, begin = np.empty(count, np.float32), np.empty(count, np.float32), at + TOKENS * dim * bits // 8
    read_steps(closed, begin, rows, scales, offsets)
    for row in range(count):
        scales[row] *= _OF_HIGH_SCALE if _high(row, bits) else OF_SCALE
        offsets[row] *= SHRUNK
    both = np.empty(1, np.float64)
    parts = both.view(np.uint64)
    for number in range(TOKENS * dim // step):
        word = int64(word_at(closed, at + 4 * number))
        for i in range(step):
            place = order[number * step + i]
            row = place % dim if keys else place // dim
            code = (word >> (bits * (i // 2) + 16 * (i % 2))) & mask
            both[0] = np.float64(code) * np.float64(scales[row]) + np.float64(offsets[row])
            out[place] = nearest(both, parts)


_data, _bits, _ids, _orders = (
    types.Array(kind, 1, "C") for kind in (uint8, uint16, int64, int32)
)  # as every argument below
_arguments = (int64, int64, int64, int64, int64, _orders, _orders, int64, int64)


@compiled_when_needed(void(_bits, _ids, _data, _ids, *_arguments))
def close_tiles(
    source, sources, closed, targets, page_size, kv_heads, dim, tile_begin, pair_bytes, order, rows, keys, bits,
):  # fmt: skip
    """Close the keys, or the values, of plain pages `sources` into closed pages `targets`.

    source: bits of bfloat16 [pages, page_size, kv_heads, dim]; closed: a layer's closed pages. tile_begin: where
    the first tile begins in a page; pair_bytes: of both tiles of a head and block.
    """
    tile = np.empty(TOKENS * dim, np.float32)
    scales, offsets = np.empty(len(rows), np.float32), np.empty(len(rows), np.float32)
    for at, to in tiles_of(sources, targets, page_size, kv_heads, dim, tile_begin, pair_bytes):
        _close_tile(source, at, kv_heads * dim, dim, keys, bits, order, rows, closed, to, tile, scales, offsets)


@compiled_when_needed(void(_data, _ids, _bits, _ids, *_arguments))
def open_tiles(
    closed, sources, target, targets, page_size, kv_heads, dim, tile_begin, pair_bytes, order, rows, keys, bits,
):  # fmt: skip
    """Open the keys, or the values, of closed pages `sources` into plain pages `targets`: see `close_tiles`."""
    tile = np.empty(TOKENS * dim, np.float32)
    for to, at in tiles_of(targets, sources, page_size, kv_heads, dim, tile_begin, pair_bytes):
        open_tile(closed, at, dim, keys, bits, order, rows, tile)
        put_tile(tile, dim, target, to, kv_heads * dim)
