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
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    WINDOW: tl.constexpr,
    STEP: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    SEGMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    PADDED: tl.constexpr,
    KEPT_BITS: tl.constexpr,
):
    """As _encode_words, of quads: what fits a byte is cut into planes four values at a time."""
    LEVEL_BITS: tl.constexpr = _CODE_BITS.value + KEPT_BITS
    REST_BITS: tl.constexpr = MANTISSA_BITS - KEPT_BITS
    BIAS: tl.constexpr = (1 << 15) - ((WINDOW + 1) << MANTISSA_BITS)  # places outside have the highest bit then
    firsts, seconds, low, high = (), (), (), ()
    for s in tl.static_range(8):  # all loads are under way before the first is used
        where = first + s * STEP
        quad = tl.load(words + where, mask=real & (where < PAGE_WORDS), other=0) if PADDED else tl.load(words + where)
        firsts += (quad.to(tl.uint32),)
        seconds += ((quad >> 32).to(tl.uint32),)
    for s in tl.static_range(8):
        low += (low_bytes(firsts[s], seconds[s]),)
    plane = store_planes(low, rest, tile, tiles, index, inside, min(REST_BITS, 8), SEGMENT, PADDED, 4)
    if REST_BITS > 8:
        for s in tl.static_range(8):
            high += (high_bytes(firsts[s], seconds[s]),)
        store_planes(high, plane, tile, tiles, index, inside, REST_BITS - 8, SEGMENT, PADDED, 4)
    tops, drops, _ = sections_after(dense, tiles, LEVEL_BITS + 1, SEGMENT, WIDTH, 2)
    first_top, second_top = _quad_tops(firsts, seconds, tops, drops, tile, WIDTH, HALF_PADDED, EXPONENT_BITS)
    first_bias = (first_top << MANTISSA_BITS) + replicated(BIAS + (1 << MANTISSA_BITS) - 1, 2)
    second_bias = (second_top << MANTISSA_BITS) + replicated(BIAS + (1 << MANTISSA_BITS) - 1, 2)
    fields = ()
    escaped = tl.zeros_like(low[0])
    for s in tl.static_range(8):
        a, b = firsts[s], seconds[s]
        if PADDED:
            value = real & (first + s * STEP < PAGE_WORDS)
            a = tl.where(value, a, first_top << MANTISSA_BITS)
            b = tl.where(value, b, second_top << MANTISSA_BITS)
        sign = high_bits(a, b)
        a = _quad_places(a, first_bias, zero, MANTISSA_BITS, BIAS)
        b = _quad_places(b, second_bias, zero, MANTISSA_BITS, BIAS)
        outside = high_bits(a, b)
        escaped |= outside & replicated(1 << s, 4)
        level = _quad_level(a, b, REST_BITS) | (outside & replicated(_LAST_OCTAVE.value << KEPT_BITS, 4))
        # What lies above the sign is left out by store_planes.
        fields += ((level & replicated(0xFF - (1 << LEVEL_BITS), 4)) | (sign & replicated(1 << LEVEL_BITS, 4)),)
    store_planes(fields, dense, tile, tiles, index, inside, LEVEL_BITS + 1, SEGMENT, PADDED, 4)
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
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    WINDOW: tl.constexpr,
    LANES: tl.constexpr,
    STEP: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    SEGMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    PADDED: tl.constexpr,
    KEPT_BITS: tl.constexpr,
):
    """Store all of a tile but its escapes; which values escape, a bit a segment, and the columns' tops, in lanes."""
    LEVEL_BITS: tl.constexpr = _CODE_BITS.value + KEPT_BITS
    REST_BITS: tl.constexpr = MANTISSA_BITS - KEPT_BITS
    SIGN: tl.constexpr = 1 << (EXPONENT_BITS + MANTISSA_BITS)
    SIGN_SHIFT: tl.constexpr = EXPONENT_BITS + MANTISSA_BITS - LEVEL_BITS
    x = ()
    for s in tl.static_range(8):  # all loads are under way before the first is used
        x += (load_segment(words, first + s * STEP, real, PAGE_WORDS, PADDED),)
    store_planes(x, rest, tile, tiles, index, inside, REST_BITS, SEGMENT, PADDED, LANES)
    tops, drops, _ = sections_after(dense, tiles, LEVEL_BITS + 1, SEGMENT, WIDTH, 2)
    top = channel_tops(x, tops, drops, tile, WIDTH, HALF_PADDED, EXPONENT_BITS, MANTISSA_BITS, LANES)
    highest = (top << MANTISSA_BITS) + replicated((1 << MANTISSA_BITS) - 1, LANES)
    fields = ()
    escaped = tl.zeros_like(x[0])
    for s in tl.static_range(8):
        depth = highest - (x[s] & replicated(SIGN - 1, LANES))  # no value is above its column's top: no lane borrows
        if PADDED:
            power = replicated((1 << MANTISSA_BITS) - 1, LANES)
            depth = tl.where(real & (first + s * STEP < PAGE_WORDS), depth, power)
        outside = (depth + replicated(SIGN - (WINDOW << MANTISSA_BITS), LANES)) >> (EXPONENT_BITS + MANTISSA_BITS)
        outside &= replicated(1, LANES)
        escaped += outside * (1 << s)
        level = _levels(depth, MANTISSA_BITS, REST_BITS, LANES) | outside * (_LAST_OCTAVE.value << KEPT_BITS)
        sign = (x[s] >> SIGN_SHIFT) & replicated(1 << LEVEL_BITS, LANES)
        fields += ((level & replicated((1 << LEVEL_BITS) - 1, LANES)) | sign,)
    store_planes(fields, dense, tile, tiles, index, inside, LEVEL_BITS + 1, SEGMENT, PADDED, LANES)
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
    ITEM_BYTES: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    WINDOW: tl.constexpr,
    POSITION_BITS: tl.constexpr,
    LANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT_ROWS: tl.constexpr,
    SEGMENT_ROWS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    PER_PAGE: tl.constexpr,
    PADDED: tl.constexpr,
    KEPT_BITS: tl.constexpr,
):
    SEGMENT: tl.constexpr = SEGMENT_ROWS * WIDTH
    STEP: tl.constexpr = SEGMENT_ROWS * COLUMNS // LANES
    PAGE_WORDS: tl.constexpr = ROWS * COLUMNS // LANES
    REST_BITS: tl.constexpr = MANTISSA_BITS - KEPT_BITS
    ROW: tl.constexpr = min(8 // LANES, HALF_PADDED)
    _, page = page_of(tile, pool, layer_stride, page_stride, pages, num_pages, PER_PAGE, ALIGNMENT)
    words = pointer_to(page, ITEM_BYTES * LANES)
    index, first, inside, real = words_of(
        tile % PER_PAGE, COLUMNS, SEGMENT_ROWS, WIDTH, 2, LANES, SEGMENT_ROWS_PADDED, HALF_PADDED
    )
    index, first, inside, real = halves_first(index), halves_first(first), halves_first(inside), halves_first(real)
    if ITEM_BYTES * LANES == 8:
        escaped, top = _encode_quads(
            tile, tiles, words, index, first, inside, real, dense, rest, (num_pages >> 31).to(tl.uint32),
            EXPONENT_BITS, MANTISSA_BITS, WINDOW, STEP, PAGE_WORDS, SEGMENT, WIDTH, HALF_PADDED, PADDED, KEPT_BITS,
        )  # fmt: skip
    else:
        escaped, top = _encode_words(
            tile, tiles, words, index, first, inside, real, dense, rest,
            EXPONENT_BITS, MANTISSA_BITS, WINDOW, LANES, STEP, PAGE_WORDS, SEGMENT, WIDTH, HALF_PADDED, PADDED,
            KEPT_BITS,
        )  # fmt: skip
    slot = tile.to(tl.int64) * (8 * SEGMENT)
    count = store_escapes(
        escaped, index, first, top, pointer_to(page, ITEM_BYTES), records + slot, extensions + slot,
        WINDOW, POSITION_BITS, EXPONENT_BITS, MANTISSA_BITS, LANES, STEP, ROW,
    )  # fmt: skip
    _, _, counts = sections_after(rest, tiles, REST_BITS, SEGMENT, WIDTH, 1)
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
    ITEM_BYTES: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    WINDOW: tl.constexpr,
    POSITION_BITS: tl.constexpr,
    LANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT_ROWS: tl.constexpr,
    SEGMENT_ROWS_PADDED: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_HALF_PADDED: tl.constexpr,
    VALUE_HALF_PADDED: tl.constexpr,
    KEY_PER_PAGE: tl.constexpr,
    VALUE_PER_PAGE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    KEY_KEPT_BITS: tl.constexpr,
    VALUE_KEPT_BITS: tl.constexpr,
):
    """Grid: key tiles, then value tiles.

    keys, values: uint8, the pools; strides: bytes; pages: int64 [num_pages], page ids; dense: uint8, dense parts of the
    first stage; rest: uint8, those of the second, all but the group offsets. Slots, one a tile: records uint16 and
    extensions uint8, as many as a tile has values.
    """
    tile = tl.program_id(0)
    if tile < key_tiles:
        _encode_tile(
            tile, key_tiles, keys, key_layer_stride, key_page_stride, pages, num_pages,
            key_dense, key_rest, key_records, key_extensions,
            ITEM_BYTES, EXPONENT_BITS, MANTISSA_BITS, WINDOW, POSITION_BITS, LANES, ALIGNMENT, ROWS,
            SEGMENT_ROWS, SEGMENT_ROWS_PADDED, KEY_COLUMNS, KEY_WIDTH, KEY_HALF_PADDED, KEY_PER_PAGE, KEY_PADDED,
            KEY_KEPT_BITS,
        )  # fmt: skip
    else:
        _encode_tile(
            tile - key_tiles, value_tiles, values, value_layer_stride, value_page_stride, pages, num_pages,
            value_dense, value_rest, value_records, value_extensions,
            ITEM_BYTES, EXPONENT_BITS, MANTISSA_BITS, WINDOW, POSITION_BITS, LANES, ALIGNMENT, ROWS,
            SEGMENT_ROWS, SEGMENT_ROWS_PADDED, VALUE_COLUMNS, VALUE_WIDTH, VALUE_HALF_PADDED, VALUE_PER_PAGE,
            VALUE_PADDED, VALUE_KEPT_BITS,
        )  # fmt: skip
