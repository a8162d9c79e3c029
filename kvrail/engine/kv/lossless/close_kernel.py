"""Closing of pages in Triton: bit for bit what tests/reference does, four values at a time, in the bytes of a word."""

import triton
import triton.language as tl

from kvrail.engine.kv.lossless import form

_CODES = tl.constexpr(form.CODES)
_TRIED = tl.constexpr(form.BASES_TRIED)
_STEP = tl.constexpr(form.BASE_STEP)
_RAW = tl.constexpr(form.RAW)
_SOME = tl.constexpr(form.SOME)
_NO_UNIT = tl.constexpr(form.NO_UNIT)
_NO_WORD = tl.constexpr(1 << 20)
_ONES, _LEADS, _RESTS = tl.constexpr(0x01010101), tl.constexpr(0x80808080), tl.constexpr(0x7F7F7F7F)
"""Masks have the lowest bit of each byte of a word, the highest, or all others."""


@triton.jit
def _chosen(first, second, BYTES: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Words of four of the bytes of two words: a digit of BYTES, which is hexadecimal, says which of the eight.

    ASSEMBLED: by the instruction for it, which Triton's interpreter does not know.
    """
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, $2, {BYTES};", "=r,r,r", [first, second], dtype=tl.uint32, is_pure=True, pack=1
        )
    both, words = second.to(tl.uint64) << 32 | first, first * 0
    for byte in tl.static_range(4):
        words |= (both >> 8 * (BYTES >> 4 * byte & 15) & 0xFF).to(tl.uint32) << 8 * byte
    return words


@triton.jit
def _bytes_of(plain, KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, ASSEMBLED: tl.constexpr):
    """A tile's low bytes and its high bytes, as words of the four values that share one in `form`: uint32.

    Of keys [tokens, steps and t], of values [steps and t, channels / 4, 4]. Each value is loaded once, and a warp has
    all of a channel's values, or many of them.
    """
    plain, token = plain.to(tl.pointer_type(tl.uint32)), KV_HEADS * DIM // 2  # words of two channels
    if KEYS:
        column = tl.arange(0, DIM // 4)[None, :]
        at = plain + tl.arange(0, 64)[:, None] * token + column // 4 * 8 + column % 4
        first, second = tl.load(at), tl.load(at + 4)
    else:
        row, word = tl.arange(0, 16)[:, None, None], tl.arange(0, 8)[None, None, :]
        at = plain + (row // 4 * 16 + row % 4 * 2) * token + tl.arange(0, DIM // 16)[None, :, None] * 8 + word
        first = _of_channels(tl.load(at), tl.load(at + token), DIM, ASSEMBLED)
        second = _of_channels(tl.load(at + 8 * token), tl.load(at + 9 * token), DIM, ASSEMBLED)
    return _chosen(first, second, 0x6420, ASSEMBLED), _chosen(first, second, 0x7531, ASSEMBLED)


@triton.jit
def _of_channels(token, following, DIM: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Each channel's words of two tokens, [16, DIM / 4, 4], from each token's words of two channels."""
    both = tl.join(_chosen(token, following, 0x5410, ASSEMBLED), _chosen(token, following, 0x7632, ASSEMBLED))
    return tl.reshape(both, [16, DIM // 4, 4])


@triton.jit
def _in_order(words, DIM: tl.constexpr, KEYS: tl.constexpr):
    """Words of `_bytes_of` in the order of storage: [2 halves, chunks of a half, 4 warps, 8, 4, 4 words of a lane]."""
    if KEYS:
        return tl.permute(tl.reshape(words, [2, 4, 8, DIM // 64, 4, 4]), (0, 3, 1, 2, 5, 4))
    return tl.permute(tl.reshape(words, [4, 4, 2, DIM // 64, 4, 8]), (2, 3, 4, 5, 1, 0))


@triton.jit
def _filled(leads):
    """The other bits of each byte whose highest bit is set."""
    return leads - (leads >> 7)


@triton.jit
def _less(words, by: tl.constexpr):
    """Each byte less `by`, but at least 0; bytes are below 128."""
    less = (words | _LEADS) - by * _ONES
    return less & _filled(less & _LEADS)


@triton.jit
def _inside(upper, bases):
    """The highest bit of each byte that a nibble reaches from its base; bytes are below 128."""
    return (upper | _LEADS) - bases & bases + (_CODES - 1) * _ONES + _LEADS - upper & _LEADS


@triton.jit
def _tops_of(upper, KEYS: tl.constexpr):
    """For each channel, one more than the largest part of an exponent that is not special, or 0; see `_bases_of`."""
    above = ((upper + _ONES) & _RESTS).to(tl.int32)  # 0 of special ones
    if KEYS:
        parts = tl.join(tl.join(above << 24, above << 8), tl.join(above << 16, above))
        parts = tl.reshape(parts, [64, upper.shape[1], 4])
    else:
        parts = tl.maximum(tl.maximum(above, above << 8), tl.maximum(above << 16, above << 24))
    return tl.sum((tl.max(parts, axis=0) >> 24) << 8 * tl.arange(0, 4)[None, :], axis=1).to(tl.uint32)


@triton.jit
def _spread_out(bases, KEYS: tl.constexpr):
    """Words of the bases of four channels as words of `_bytes_of` have these channels."""
    if KEYS:  # noqa: SIM108 a branch on constants
        words = bases[None, :]
    else:
        words = (bases[None, :, None] >> 8 * tl.arange(0, 4)[None, None, :] & 0xFF) * _ONES
    return words


@triton.jit
def _reached(upper, bases, KEYS: tl.constexpr):
    """For each channel, how many values nibbles reach; see `_bases_of`."""
    inside = _inside(upper, _spread_out(bases, KEYS)) >> 7
    if not KEYS:
        inside = tl.sum((inside * _ONES >> 24) << 8 * tl.arange(0, 4)[None, None, :], axis=2)
    return tl.sum(inside, axis=0)


@triton.jit
def _bases_of(upper, KEYS: tl.constexpr):
    """A base for each channel, and how many values nibbles reach from it; uint32, four channels a word.

    upper: of each exponent, in words as `_bytes_of` has them.
    """
    tops = _tops_of(upper, KEYS)
    best = _less(tops, _CODES)
    most = _reached(upper, best, KEYS)
    if _some_missed(most):
        for lower in tl.static_range(1, _TRIED):
            bases = _less(tops, _CODES + _STEP * lower)
            count = _reached(upper, bases, KEYS)
            more = _filled((count | _LEADS) - most - _ONES & _LEADS)
            best ^= (best ^ bases) & more
            most ^= (most ^ count) & more
    return best, most


@triton.jit
def _some_missed(reached):
    """Whether some values of a tile are escapes; reached: see `_bases_of`."""
    return tl.max((reached != 64 * _ONES).to(tl.int32), axis=0) > 0


@triton.jit
def _store_bases(at, bases, DIM: tl.constexpr, KEYS: tl.constexpr):
    """at: where a tile's bases lie. See form.base_places."""
    if KEYS:
        column = tl.arange(0, DIM // 4)
        tl.store(at.to(tl.pointer_type(tl.uint32)) + column % 4 * (DIM // 16) + column // 4, bases)
    else:
        byte = tl.arange(0, 4)[None, :]
        channel = 4 * tl.arange(0, DIM // 4)[:, None] + byte
        tl.store(at + channel % 32 * (DIM // 32) + channel // 32, (bases[:, None] >> 8 * byte).to(tl.uint8))


@triton.jit
def _in_twos(words, DIM: tl.constexpr, KEYS: tl.constexpr):
    """Words of `_bytes_of` that share a word of nibbles: two of [pairs of chunks, 2 chunks, 128 lanes, 2 pairs]."""
    return tl.split(tl.reshape(_in_order(words, DIM, KEYS), [DIM // 64, 2, 128, 2, 2]))


@triton.jit
def _packed(spread, DIM: tl.constexpr, KEYS: tl.constexpr):
    """Words of eight nibbles, [8 * DIM], from words of four, each as it lies in a high byte."""
    first, second = _in_twos(spread, DIM, KEYS)
    return tl.reshape(tl.permute(first | second >> 4 | second << 28, (0, 2, 1, 3)), [8 * DIM])


@triton.jit
def _first_of(changes, word):
    """The word of escapes for the first change among the four of `word`, or 0; and the changes without it."""
    byte = tl.where(changes & 0xFF != 0, 0, tl.where(changes & 0xFF00 != 0, 1, tl.where(changes & 0xFF0000 != 0, 2, 3)))
    change = changes >> 8 * byte & 0xFF
    return tl.where(change != 0, change << 24 | (4 * word + byte).to(tl.uint32), 0), changes ^ change << 8 * byte


@triton.jit
def _escapes_of(changes, DIM: tl.constexpr, KEYS: tl.constexpr):
    """Both words of escapes of each group, uint32 [8]. changes: what to XOR each high byte with; some are not 0.

    In twos, a warp has all of a group: over lanes that are no neighbours, Triton 3.6 reduces wrongly.
    """
    first, second = _in_twos(changes, DIM, KEYS)
    changes = tl.reshape(tl.join(first, second), [2, DIM // 64, 4, 128])
    changes = tl.reshape(tl.permute(changes, (0, 2, 1, 3)), [8, 2 * DIM])
    word = tl.arange(0, 2 * DIM)[None, :]
    places = tl.where(changes != 0, word, _NO_WORD)
    here = tl.min(places, axis=1)
    after = tl.min(tl.where(places > here[:, None], places, _NO_WORD), axis=1)
    first, others = _first_of(tl.sum(tl.where(word == here[:, None], changes, 0), axis=1), here)
    second, _ = _first_of(others, here)
    later, _ = _first_of(tl.sum(tl.where(word == after[:, None], changes, 0), axis=1), after)
    second = tl.where(second != 0, second, later)
    flags = ((changes & _RESTS) + _RESTS | changes) & _LEADS
    raw = tl.max(tl.sum((flags >> 7) * _ONES >> 24, axis=1).to(tl.int32), axis=0) > 2
    first |= tl.where(tl.arange(0, 8) == 0, _SOME, 0).to(tl.uint32)
    return tl.where(raw, _RAW, first).to(tl.uint32), tl.where(raw, _NO_UNIT, second).to(tl.uint32)


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
    ASSEMBLED: tl.constexpr,
):
    """Grid: (pages, KV_HEADS * BLOCKS, layers). Plain pages of `pool`: uint16 [BLOCKS * 64, KV_HEADS, DIM].

    pool_layer: elements of a layer in `pool`; layer_bytes: of closed pages of a layer; BEGIN: where a tile begins in a
    pair. A raw tile has no spare unit yet.
    """
    plain = _plain_of(pool, sources, pool_layer, KV_HEADS, BLOCKS, DIM)
    tile = _tile_of(closed, targets, layer_bytes, KV_HEADS, BLOCKS, BEGIN, BOTH_TILES)
    words = tile.to(tl.pointer_type(tl.uint32))
    low, high = _bytes_of(plain, KV_HEADS, DIM, KEYS, ASSEMBLED)
    tl.store(words + tl.arange(0, 16 * DIM), tl.reshape(_in_order(low, DIM, KEYS), [16 * DIM]))
    upper = high & _RESTS
    bases, reached = _bases_of(upper, KEYS)
    _store_bases(tile + 96 * DIM, bases, DIM, KEYS)

    bases = _spread_out(bases, KEYS)
    inside = _inside(upper, bases)
    code = ((upper | _LEADS) - bases) & (_CODES - 1) * _ONES
    spread = code & _filled(inside) | high & inside
    tl.store(words + 16 * DIM + tl.arange(0, 8 * DIM), _packed(spread, DIM, KEYS))

    first = tl.zeros([8], tl.uint32)
    second = first
    if _some_missed(reached):
        first, second = _escapes_of((high ^ bases) & ~(_filled(inside) | inside), DIM, KEYS)
    escapes = words + 24 * DIM + DIM // 4 + 2 * tl.arange(0, 8)
    tl.store(escapes, first)
    tl.store(escapes + 1, second)


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
    ASSEMBLED: tl.constexpr,
):
    """Grid: as of close_pages. Store raw tiles' high bytes in their spare units.

    units: int32 [layers, pages, KV_HEADS * BLOCKS], -1 of tiles that are not raw or got none.
    """
    program = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)
    unit = tl.load(units + program)
    if unit < 0:
        return
    plain = _plain_of(pool, sources, pool_layer, KV_HEADS, BLOCKS, DIM)
    _, high = _bytes_of(plain, KV_HEADS, DIM, KEYS, ASSEMBLED)
    held = (spare + unit.to(tl.int64) * unit_bytes).to(tl.pointer_type(tl.uint32))
    tl.store(held + tl.arange(0, 16 * DIM), tl.reshape(_in_order(high, DIM, KEYS), [16 * DIM]))
    tile = _tile_of(closed, targets, layer_bytes, KV_HEADS, BLOCKS, BEGIN, BOTH_TILES)
    escapes = tile.to(tl.pointer_type(tl.int32)) + 24 * DIM + DIM // 4
    tl.store(escapes + 2 * tl.arange(0, 8) + 1, tl.zeros([8], tl.int32) + unit)
