"""Closing and opening of values on a CPU, for numba's compiled code: bit for bit what tests/reference does.

Arrays are flat. `order` and `channels` are `form.code_places` and `form.channel_places`.
"""

# What numba compiles has no types that mypy can follow.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, misc"

import numpy as np
from numba import int32, int64, njit, types, uint8, uint16, void

from kvrail.codec.core.cpu_compile import compiled_when_needed
from kvrail.engine.kv.fixed import form as fixed_form
from kvrail.engine.kv.fixed.cpu_kernels import nearest, put_tile
from kvrail.engine.kv.lossless.cpu_kernels import tiles_of, word_at
from kvrail.engine.kv.lossless.form import TOKENS
from kvrail.engine.kv.rotated import form

_REFUSED = fixed_form.REFUSED
_BIAS, _BLOCK, _LARGEST, _MOST_MEAN, _MOST_SHIFT = (
    form.BIAS, form.BLOCK, np.float32(form.LARGEST), form.MOST_MEAN, form.MOST_SHIFT
)  # fmt: skip
_FRACTION, _LEAST_MAGNITUDE, _UNIT = form.FRACTION, form.LEAST_MAGNITUDE, form.UNIT
_LEAST_CODE, _MOST_CODE, _REFUSED_CODE = form.LEAST_CODE, form.MOST_CODE, form.REFUSED_CODE


@njit(nogil=True)
def _power(exponent):
    """2^exponent, as float32 has it."""
    return np.float32(2.0**exponent)


@njit(nogil=True)
def _sign(channel):
    """Whether a channel changes its sign before the transform."""
    bits = channel & (channel >> 1) & 21
    return (bits ^ bits >> 2 ^ bits >> 4) & 1


@njit(nogil=True)
def _transform(numbers, at):
    """The Walsh-Hadamard transform of a block, in place."""
    half = 1
    while half < _BLOCK:
        for first in range(at, at + _BLOCK, 2 * half):
            for i in range(first, first + half):
                numbers[i], numbers[i + half] = numbers[i] + numbers[i + half], numbers[i] - numbers[i + half]
        half *= 2


@njit(nogil=True)
def _exponent(number, words, floats):
    """The exponent of a number as float32; that of 0 is -127. words, floats: views of one buffer."""
    floats[0] = number
    return (int64(words[0]) >> 23) - 127


@njit(nogil=True)
def _read(source, at, row, dim, fixed):
    """fixed[64 * dim] = a tile as integers; the exponent of their last bit, and whether the tile is refused."""
    largest = 0
    for token in range(TOKENS):
        for channel in range(dim):
            largest = max(largest, int64(source[at + token * row + channel]) & 0x7FFF)
    refused = largest >= _REFUSED
    magnitude = max((0 if refused else largest >> 7) - 127, _LEAST_MAGNITUDE)
    both, times = np.empty(1, np.float32), _power(_FRACTION - magnitude)
    words = both.view(np.uint32)
    for token in range(TOKENS):
        for channel in range(dim):
            words[0] = 0 if refused else int64(source[at + token * row + channel]) << 16
            fixed[token * dim + channel] = int64(np.rint(both[0] * times))
    return magnitude - _FRACTION, refused


@njit(nogil=True)
def _channels(fixed, dim, units, means):
    """Each channel's unit as a power of two, and its mean in halves of it; returns the largest unit."""
    both = np.empty(1, np.float32)
    words, largest = both.view(np.uint32), 0
    for channel in range(dim):
        total = squares = 0
        for token in range(TOKENS):
            value = fixed[token * dim + channel]
            total += value
            squares += value * value
        spread = _exponent(TOKENS * squares - total * total, words, both)
        units[channel] = max((spread - 11) >> 1, _exponent(abs(total), words, both) - 8, 0)
        means[channel] = total
        largest = max(largest, units[channel])
    for channel in range(dim):
        unit = units[channel] = max(units[channel], largest - _MOST_SHIFT)
        mean = (means[channel] + (16 << unit)) >> (5 + unit)
        means[channel] = min(max(mean, -_MOST_MEAN), _MOST_MEAN)
    return largest


@njit(nogil=True)
def _rotate(fixed, at, dim, units, means, z):
    """z[dim] = a token's rotated values; returns its norm, 64 times."""
    norm = 0
    for channel in range(dim):
        unit = units[channel]
        y = np.float32(2 * fixed[at + channel] - (means[channel] << unit)) * _power(_UNIT - 1 - unit)
        whole = int64(np.rint(min(max(y, -_LARGEST), _LARGEST)))
        norm += whole * whole
        z[channel] = -whole if _sign(channel % _BLOCK) else whole
    for block in range(0, dim, _BLOCK):
        _transform(z, block)
    return _BLOCK * norm


@njit(nogil=True)
def _code(z, dim, norm, codes, at):
    """codes[at : at + dim] = those of a token; returns its scale."""
    product = squares = 0
    for channel in range(dim):
        outer = 1 if dim * z[channel] * z[channel] > norm else 0
        product += abs(z[channel]) * (1 + 2 * outer)
        squares += 1 + 8 * outer
        codes[at + channel] = 1 - outer if z[channel] < 0 else 2 + outer
    product = max(product, 1)
    both = np.empty(1, np.float32)
    both[0] = min(np.float32(norm) / np.float32(product), np.float32(2 * product) / np.float32(squares))
    bits = int64(both.view(np.uint32)[0])
    bits = (bits + 0x7FFFF + (bits >> 20 & 1)) >> 20
    return min(max(bits - _LEAST_CODE, 0), _MOST_CODE)


@njit(nogil=True)
def _close_tile(source, at, row, dim, order, channels, out, to, fixed, codes):
    """Close the tile of `source` that begins at `at` into `out` from byte `to` on.

    row: values from token to token. fixed: int64 [64 * dim]; codes: uint8 [64 * dim]; both scratch.
    """
    units, means, z = np.empty(dim, np.int64), np.empty(dim, np.int64), np.empty(dim, np.int64)
    last, refused = _read(source, at, row, dim, fixed)
    largest = _channels(fixed, dim, units, means)
    begin = to + TOKENS * dim // 4
    for i in range(dim):
        out[begin + i] = (means[channels[i]] & 31) | (largest - units[channels[i]]) << 5
    exponent = largest + last + _BIAS
    for token in range(TOKENS):
        norm = _rotate(fixed, token * dim, dim, units, means, z)
        scale = _code(z, dim, norm, codes, token * dim) | (exponent >> (token % 8) & 1) << 7
        out[begin + dim + token] = 255 if refused else scale
    for number in range(TOKENS * dim // 4):
        byte = 0
        for i in range(4):
            byte |= int64(codes[order[4 * number + i]]) << (2 * i)
        out[to + number] = byte


@njit(nogil=True)
def open_tile(closed, at, dim, order, channels, out):
    """out[64 * dim] = the tile at byte `at` of `closed`, in float32, a token a row."""
    levels, means = np.empty(TOKENS * dim, np.int64), at + TOKENS * dim // 4
    for number in range(TOKENS * dim // 16):
        word = int64(word_at(closed, at + 4 * number))
        for i in range(16):
            levels[order[16 * number + i]] = 2 * (word >> (2 * i) & 3) - 3
    exponent = -_BIAS
    for bit in range(8):
        exponent += (int64(closed[means + dim + bit]) >> 7) << bit
    units, offsets = np.empty(dim, np.float64), np.empty(dim, np.float64)
    for i in range(dim):
        channel, byte = channels[i], int64(closed[means + i])
        units[channel] = 2.0 ** (exponent - (byte >> 5))
        offsets[channel] = np.float64(((byte & 31) ^ 16) - 16) / 2
    both, scales = np.empty(1, np.float64), np.zeros(1, np.float32)
    parts = both.view(np.uint64)
    for token in range(TOKENS):
        code = int64(closed[means + dim + token]) & 127
        scales.view(np.uint32)[0] = (code + _LEAST_CODE) << 20 if code else 0
        scale = np.nan if code == _REFUSED_CODE else np.float64(scales[0]) * 2.0**-13
        for block in range(token * dim, (token + 1) * dim, _BLOCK):
            _transform(levels, block)
        for channel in range(dim):
            place = token * dim + channel
            total = -levels[place] if _sign(channel % _BLOCK) else levels[place]
            both[0] = (np.float64(total) * scale + offsets[channel]) * units[channel]
            out[place] = nearest(both, parts)


_data, _bits, _ids, _order = (types.Array(kind, 1, "C") for kind in (uint8, uint16, int64, int32))


@compiled_when_needed(void(_bits, _ids, _data, _ids, int64, int64, int64, int64, int64, _order, _order))
def close_tiles(source, sources, closed, targets, page_size, kv_heads, dim, tile_begin, pair_bytes, order, channels):
    """Close the values of plain pages `sources` into closed pages `targets`: see `fixed.cpu_kernels`."""
    fixed, codes = np.empty(TOKENS * dim, np.int64), np.empty(TOKENS * dim, np.uint8)
    for at, to in tiles_of(sources, targets, page_size, kv_heads, dim, tile_begin, pair_bytes):
        _close_tile(source, at, kv_heads * dim, dim, order, channels, closed, to, fixed, codes)


@compiled_when_needed(void(_data, _ids, _bits, _ids, int64, int64, int64, int64, int64, _order, _order))
def open_tiles(closed, sources, target, targets, page_size, kv_heads, dim, tile_begin, pair_bytes, order, channels):
    """Open the values of closed pages `sources` into plain pages `targets`: see `close_tiles`."""
    tile = np.empty(TOKENS * dim, np.float32)
    for to, at in tiles_of(targets, sources, page_size, kv_heads, dim, tile_begin, pair_bytes):
        open_tile(closed, at, dim, order, channels, tile)
        put_tile(tile, dim, target, to, kv_heads * dim)
