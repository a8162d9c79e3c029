"""Triton kernel: both stages of keys and values, in one pass over the pages.

One program makes one tile, as in one_stage/gpu_encode_kernel.py, of the parts that `tiles` has: it reads the tile once,
writes everything of both stages that has a fixed place, and leaves records and extensions in a slot of its own.
Compiled for sm_90, a tile of 4,096 values of bfloat16 takes one warp some 1,400 instructions and 108 for each round of
escapes, of which real KV has about five.
"""

# Tuples that grow in unrolled loops have no type that mypy can follow.
# mypy: disable-error-code="assignment, misc, no-untyped-def, no-untyped-call, untyped-decorator, var-annotated"

import triton
import triton.language as tl

from kvrail.codec.core.gpu_word_kernels import (
    clamped,
    high_bits,
    high_bytes,
    larger_pair,
    low_bytes,
    pointer_to,
    replicated,
    risen,
    smaller_pair,
)
from kvrail.codec.splitzip.progressive.format import CODE_BITS
from kvrail.codec.splitzip.tiles.gpu_escape_kernels import store_escapes
from kvrail.codec.splitzip.tiles.gpu_plane_kernels import store_planes
from kvrail.codec.splitzip.tiles.gpu_tile_kernels import (
    RUNTIME,
    channel_tops,
    halves_first,
    load_segment,
    page_of,
    sections_after,
    words_of,
)

_CODE_BITS = tl.constexpr(CODE_BITS)
_LAST_OCTAVE = tl.constexpr((1 << CODE_BITS) - 1)


@triton.jit
def _levels(depth, MANTISSA_BITS: tl.constexpr, REST_BITS: tl.constexpr, LANES: tl.constexpr):
    """README.md, "Levels": where a depth lies among levels of one size, in the lane's bits from REST_BITS on."""
    OCTAVE: tl.constexpr = 1 << MANTISSA_BITS
    place = depth
    if REST_BITS > 0:
        first = clamped(depth, OCTAVE // 2, OCTAVE, LANES)
        second = clamped(depth, 3 * OCTAVE // 2, 2 * OCTAVE, LANES)
        place = depth + first + second - replicated(2 * OCTAVE, LANES)
    return place >> REST_BITS


@triton.jit
def _quad_tops(
    firsts,
    seconds,
    tops,
    drops,
    tile,
    WIDTH: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
):
    """As channel_tops, of quads, given both words of all segments; tops of the columns of both words."""
    HALF_VALUES: tl.constexpr = WIDTH // 2
    EXPONENTS: tl.constexpr = (1 << EXPONENT_BITS) - 1
    first, second = firsts[0] << 1, seconds[0] << 1  # signs go to the next lane, below all exponents
    for s in tl.static_range(1, 8):
        first, second = larger_pair(first, firsts[s] << 1), larger_pair(second, seconds[s] << 1)
    first = (tl.reduce(first, 1, larger_pair) >> (16 - EXPONENT_BITS)) & replicated(EXPONENTS, 2)
    second = (tl.reduce(second, 1, larger_pair) >> (16 - EXPONENT_BITS)) & replicated(EXPONENTS, 2)
    most = tl.reduce(tl.reduce(larger_pair(first, second), 1, larger_pair), 0, larger_pair)
    top = tl.maximum(most >> 16, most & 0xFFFF)
    tl.store(tops + tile, top.to(tl.uint8))
    first = smaller_pair(replicated(top, 2) - first, replicated(15, 2))
    second = smaller_pair(replicated(top, 2) - second, replicated(15, 2))
    both = tl.sum(low_bytes(first, second) << (4 * tl.arange(0, 2)[:, None]), axis=0).to(tl.uint32)
    within = tl.arange(0, HALF_PADDED)
    start = pointer_to(drops + tile.to(tl.int64) * HALF_VALUES, 4)
    tl.store(start + within, both, mask=within * 4 < HALF_VALUES)
    return (replicated(top, 2) - first)[:, None, :], (replicated(top, 2) - second)[:, None, :]


@triton.jit
def _quad_level(first, second, REST_BITS: tl.constexpr):
    """Bits REST_BITS to REST_BITS + 7 of a quad's values, given its two words, as one word."""
    if REST_BITS > 8:
        level = high_bytes(first >> (REST_BITS - 8), second >> (REST_BITS - 8))
    else:
        level = high_bytes(first << (8 - REST_BITS), second << (8 - REST_BITS))
    return level


@triton.jit
def _quad_places(word, bias, zero, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr):
    """README.md, "Levels": BIAS and the place of a value's depth among levels of one size, in two lanes.

    bias: BIAS and the depth of 0; zero: as of `risen`. No value is above its column's top: no lane borrows.
    """
    OCTAVE: tl.constexpr = 1 << MANTISSA_BITS
    depth = bias - (word & 0x7FFF7FFF)
    first = risen(depth, BIAS + OCTAVE // 2, OCTAVE // 2, zero)
    return depth + first + risen(depth, BIAS + 3 * OCTAVE // 2, OCTAVE // 2, zero)


@triton.jit
def _encode_quads(
    tile,
    tiles,
    words,
    index,
    first,
    inside,
    real,
    dense,
    rest,
    zero,
    G: tl.constexpr,
    STEP: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """As _encode_words, of quads: what fits a byte is cut into planes four values at a time."""
    LEVEL_BITS: tl.constexpr = _CODE_BITS.value + G.KEPT_BITS
    REST_BITS: tl.constexpr = G.MANTISSA_BITS - G.KEPT_BITS
    BIAS: tl.constexpr = (1 << 15) - ((G.WINDOW + 1) << G.MANTISSA_BITS)  # places outside have the highest bit then
    firsts, seconds, low, high = (), (), (), ()
    for s in tl.static_range(8):  # all loads are under way before the first is used
        where = first + s * STEP
        quad = tl.load(words + where, mask=real & (where < PAGE_WORDS), other=0) if G.PADDED else tl.load(words + where)
        firsts += (quad.to(tl.uint32),)
        seconds += ((quad >> 32).to(tl.uint32),)
    for s in tl.static_range(8):
        low += (low_bytes(firsts[s], seconds[s]),)
    plane = store_planes(low, rest, tile, tiles, index, inside, min(REST_BITS, 8), SEGMENT, G.PADDED, 4)
    if REST_BITS > 8:
        for s in tl.static_range(8):
            high += (high_bytes(firsts[s], seconds[s]),)
        store_planes(high, plane, tile, tiles, index, inside, REST_BITS - 8, SEGMENT, G.PADDED, 4)
    tops, drops, _ = sections_after(dense, tiles, LEVEL_BITS + 1, SEGMENT, G.WIDTH, 2)
    first_top, second_top = _quad_tops(firsts, seconds, tops, drops, tile, G.WIDTH, G.HALF_PADDED, G.EXPONENT_BITS)
    first_bias = (first_top << G.MANTISSA_BITS) + replicated(BIAS + (1 << G.MANTISSA_BITS) - 1, 2)
    second_bias = (second_top << G.MANTISSA_BITS) + replicated(BIAS + (1 << G.MANTISSA_BITS) - 1, 2)
    fields = ()
    escaped = tl.zeros_like(low[0])
    for s in tl.static_range(8):
        a, b = firsts[s], seconds[s]
        if G.PADDED:
            value = real & (first + s * STEP < PAGE_WORDS)
            a = tl.where(value, a, first_top << G.MANTISSA_BITS)
            b = tl.where(value, b, second_top << G.MANTISSA_BITS)
        sign = high_bits(a, b)
        a = _quad_places(a, first_bias, zero, G.MANTISSA_BITS, BIAS)
        b = _quad_places(b, second_bias, zero, G.MANTISSA_BITS, BIAS)
        outside = high_bits(a, b)
        escaped |= outside & replicated(1 << s, 4)
        level = _quad_level(a, b, REST_BITS) | (outside & replicated(_LAST_OCTAVE.value << G.KEPT_BITS, 4))
        # What lies above the sign is left out by store_planes.
        fields += ((level & replicated(0xFF - (1 << LEVEL_BITS), 4)) | (sign & replicated(1 << LEVEL_BITS, 4)),)
    store_planes(fields, dense, tile, tiles, index, inside, LEVEL_BITS + 1, SEGMENT, G.PADDED, 4)
    return escaped, low_bytes(first_top, second_top)


@triton.jit
def _encode_words(
    tile,
    tiles,
    words,
    index,
    first,
    inside,
    real,
    dense,
    rest,
    G: tl.constexpr,
    STEP: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Store all of a tile but its escapes; which values escape, a bit a segment, and the columns' tops, in lanes."""
    LEVEL_BITS: tl.constexpr = _CODE_BITS.value + G.KEPT_BITS
    REST_BITS: tl.constexpr = G.MANTISSA_BITS - G.KEPT_BITS
    SIGN: tl.constexpr = 1 << (G.EXPONENT_BITS + G.MANTISSA_BITS)
    SIGN_SHIFT: tl.constexpr = G.EXPONENT_BITS + G.MANTISSA_BITS - LEVEL_BITS
    x = ()
    for s in tl.static_range(8):  # all loads are under way before the first is used
        x += (load_segment(words, first + s * STEP, real, PAGE_WORDS, G.PADDED),)
    store_planes(x, rest, tile, tiles, index, inside, REST_BITS, SEGMENT, G.PADDED, G.LANES)
    tops, drops, _ = sections_after(dense, tiles, LEVEL_BITS + 1, SEGMENT, G.WIDTH, 2)
    top = channel_tops(x, tops, drops, tile, G.WIDTH, G.HALF_PADDED, G.EXPONENT_BITS, G.MANTISSA_BITS, G.LANES)
    highest = (top << G.MANTISSA_BITS) + replicated((1 << G.MANTISSA_BITS) - 1, G.LANES)
    fields = ()
    escaped = tl.zeros_like(x[0])
    for s in tl.static_range(8):
        depth = highest - (x[s] & replicated(SIGN - 1, G.LANES))  # no value is above its column's top: no lane borrows
        if G.PADDED:
            power = replicated((1 << G.MANTISSA_BITS) - 1, G.LANES)
            depth = tl.where(real & (first + s * STEP < PAGE_WORDS), depth, power)
        outside = (depth + replicated(SIGN - (G.WINDOW << G.MANTISSA_BITS), G.LANES)) >> (
            G.EXPONENT_BITS + G.MANTISSA_BITS
        )
        outside &= replicated(1, G.LANES)
        escaped += outside * (1 << s)
        level = _levels(depth, G.MANTISSA_BITS, REST_BITS, G.LANES) | outside * (_LAST_OCTAVE.value << G.KEPT_BITS)
        sign = (x[s] >> SIGN_SHIFT) & replicated(1 << LEVEL_BITS, G.LANES)
        fields += ((level & replicated((1 << LEVEL_BITS) - 1, G.LANES)) | sign,)
    store_planes(fields, dense, tile, tiles, index, inside, LEVEL_BITS + 1, SEGMENT, G.PADDED, G.LANES)
    return escaped, top


@triton.jit
def _encode_tile(
    tile,
    tiles,
    pool,
    layer_stride,
    page_stride,
    pages,
    num_pages,
    dense,
    rest,
    records,
    extensions,
    G: tl.constexpr,
):
    SEGMENT: tl.constexpr = G.SEGMENT_ROWS * G.WIDTH
    STEP: tl.constexpr = G.SEGMENT_ROWS * G.COLUMNS // G.LANES
    PAGE_WORDS: tl.constexpr = G.ROWS * G.COLUMNS // G.LANES
    REST_BITS: tl.constexpr = G.MANTISSA_BITS - G.KEPT_BITS
    ROW: tl.constexpr = min(8 // G.LANES, G.HALF_PADDED)
    _, page = page_of(tile, pool, layer_stride, page_stride, pages, num_pages, G.PER_PAGE, G.ALIGNMENT)
    words = pointer_to(page, G.ITEM_BYTES * G.LANES)
    index, first, inside, real = words_of(
        tile % G.PER_PAGE, G.COLUMNS, G.SEGMENT_ROWS, G.WIDTH, 2, G.LANES, G.SEGMENT_ROWS_PADDED, G.HALF_PADDED
    )
    index, first, inside, real = halves_first(index), halves_first(first), halves_first(inside), halves_first(real)
    if G.ITEM_BYTES * G.LANES == 8:
        escaped, top = _encode_quads(
            tile, tiles, words, index, first, inside, real, dense, rest, (num_pages >> 31).to(tl.uint32), G, STEP,
            PAGE_WORDS, SEGMENT,
        )  # fmt: skip
    else:
        escaped, top = _encode_words(
            tile, tiles, words, index, first, inside, real, dense, rest, G, STEP, PAGE_WORDS, SEGMENT,
        )  # fmt: skip
    slot = tile.to(tl.int64) * (8 * SEGMENT)
    count = store_escapes(
        escaped, index, first, top, pointer_to(page, G.ITEM_BYTES), records + slot, extensions + slot,
        G.WINDOW, G.POSITION_BITS, G.EXPONENT_BITS, G.MANTISSA_BITS, G.LANES, STEP, ROW,
    )  # fmt: skip
    _, _, counts = sections_after(rest, tiles, REST_BITS, SEGMENT, G.WIDTH, 1)
    tl.store(counts.to(tl.pointer_type(tl.uint16)) + tile, count.to(tl.uint16))


@triton.jit(do_not_specialize=RUNTIME)
def encode_stages_kernel(
    keys,
    values,
    key_layer_stride: tl.int64,
    value_layer_stride: tl.int64,
    key_page_stride: tl.int64,
    value_page_stride: tl.int64,
    pages,
    num_pages,
    key_tiles,
    value_tiles,
    key_dense,
    value_dense,
    key_rest,
    value_rest,
    key_records,
    value_records,
    key_extensions,
    value_extensions,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Grid: key tiles, then value tiles.

    keys, values: uint8, the pools; strides: bytes; pages: int64 [num_pages], page ids; dense: uint8, dense parts of the
    first stage; rest: uint8, those of the second, all but the group offsets. Slots, one a tile: records uint16 and
    extensions uint8, as many as a tile has values.
    """
    tile = tl.program_id(0)
    if tile < key_tiles:
        _encode_tile(
            tile, key_tiles, keys, key_layer_stride, key_page_stride, pages, num_pages, key_dense, key_rest,
            key_records, key_extensions, KEYS,
        )  # fmt: skip
    else:
        _encode_tile(
            tile - key_tiles, value_tiles, values, value_layer_stride, value_page_stride, pages, num_pages,
            value_dense, value_rest, value_records, value_extensions, VALUES,
        )  # fmt: skip
