"""Closing and opening of pages on a CPU, for numba's compiled code: bit for bit what tests/reference does.

Arrays are flat. `order` and `channels` are `form.places` and `form.base_places` of the tile's kind.
"""

# What numba compiles has no types that mypy can follow.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, misc"

import numpy as np
from numba import int32, int64, njit, types, uint8, uint16, void

from kvrail.codec.core.cpu_compile import compiled_when_needed
from kvrail.engine.kv.lossless.form import (
    BASE_STEP,
    BASES_TRIED,
    CHUNK,
    CODES,
    GROUPS,
    LANES,
    NO_UNIT,
    RAW,
    SLOTS,
    SOME,
    SPECIAL,
    TOKENS,
    WARPS,
)

_STEP = WARPS * LANES * CHUNK
"""Low bytes from one chunk to the next."""
_OF_WARP = LANES * CHUNK
_MASK = np.uint32(0x87878787)
_four, _twenty_eight = np.uint32(4), np.uint32(28)


@njit(nogil=True)
def _base(source, at, row, channel):
    """The base of one channel of a tile whose values begin at `at`, with `row` values from token to token."""
    top = 0
    for token in range(TOKENS):
        upper = (int64(source[at + token * row + channel]) >> 8) & 0x7F
        if upper < SPECIAL:
            top = max(top, upper)
    best, fewest = 0, TOKENS + 1
    for lower in range(BASES_TRIED):
        base, escapes = max(top - (CODES - 1) - BASE_STEP * lower, 0), 0
        for token in range(TOKENS):
            code = ((int64(source[at + token * row + channel]) >> 8) & 0x7F) - base
            if code < 0 or code >= CODES:
                escapes += 1
        if escapes < fewest:
            best, fewest = base, escapes
    return best


@njit(nogil=True)
def _put_word(out, at, word):
    for byte in range(4):
        out[at + byte] = (word >> (8 * byte)) & 0xFF


@njit(nogil=True)
def word_at(data, at):
    """The little-endian word at byte `at`."""
    return (
        np.uint32(data[at])
        | np.uint32(data[at + 1]) << np.uint32(8)
        | np.uint32(data[at + 2]) << np.uint32(16)
        | np.uint32(data[at + 3]) << np.uint32(24)
    )


@njit(nogil=True)
def _put_nibble(out, byte, value, code, sign):
    """Add a nibble to the word at `byte`. value: which of the sixteen of its chunk."""
    if value % 8 < 4:
        out[byte + value % 4] |= code | sign << 7
    else:
        out[byte + value % 4] |= sign << 3
        out[byte + (value + 3) % 4] |= code << 4


@njit(nogil=True)
def _close_tile(source, at, row, dim, order, channels, out, to, bases):
    """Close the tile of `source` that begins at `at` into `out` from byte `to` on. bases: room for uint8 [dim].

    A raw tile has no spare unit yet.
    """
    values, escapes = TOKENS * dim, to + TOKENS * dim // 2 * 3 + dim
    for channel in range(dim):
        bases[channel] = _base(source, at, row, channel)
    for i in range(dim):
        out[to + values // 2 * 3 + i] = bases[channels[i]]
    out[to + values : to + values // 2 * 3] = 0
    out[escapes : escapes + 4 * GROUPS * SLOTS] = 0
    used = np.zeros(GROUPS, np.int64)
    raw = False
    for place in range(values):
        token, channel = order[place] // dim, order[place] % dim
        bits = int64(source[at + token * row + channel])
        out[to + place] = bits & 0xFF
        chunk, warp, inside = place // _STEP, place // _OF_WARP % WARPS, place % _OF_WARP
        high, base = bits >> 8, int64(bases[channel])
        code, sign = (high & 0x7F) - base, high >> 7
        if code < 0 or code >= CODES:
            half = chunk // (dim // 64)
            group = WARPS * half + warp
            if used[group] == SLOTS:
                raw = True
            else:
                word = (high ^ base) << 24 | (chunk - half * (dim // 64)) * _OF_WARP + inside
                _put_word(out, escapes + 4 * (SLOTS * group + used[group]), word)
                used[group] += 1
            code, sign = 0, 0
        lane, value = inside // CHUNK, inside % CHUNK
        word_number = ((chunk // 2 * WARPS + warp) * LANES + lane) * 4 + chunk % 2 * 2 + value // 8
        byte = to + values + 4 * word_number
        _put_nibble(out, byte, value, code, sign)
    if used.any():
        _put_word(out, escapes, int64(word_at(out, escapes)) | SOME)
    if raw:
        for group in range(GROUPS):
            _put_word(out, escapes + 8 * group, RAW)
            _put_word(out, escapes + 8 * group + 4, NO_UNIT)


@njit(nogil=True)
def open_high(closed, at, dim, order, channels, spare, unit_bytes, bases, high):
    """high[place] = the high byte of each value of the tile at byte `at` of `closed`, in the order of storage.

    bases: room for uint8 [dim]; high: uint8 [64 * dim].
    """
    values = TOKENS * dim
    escapes = at + values // 2 * 3 + dim
    first = word_at(closed, escapes)
    if first & np.uint32(RAW):
        begin = int64(word_at(closed, escapes + 4)) * unit_bytes
        high[:] = spare[begin : begin + values]
        return
    for i in range(dim):
        bases[channels[i]] = closed[at + values // 2 * 3 + i]
    for number in range(values // 8):
        word = word_at(closed, at + values + 4 * number)
        chunk = number // (4 * WARPS * LANES) * 2 + number % 4 // 2
        place = chunk * _STEP + number // 4 % (WARPS * LANES) * CHUNK + number % 2 * 8
        for _half in range(2):
            parts = word & _MASK
            for byte in range(4):
                code = (parts >> np.uint32(8 * byte)) & np.uint32(0xFF)
                high[place] = code + bases[order[place] % dim]
                place += 1
            word = word << _four | word >> _twenty_eight
    for slot in range(GROUPS * SLOTS):
        word = int64(word_at(closed, escapes + 4 * slot))
        if word:
            group, place = slot // SLOTS, word & (SOME - 1)
            chunk = place // _OF_WARP + group // WARPS * (dim // 64)
            high[chunk * _STEP + group % WARPS * _OF_WARP + place % _OF_WARP] ^= np.uint8(word >> 24)


@njit(nogil=True)
def pair_at(page, head, block, kv_heads, blocks, pair_bytes):
    """The byte of a layer's closed pages where a head's two tiles of a block begin."""
    return ((page * kv_heads + head) * blocks + block) * pair_bytes


@njit(nogil=True)
def tiles_of(plain, closed, page_size, kv_heads, dim, tile_begin, pair_bytes):
    """Yield where each tile of plain pages begins, in values, and where the same of closed pages does, in bytes."""
    blocks = page_size // TOKENS
    for i in range(len(plain)):
        for head in range(kv_heads):
            for block in range(blocks):
                at = ((plain[i] * page_size + block * TOKENS) * kv_heads + head) * dim
                yield at, pair_at(closed[i], head, block, kv_heads, blocks, pair_bytes) + tile_begin


_data, _bits, _ids, _orders = (
    types.Array(kind, 1, "C") for kind in (uint8, uint16, int64, int32)
)  # as every argument below


@compiled_when_needed(void(_bits, _ids, _data, _ids, int64, int64, int64, int64, int64, _orders, _orders))
def close_tiles(
    source, sources, closed, targets, page_size, kv_heads, dim, tile_begin, pair_bytes, order, channels,
):  # fmt: skip
    """Close the keys, or the values, of plain pages `sources` into closed pages `targets`.

    source: bits of bfloat16 [pages, page_size, kv_heads, dim]; closed: a layer's closed pages. tile_begin: where the
    first tile begins in a page; pair_bytes: of both tiles of a head and block.
    """
    bases = np.empty(dim, np.uint8)
    for at, to in tiles_of(sources, targets, page_size, kv_heads, dim, tile_begin, pair_bytes):
        _close_tile(source, at, kv_heads * dim, dim, order, channels, closed, to, bases)


@compiled_when_needed(
    void(_bits, _ids, _data, _ids, int64, int64, int64, int64, int64, _orders, _orders, _data, int64, _orders)
)  # fmt: skip
def keep_raw_tiles(
    source, sources, closed, targets, page_size, kv_heads, dim, tile_begin, pair_bytes, order, channels, spare,
    unit_bytes, units,
):  # fmt: skip
    """Store raw tiles' high bytes in their spare units: see `close_tiles`.

    units: those of the tiles of each page, or -1: the tile is not raw, or got none.
    """
    for number, (at, to) in enumerate(tiles_of(sources, targets, page_size, kv_heads, dim, tile_begin, pair_bytes)):
        if units[number] < 0:
            continue
        for place in range(TOKENS * dim):
            token, channel = order[place] // dim, order[place] % dim
            high = source[at + token * kv_heads * dim + channel] >> 8
            spare[units[number] * unit_bytes + place] = high
        for group in range(GROUPS):
            _put_word(closed, to + TOKENS * dim // 2 * 3 + dim + 8 * group + 4, int64(units[number]))


@compiled_when_needed(
    void(_data, _ids, _bits, _ids, int64, int64, int64, int64, int64, _orders, _orders, _data, int64)
)  # fmt: skip
def open_tiles(
    closed, sources, target, targets, page_size, kv_heads, dim, tile_begin, pair_bytes, order, channels, spare,
    unit_bytes,
):  # fmt: skip
    """Open the keys, or the values, of closed pages `sources` into plain pages `targets`: see `close_tiles`."""
    bases, high = np.empty(dim, np.uint8), np.empty(TOKENS * dim, np.uint8)
    for to, at in tiles_of(targets, sources, page_size, kv_heads, dim, tile_begin, pair_bytes):
        open_high(closed, at, dim, order, channels, spare, unit_bytes, bases, high)
        for place in range(TOKENS * dim):
            token, channel = order[place] // dim, order[place] % dim
            bits = np.uint16(high[place]) << np.uint16(8) | np.uint16(closed[at + place])
            target[to + token * kv_heads * dim + channel] = bits
