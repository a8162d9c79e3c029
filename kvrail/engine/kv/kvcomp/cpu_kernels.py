"""Closing and opening of pages on a CPU, for numba's compiled code: bit for bit what tests/reference does.

Arrays are flat. `order` and `rows` are `pages.orders` of a tile's kind; `codes` and `tables` are `form.writing_tables`
and `form.reading_tables`.
"""

# What numba compiles has no types that mypy can follow.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, misc"

import numpy as np
from numba import float32, int32, int64, njit, types, uint8, uint16, void

from kvrail.codec.core.cpu_compile import compiled_when_needed
from kvrail.engine.kv.fixed import form as fixed_form
from kvrail.engine.kv.fixed.cpu_kernels import OF_SCALE, SHRUNK, nearest, put, put_tile, read_steps, widen
from kvrail.engine.kv.kvcomp import form
from kvrail.engine.kv.lossless.cpu_kernels import tiles_of
from kvrail.engine.kv.lossless.form import TOKENS

_NO_SCALE = fixed_form.NO_SCALE
_LEAST_SCALE, _LEAST_OFFSET = np.float32(fixed_form.LEAST_SCALE), np.float32(fixed_form.LEAST_OFFSET)
_SCALE_SHIFT, _OFFSET_SHIFT = fixed_form.SCALE_SHIFT, fixed_form.OFFSET_SHIFT
_UNIT, _SPREAD, _STREAMS, _WARPS, _LANES, _HEAD = (
    form.UNIT, form.SPREAD, form.STREAMS, form.WARPS, form.LANES_BYTES, form.HEAD_BYTES
)  # fmt: skip
_WINDOW = (1 << form.MAX_BITS) - 1
_SYMBOLS = 32
"""Entries of a table of `codes`."""


@njit(nogil=True)
def _quantise(tile, dim, keys, share, top, order, rows, scales, offsets, symbols):
    """Scales and offsets of rows, by row, and symbols, by stream, of a tile."""
    words = scales.view(np.uint32)
    for i in range(len(rows)):
        low = high = tile[i] if keys else tile[i * dim]
        for j in range(TOKENS if keys else dim):
            value = tile[j * dim + i] if keys else tile[i * dim + j]
            low, high = min(low, value), max(high, value)
        scales[i] = max((high - low) * share, _LEAST_SCALE)
        words[i] = int64(words[i]) & 0xFFFF0000
        offsets[i] = np.float32(0) if abs(low) <= scales[i] * _LEAST_OFFSET else low
    for number in range(TOKENS * dim):
        place = order[number]
        row = place % dim if keys else place // dim
        symbols[number] = np.rint(min(max((tile[place] - offsets[row]) / scales[row], np.float32(0)), top))


@njit(nogil=True)
def _measure(symbols, count, codes, table, lengths):
    """Units of each of a tile's streams of `count` symbols; returns those of all, or -1 where they cannot be said."""
    least = most = total = 0
    for stream in range(_STREAMS):
        bits = 0
        for number in range(stream * count, (stream + 1) * count):
            bits += int64(codes[table + symbols[number]]) >> 8
        units = (bits + _UNIT - 1) // _UNIT
        lengths[stream] = units
        total += units
        least = units if stream == 0 else min(least, units)
        most = max(most, units)
    return total if most - least <= _SPREAD else -1


@njit(nogil=True)
def _code_values(source, at, row, dim, shares, tops, codes, order, rows, tile, scratch):
    """Quantise a tile of values into `scratch`; which code is the shorter one, its units, and whether it is refused."""
    scales, offsets, symbols, lengths = scratch
    count = TOKENS * dim // _STREAMS
    refused = widen(source, at, row, dim, tile)
    _quantise(tile, dim, False, shares[2], tops[2], order, rows, scales, offsets, symbols)
    even = _measure(symbols, count, codes, 3 * _SYMBOLS, lengths)
    units = _measure(symbols, count, codes, 2 * _SYMBOLS, lengths)
    if 0 <= units <= even:
        return 0, units, refused
    return 1, _measure(symbols, count, codes, 3 * _SYMBOLS, lengths), refused


@njit(nogil=True)
def _code_keys(source, at, row, dim, shares, tops, codes, order, rows, tile, scratch, room):
    """Quantise a tile of keys into `scratch`, by the first code if `room` units hold it: see `_code_values`."""
    scales, offsets, symbols, lengths = scratch
    count = TOKENS * dim // _STREAMS
    refused = widen(source, at, row, dim, tile)
    _quantise(tile, dim, True, shares[0], tops[0], order, rows, scales, offsets, symbols)
    units = _measure(symbols, count, codes, 0, lengths)
    if 0 <= units <= room:
        return 0, units, refused
    _quantise(tile, dim, True, shares[1], tops[1], order, rows, scales, offsets, symbols)
    return 1, _measure(symbols, count, codes, _SYMBOLS, lengths), refused


@njit(nogil=True)
def _write_part(out, at, number, begin, refused, rows, scales, offsets, lengths):
    """Write the part at byte `at` of a tile whose streams begin at unit `begin` of it."""
    for i in range(len(rows)):
        place, row = at + 4 * i - 2 * (i % 4), rows[i]
        scale, offset = int64(scales.view(np.uint32)[row]) >> 16, int64(offsets.view(np.uint32)[row]) >> 16
        put(out, place, _NO_SCALE if refused else scale + _SCALE_SHIFT)
        put(out, place + 8, offset - _OFFSET_SHIFT if offset else 0)
    lanes, base = at + 4 * len(rows), lengths.min()
    for i in range(_LANES):
        out[lanes + i] = (lengths[2 * i] - base) | (lengths[2 * i + 1] - base) << 4
    put(out, lanes + _LANES, base)
    put(out, lanes + _LANES + 2, number)
    for warp in range(_WARPS):
        put(out, lanes + _LANES + 4 + 2 * warp, begin)
        for stream in range(warp * _STREAMS // _WARPS, (warp + 1) * _STREAMS // _WARPS):
            begin += lengths[stream]


@njit(nogil=True)
def _write_streams(out, at, unit, symbols, count, codes, table, lengths):
    """Write a tile's streams from unit `unit` behind byte `at` on; what lies there is zeros."""
    for stream in range(_STREAMS):
        bit = unit * _UNIT
        for number in range(stream * count, (stream + 1) * count):
            code = int64(codes[table + symbols[number]])
            held = (code & 0xFF) << (bit & 7)
            out[at + (bit >> 3)] |= held & 0xFF
            out[at + (bit >> 3) + 1] |= held >> 8
            bit += code >> 8
        unit += lengths[stream]


@njit(nogil=True)
def _write_tile(out, at, begin, found, dim, codes, table, rows, scratch):
    """Write the part at byte `at`, and its streams from unit `begin` of it on. found: what `_code_keys` says.

    table: where the codes of the kind begin.
    """
    number, _, refused = found
    scales, offsets, symbols, lengths = scratch
    _write_part(out, at, number, begin, refused, rows, scales, offsets, lengths)
    count = TOKENS * dim // _STREAMS
    _write_streams(out, at, begin, symbols, count, codes, table + number * _SYMBOLS, lengths)


@njit(nogil=True)
def _scratch(dim, rows):
    """Scales and offsets of rows, symbols, and lengths of streams of a tile."""
    steps = np.empty(rows, np.float32), np.empty(rows, np.float32)
    return steps[0], steps[1], np.empty(TOKENS * dim, np.uint8), np.empty(_STREAMS, np.int64)


@njit(nogil=True)
def open_tile(closed, at, dim, keys, tables, order, rows, out):
    """out[64 * dim] = the tile whose part begins at byte `at` of `closed`, in float32, a token a row.

    tables: of both kinds.
    """
    scales, offsets = np.empty(len(rows), np.float32), np.empty(len(rows), np.float32)
    read_steps(closed, at, rows, scales, offsets)
    scales *= OF_SCALE
    offsets *= SHRUNK
    lanes, count = at + 4 * len(rows), TOKENS * dim // _STREAMS
    head = lanes + _LANES
    base = int64(closed[head]) | int64(closed[head + 1]) << 8
    table = ((0 if keys else 2) + int64(closed[head + 2])) * 2 * (_WINDOW + 1)
    unit = int64(closed[head + 4]) | int64(closed[head + 5]) << 8
    both = np.empty(1, np.float64)
    parts = both.view(np.uint64)
    for stream in range(_STREAMS):
        bit = unit * _UNIT
        for number in range(stream * count, (stream + 1) * count):
            byte = at + (bit >> 3)
            pair = int64(closed[byte]) | int64(closed[byte + 1]) << 8
            entry = table + 2 * (pair >> (bit & 7) & _WINDOW)
            bit += int64(tables[entry])
            place = order[number]
            row = place % dim if keys else place // dim
            both[0] = np.float64(tables[entry + 1]) * np.float64(scales[row]) + np.float64(offsets[row])
            out[place] = nearest(both, parts)
        unit += base + (int64(closed[lanes + stream // 2]) >> (4 * (stream % 2)) & 15)


_data, _bits, _ids, _orders = (
    types.Array(kind, 1, "C") for kind in (uint8, uint16, int64, int32)
)  # as every argument below


@compiled_when_needed(
    void(
        _bits, _bits, _ids, _data, _ids, int64, int64, int64, int64, _orders, _orders, _orders, _orders,
        types.Array(float32, 1, "C"), types.Array(float32, 1, "C"), _bits, int64, int64,
    )
)  # fmt: skip
def close_pairs(
    keys, values, sources, closed, targets, page_size, kv_heads, key_dim, value_dim,
    key_order, key_rows, value_order, value_rows, shares, tops, codes, pair_bytes, room,
):  # fmt: skip
    """Close plain pages `sources` of a layer into closed pages `targets`.

    keys, values: bits of bfloat16 [pages, page_size, kv_heads, dim]; closed: a layer's closed pages. shares, tops:
    of keys' two codes, then of values. room: units of streams that a pair has room for.
    """
    tile = np.empty(TOKENS * max(key_dim, value_dim), np.float32)
    of_keys, of_values = _scratch(key_dim, key_dim), _scratch(value_dim, TOKENS)
    key_bytes = 4 * key_dim + _LANES + _HEAD
    begin = 2 * (key_bytes + 4 * TOKENS + _LANES + _HEAD)
    for at, to in tiles_of(sources, targets, page_size, kv_heads, 1, 0, pair_bytes):
        closed[to : to + pair_bytes] = 0
        second = _code_values(
            values, at * value_dim, kv_heads * value_dim, value_dim, shares, tops, codes, value_order,
            value_rows, tile, of_values,
        )  # fmt: skip
        first = _code_keys(
            keys, at * key_dim, kv_heads * key_dim, key_dim, shares, tops, codes, key_order, key_rows,
            tile, of_keys, room - second[1],
        )  # fmt: skip
        _write_tile(closed, to, begin, first, key_dim, codes, 0, key_rows, of_keys)
        _write_tile(
            closed, to + key_bytes, begin + first[1] - 2 * key_bytes, second, value_dim, codes,
            2 * _SYMBOLS, value_rows, of_values,
        )  # fmt: skip


@compiled_when_needed(void(_data, _ids, _bits, _ids, int64, int64, int64, int64, int64, _orders, _orders, int64, _data))
def open_tiles(
    closed, sources, target, targets, page_size, kv_heads, dim, tile_begin, pair_bytes, order, rows, keys, tables
):
    """Open the keys, or the values, of closed pages `sources` into plain pages `targets`: see `close_pairs`.

    tile_begin: where their part begins in a pair.
    """
    tile = np.empty(TOKENS * dim, np.float32)
    for to, at in tiles_of(targets, sources, page_size, kv_heads, dim, tile_begin, pair_bytes):
        open_tile(closed, at, dim, keys, tables, order, rows, tile)
        put_tile(tile, dim, target, to, kv_heads * dim)
