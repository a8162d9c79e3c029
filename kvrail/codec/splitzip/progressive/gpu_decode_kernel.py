"""Triton kernel: a first stage to pages, keys and values in one launch.

One program restores one tile, as in one_stage/gpu_decode_kernel.py, of the parts that `tiles` has. All that it reads
has a fixed place.
"""

# Tuples that grow in unrolled loops have no type that mypy can follow.
# mypy: disable-error-code="assignment, misc, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvrail.codec.core.gpu_word_kernels import clamped, pointer_to, replicated, spread
from kvrail.codec.splitzip.progressive.format import CODE_BITS
from kvrail.codec.splitzip.tiles.gpu_plane_kernels import field, load_planes
from kvrail.codec.splitzip.tiles.gpu_tile_kernels import RUNTIME, page_of, sections_after, words_of

_CODE_BITS = tl.constexpr(CODE_BITS)


@triton.jit
def _middle_depth(level, MANTISSA_BITS: tl.constexpr, REST_BITS: tl.constexpr, LANES: tl.constexpr):
    """README.md, "Levels": the depth that the values of a level get."""
    OCTAVE: tl.constexpr = 1 << MANTISSA_BITS
    depth = level
    if REST_BITS > 0:
        place = level << REST_BITS
        after = place + replicated(1 << (REST_BITS - 1), LANES)
        first = clamped(after, OCTAVE // 2, 3 * OCTAVE // 2, LANES)
        second = clamped(after, 2 * OCTAVE, 3 * OCTAVE, LANES)
        over = ((first + second - replicated(5 * OCTAVE // 2, LANES)) >> 1) & replicated(2 * OCTAVE - 1, LANES)
        depth = after - over - replicated(1, LANES)
    return depth


@triton.jit
def _decode_tile(
    tile,
    tiles,
    pool,
    layer_stride,
    page_stride,
    pages,
    num_pages,
    dense,
    ITEM_BYTES: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
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
    LEVEL_BITS: tl.constexpr = _CODE_BITS.value + KEPT_BITS
    REST_BITS: tl.constexpr = MANTISSA_BITS - KEPT_BITS
    SIGN: tl.constexpr = 1 << (EXPONENT_BITS + MANTISSA_BITS)
    SIGN_SHIFT: tl.constexpr = EXPONENT_BITS + MANTISSA_BITS - LEVEL_BITS
    EXPONENTS: tl.constexpr = (1 << EXPONENT_BITS) - 1
    HALF_VALUES: tl.constexpr = (WIDTH + 1) // 2
    _, page = page_of(tile, pool, layer_stride, page_stride, pages, num_pages, PER_PAGE, ALIGNMENT)
    words = pointer_to(page, ITEM_BYTES * LANES)
    index, first, inside, real = words_of(
        tile % PER_PAGE, COLUMNS, SEGMENT_ROWS, WIDTH, 2, LANES, SEGMENT_ROWS_PADDED, HALF_PADDED
    )
    anchors, _ = load_planes(dense, tile, tiles, index, inside, LEVEL_BITS + 1, SEGMENT, PADDED, LANES)
    tops, drops, _ = sections_after(dense, tiles, LEVEL_BITS + 1, SEGMENT, WIDTH, 2)
    within = tl.arange(0, HALF_PADDED)[None, None, :]
    both = pointer_to(drops + tile.to(tl.int64) * HALF_VALUES, LANES) + within
    drop = spread(tl.load(both, mask=within * LANES < HALF_VALUES, other=0), LANES)
    drop = (drop >> (4 * tl.arange(0, 2)[None, :, None]).to(tl.uint32)) & replicated(15, LANES)
    highest = tl.load(tops + tile).to(tl.uint32) & EXPONENTS
    # Neither drop nor depth can borrow, whatever the payload holds: the bits above are there to be taken from.
    top = (replicated(highest + (1 << EXPONENT_BITS), LANES) - drop) & replicated(EXPONENTS, LANES)
    top = (top << MANTISSA_BITS) + replicated(SIGN + (1 << MANTISSA_BITS) - 1, LANES)
    for s in tl.static_range(8):
        anchor = field(anchors, s, LEVEL_BITS + 1, LANES)
        level = anchor & replicated((1 << LEVEL_BITS) - 1, LANES)
        word = (top - _middle_depth(level, MANTISSA_BITS, REST_BITS, LANES)) & replicated(SIGN - 1, LANES)
        word |= (anchor & replicated(1 << LEVEL_BITS, LANES)) << SIGN_SHIFT
        where = words + first + s * STEP
        if PADDED:
            tl.store(where, word.to(words.dtype.element_ty), mask=real & (first + s * STEP < PAGE_WORDS))
        else:
            tl.store(where, word.to(words.dtype.element_ty))


@triton.jit(do_not_specialize=RUNTIME)
def decode_anchor_kernel(
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
    ITEM_BYTES: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
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

    keys, values: uint8, the pools; strides: bytes; pages: int64 [num_pages], page ids; dense: uint8, dense parts.
    """
    tile = tl.program_id(0)
    if tile < key_tiles:
        _decode_tile(
            tile, key_tiles, keys, key_layer_stride, key_page_stride, pages, num_pages,
            key_dense,
            ITEM_BYTES, EXPONENT_BITS, MANTISSA_BITS, LANES, ALIGNMENT, ROWS,
            SEGMENT_ROWS, SEGMENT_ROWS_PADDED, KEY_COLUMNS, KEY_WIDTH, KEY_HALF_PADDED, KEY_PER_PAGE, KEY_PADDED,
            KEY_KEPT_BITS,
        )  # fmt: skip
    else:
        _decode_tile(
            tile - key_tiles, value_tiles, values, value_layer_stride, value_page_stride, pages, num_pages,
            value_dense,
            ITEM_BYTES, EXPONENT_BITS, MANTISSA_BITS, LANES, ALIGNMENT, ROWS,
            SEGMENT_ROWS, SEGMENT_ROWS_PADDED, VALUE_COLUMNS, VALUE_WIDTH, VALUE_HALF_PADDED, VALUE_PER_PAGE,
            VALUE_PADDED, VALUE_KEPT_BITS,
        )  # fmt: skip
