"""Closing of pages in Triton: bit for bit what `reference` does. No program waits for another one, nor branches."""

import triton
import triton.language as tl

from kvrail.engine.kv.lossless import form

_CODES = tl.constexpr(form.CODES)
_TRIED = tl.constexpr(form.BASES_TRIED)
_STEP = tl.constexpr(form.BASE_STEP)
_SPECIAL = tl.constexpr(form.SPECIAL)
_RAW = tl.constexpr(form.RAW)
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
def _in_order(x, DIM: tl.constexpr, KEYS: tl.constexpr):
    """A tile [64, DIM] in the order of storage: [2, DIM / 64, 4 warps, 8 columns, 4 of t, 4 steps, 4 rows]."""
    if KEYS:
        split = tl.reshape(x, [2, 4, 8, DIM // 64, 4, 2, 4, 2])
        ordered = tl.permute(split, (0, 3, 1, 2, 6, 4, 5, 7))
    else:
        split = tl.reshape(x, [4, 2, 4, 2, 2, DIM // 64, 4, 8])
        ordered = tl.permute(split, (4, 5, 6, 7, 2, 0, 1, 3))
    return tl.reshape(ordered, [2, DIM // 64, 4, 8, 4, 4, 4])


@triton.jit
def _words(x, COUNT: tl.constexpr):
    """Bytes in the order of storage as COUNT words."""
    byte = tl.arange(0, 4)[None, :].to(tl.uint32)
    return tl.sum(tl.reshape(x, [COUNT, 4]).to(tl.uint32) << 8 * byte, axis=1)


@triton.jit
def _nibbles(spread, DIM: tl.constexpr):
    """Words of nibbles, [8 * DIM], from parts of high bytes, uint32 [16 * DIM] in the order of low bytes."""
    parts = tl.reshape(spread, [DIM // 64, 2, 128, 2, 2])  # pair of chunks, chunk, lane, half, word
    half = tl.reshape(tl.arange(0, 2), [1, 1, 1, 1, 2])
    words = tl.sum(tl.where(half == 0, parts, parts >> 4 | parts << 28), axis=4)
    return tl.reshape(tl.permute(words, (0, 2, 1, 3)), [8 * DIM])


@triton.jit
def _by_group(x, DIM: tl.constexpr):
    """Values in the order of storage as [groups, values of a group]."""
    return tl.reshape(tl.permute(tl.reshape(x, [2, DIM // 64, 4, 512]), (0, 2, 1, 3)), [8, 8 * DIM])


@triton.jit
def _bits_of(pool, sources, pool_layer, KV_HEADS: tl.constexpr, BLOCKS: tl.constexpr, DIM: tl.constexpr):
    """The program's plain tile: bits of bfloat16, int32 [64, DIM]; see close_pages."""
    number, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, block = number // BLOCKS, number % BLOCKS
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    token, channel = tl.arange(0, 64)[:, None], tl.arange(0, DIM)[None, :]
    row = ((source * BLOCKS + block) * 64 + token) * KV_HEADS + head
    return tl.load(pool + layer * pool_layer + row * DIM + channel).to(tl.int32) & 0xFFFF


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
    bits = _bits_of(pool, sources, pool_layer, KV_HEADS, BLOCKS, DIM)
    tile = _tile_of(closed, targets, layer_bytes, KV_HEADS, BLOCKS, BEGIN, BOTH_TILES)
    words = tile.to(tl.pointer_type(tl.uint32))

    high, low = bits >> 8, bits & 0xFF
    upper = high & 0x7F
    base = _bases_of(upper, DIM)
    code = upper - base[None, :]
    escaped = code.to(tl.uint32) >= _CODES
    spread = tl.where(escaped, 0, code | high & 0x80)
    change = tl.where(escaped, high ^ base[None, :], 0)
    tl.store(words + tl.arange(0, 16 * DIM), _words(_in_order(low, DIM, KEYS), 16 * DIM))
    packed = _nibbles(_words(_in_order(spread, DIM, KEYS), 16 * DIM), DIM)
    tl.store(words + 16 * DIM + tl.arange(0, 8 * DIM), packed)
    if KEYS:
        ordered = tl.permute(tl.reshape(base, [DIM // 64, 4, 2, 4, 2]), (3, 0, 1, 2, 4))
    else:
        ordered = tl.permute(tl.reshape(base, [DIM // 32, 4, 8]), (1, 2, 0))
    tl.store(tile + 96 * DIM + tl.arange(0, DIM), tl.reshape(ordered, [DIM]).to(tl.uint8))

    changes = _by_group(_in_order(change, DIM, KEYS), DIM)
    place = tl.arange(0, 8 * DIM)[None, :]
    first = tl.min(tl.where(changes != 0, place, _NO_PLACE), axis=1)
    second = tl.min(tl.where((changes != 0) & (place > first[:, None]), place, _NO_PLACE), axis=1)
    raw = tl.max(tl.sum((changes != 0).to(tl.int32), axis=1), axis=0) > 2
    escapes = words + 24 * DIM + DIM // 4 + 2 * tl.arange(0, 8)
    tl.store(escapes, tl.where(raw, _RAW, _word_of(changes, place, first)))
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
    high = _bits_of(pool, sources, pool_layer, KV_HEADS, BLOCKS, DIM) >> 8
    held = (spare + unit.to(tl.int64) * unit_bytes).to(tl.pointer_type(tl.uint32))
    tl.store(held + tl.arange(0, 16 * DIM), _words(_in_order(high, DIM, KEYS), 16 * DIM))
    tile = _tile_of(closed, targets, layer_bytes, KV_HEADS, BLOCKS, BEGIN, BOTH_TILES)
    escapes = tile.to(tl.pointer_type(tl.int32)) + 24 * DIM + DIM // 4
    tl.store(escapes + 2 * tl.arange(0, 8) + 1, tl.zeros([8], tl.int32) + unit)
