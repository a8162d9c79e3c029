"""Closing of pages in Triton: bit for bit what `reference` does. Each value is found by the arithmetic of its place."""

import triton
import triton.language as tl

from kvrail.engine.kv.lossless import form

_CODES = tl.constexpr(form.CODES)
_TRIED = tl.constexpr(form.BASES_TRIED)
_STEP = tl.constexpr(form.BASE_STEP)
_SPECIAL = tl.constexpr(form.SPECIAL)
_RAW = tl.constexpr(form.RAW)
_SOME = tl.constexpr(form.SOME)
_NO_UNIT = tl.constexpr(form.NO_UNIT)
_NO_PLACE = tl.constexpr(1 << 20)


@triton.jit
def _bases_of(upper, DIM: tl.constexpr):
    """A base for each channel, int32 [DIM]; see reference. upper: int32 [64, DIM]."""
    top = tl.max(tl.where(upper < _SPECIAL, upper, 0), axis=0)
    best = tl.zeros([DIM], tl.int32)
    fewest = tl.full([DIM], 65, tl.int32)
    for lower in tl.static_range(_TRIED):
        base = tl.maximum(top - (_CODES - 1 + _STEP * lower), 0)
        code = (upper - base[None, :]).to(tl.uint32)  # below the base: wraps round
        escapes = tl.sum((code >= _CODES).to(tl.int32), axis=0)
        best = tl.where(escapes < fewest, base, best)
        fewest = tl.minimum(escapes, fewest)
    return best


@triton.jit
def _cell_of(word, byte, DIM: tl.constexpr, KEYS: tl.constexpr):
    """Token and channel of a value: of byte `byte` of word `word` of a tile's low bytes. See form.places."""
    steps: tl.constexpr = DIM // 16 if KEYS else 4
    number = word // 512 * 4 + word % 4
    row = number % steps * 16 + word // 4 % 4 * 2 + byte % 2 + byte // 2 * 8
    column = (number // steps * 4 + word // 128 % 4) * 8 + word // 16 % 8
    if KEYS:
        return column, row
    return row, column


@triton.jit
def _base_place(channel, DIM: tl.constexpr, KEYS: tl.constexpr):
    """Where a channel's base lies. See form.base_places."""
    if KEYS:
        return channel // 2 % 4 * (DIM // 4) + channel // 16 * 4 + channel // 8 % 2 * 2 + channel % 2
    return channel % 32 * (DIM // 32) + channel // 32


@triton.jit
def _bits_at(plain, word, byte, KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr):
    """The value's bits, int32, and its channel."""
    token, channel = _cell_of(word, byte, DIM, KEYS)
    return tl.load(plain + token * KV_HEADS * DIM + channel).to(tl.int32) & 0xFFFF, channel


@triton.jit
def _high_at(plain, bases, word, byte, KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr):
    """The value's high byte, its channel's base, and what the exponent's upper part is above that, int32."""
    bits, channel = _bits_at(plain, word, byte, KV_HEADS, DIM, KEYS)
    base = tl.load(bases + _base_place(channel, DIM, KEYS)).to(tl.int32)
    high = bits >> 8
    return high, base, (high & 0x7F) - base


@triton.jit
def _is_escape(code):
    return (code < 0) | (code >= _CODES)


@triton.jit
def _spread_at(plain, bases, word, KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr):
    """A word of four nibbles, each as it lies in a high byte."""
    spread = word * 0
    for byte in tl.static_range(4):
        high, _, code = _high_at(plain, bases, word, byte, KV_HEADS, DIM, KEYS)
        spread |= tl.where(_is_escape(code), 0, code | high & 0x80) << 8 * byte
    return spread.to(tl.uint32)


@triton.jit
def _high_words(plain, word, KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, SHIFT: tl.constexpr):
    """Words of four values' high bytes, SHIFT 8, or low bytes, SHIFT 0."""
    words = word * 0
    for byte in tl.static_range(4):
        bits, _ = _bits_at(plain, word, byte, KV_HEADS, DIM, KEYS)
        words |= (bits >> SHIFT & 0xFF) << 8 * byte
    return words.to(tl.uint32)


@triton.jit
def _plain_of(pool, sources, pool_layer, KV_HEADS: tl.constexpr, BLOCKS: tl.constexpr, DIM: tl.constexpr):
    """Where the program's plain tile begins; its tokens are KV_HEADS * DIM apart."""
    number, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, block = number // BLOCKS, number % BLOCKS
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    return pool + layer * pool_layer + (((source * BLOCKS + block) * 64) * KV_HEADS + head) * DIM


@triton.jit
def _tile_of(
    closed,
    targets,
    layer_bytes,
    KV_HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BEGIN: tl.constexpr,
    BOTH_TILES: tl.constexpr,
):
    """Where the program's closed tile begins."""
    target, layer = tl.load(targets + tl.program_id(0)).to(tl.int64), tl.program_id(2).to(tl.int64)
    pair = target * KV_HEADS * BLOCKS + tl.program_id(1)
    return tl.multiple_of(closed + layer * layer_bytes + pair * BOTH_TILES + BEGIN, 64)


@triton.jit
def close_pages(
    pool,
    closed,
    sources,
    targets,
    pool_layer,
    layer_bytes,
    KV_HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIM: tl.constexpr,
    BEGIN: tl.constexpr,
    BOTH_TILES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Grid: (pages, KV_HEADS * BLOCKS, layers). Plain pages of `pool`: uint16 [BLOCKS * 64, KV_HEADS, DIM].

    pool_layer: elements of a layer in `pool`; layer_bytes: of closed pages of a layer; BEGIN: where a tile begins in a
    pair. A raw tile has no spare unit yet.
    """
    plain = _plain_of(pool, sources, pool_layer, KV_HEADS, BLOCKS, DIM)
    tile = _tile_of(closed, targets, layer_bytes, KV_HEADS, BLOCKS, BEGIN, BOTH_TILES)
    words, bases = tile.to(tl.pointer_type(tl.uint32)), tile + 96 * DIM
    token, channel = tl.arange(0, 64)[:, None], tl.arange(0, DIM)
    upper = tl.load(plain + token * KV_HEADS * DIM + channel[None, :]).to(tl.int32) >> 8 & 0x7F
    tl.store(bases + _base_place(channel, DIM, KEYS), _bases_of(upper, DIM).to(tl.uint8))
    tl.debug_barrier()  # what follows reads them

    word = tl.arange(0, 16 * DIM)
    tl.store(words + word, _high_words(plain, word, KV_HEADS, DIM, KEYS, 0))
    number = tl.arange(0, 8 * DIM)
    word = (number // 512 * 2 + number % 4 // 2) * 512 + number % 512 // 4 * 4 + number % 2 * 2
    first = _spread_at(plain, bases, word, KV_HEADS, DIM, KEYS)
    second = _spread_at(plain, bases, word + 1, KV_HEADS, DIM, KEYS)
    tl.store(words + 16 * DIM + number, first | second >> 4 | second << 28)

    group, place = tl.arange(0, 8)[:, None], tl.arange(0, 8 * DIM)[None, :]
    word = (group // 4 * (DIM // 64) + place // 512) * 512 + group % 4 * 128 + place % 512 // 4
    high, base, code = _high_at(plain, bases, word, place % 4, KV_HEADS, DIM, KEYS)
    changes = tl.where(_is_escape(code), high ^ base, 0)
    places = tl.where(changes != 0, place, _NO_PLACE)
    first = tl.min(places, axis=1)
    second = tl.min(tl.where(places > first[:, None], places, _NO_PLACE), axis=1)
    raw = tl.max(tl.sum((changes != 0).to(tl.int32), axis=1), axis=0) > 2
    escapes = words + 24 * DIM + DIM // 4 + 2 * tl.arange(0, 8)
    some = tl.where((tl.arange(0, 8) == 0) & (tl.min(first, axis=0) < _NO_PLACE), _SOME, 0)
    tl.store(escapes, tl.where(raw, _RAW, _word_of(changes, place, first) | some))
    tl.store(escapes + 1, tl.where(raw, _NO_UNIT, _word_of(changes, place, second)))


@triton.jit
def _word_of(changes, place, at):
    """Each group's word for the escape in its place `at`, [8]; 0 where there is none."""
    change = tl.sum(tl.where(place == at[:, None], changes, 0), axis=1)
    return tl.where(at < _NO_PLACE, change << 24 | at, 0).to(tl.uint32)


@triton.jit
def keep_raw(
    pool,
    closed,
    spare,
    units,
    sources,
    targets,
    pool_layer,
    layer_bytes,
    unit_bytes,
    KV_HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIM: tl.constexpr,
    BEGIN: tl.constexpr,
    BOTH_TILES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Grid: as of close_pages. Store raw tiles' high bytes in their spare units.

    units: int32 [layers, pages, KV_HEADS * BLOCKS], -1 of tiles that are not raw or got none.
    """
    program = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)
    unit = tl.load(units + program)
    if unit < 0:
        return
    plain, word = _plain_of(pool, sources, pool_layer, KV_HEADS, BLOCKS, DIM), tl.arange(0, 16 * DIM)
    held = (spare + unit.to(tl.int64) * unit_bytes).to(tl.pointer_type(tl.uint32))
    tl.store(held + word, _high_words(plain, word, KV_HEADS, DIM, KEYS, 8))
    tile = _tile_of(closed, targets, layer_bytes, KV_HEADS, BLOCKS, BEGIN, BOTH_TILES)
    escapes = tile.to(tl.pointer_type(tl.int32)) + 24 * DIM + DIM // 4
    tl.store(escapes + 2 * tl.arange(0, 8) + 1, tl.zeros([8], tl.int32) + unit)
