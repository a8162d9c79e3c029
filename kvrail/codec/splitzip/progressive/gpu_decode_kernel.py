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
    G: tl.constexpr,
):
    SEGMENT: tl.constexpr = G.SEGMENT_ROWS * G.WIDTH
    STEP: tl.constexpr = G.SEGMENT_ROWS * G.COLUMNS // G.LANES
    PAGE_WORDS: tl.constexpr = G.ROWS * G.COLUMNS // G.LANES
    LEVEL_BITS: tl.constexpr = _CODE_BITS.value + G.KEPT_BITS
    REST_BITS: tl.constexpr = G.MANTISSA_BITS - G.KEPT_BITS
    SIGN: tl.constexpr = 1 << (G.EXPONENT_BITS + G.MANTISSA_BITS)
    SIGN_SHIFT: tl.constexpr = G.EXPONENT_BITS + G.MANTISSA_BITS - LEVEL_BITS
    EXPONENTS: tl.constexpr = (1 << G.EXPONENT_BITS) - 1
    HALF_VALUES: tl.constexpr = (G.WIDTH + 1) // 2
    _, page = page_of(tile, pool, layer_stride, page_stride, pages, num_pages, G.PER_PAGE, G.ALIGNMENT)
    words = pointer_to(page, G.ITEM_BYTES * G.LANES)
    index, first, inside, real = words_of(
        tile % G.PER_PAGE, G.COLUMNS, G.SEGMENT_ROWS, G.WIDTH, 2, G.LANES, G.SEGMENT_ROWS_PADDED, G.HALF_PADDED
    )
    anchors, _ = load_planes(dense, tile, tiles, index, inside, LEVEL_BITS + 1, SEGMENT, G.PADDED, G.LANES)
    tops, drops, _ = sections_after(dense, tiles, LEVEL_BITS + 1, SEGMENT, G.WIDTH, 2)
    within = tl.arange(0, G.HALF_PADDED)[None, None, :]
    both = pointer_to(drops + tile.to(tl.int64) * HALF_VALUES, G.LANES) + within
    drop = spread(tl.load(both, mask=within * G.LANES < HALF_VALUES, other=0), G.LANES)
    drop = (drop >> (4 * tl.arange(0, 2)[None, :, None]).to(tl.uint32)) & replicated(15, G.LANES)
    highest = tl.load(tops + tile).to(tl.uint32) & EXPONENTS
    # Neither drop nor depth can borrow, whatever the payload holds: the bits above are there to be taken from.
    top = (replicated(highest + (1 << G.EXPONENT_BITS), G.LANES) - drop) & replicated(EXPONENTS, G.LANES)
    top = (top << G.MANTISSA_BITS) + replicated(SIGN + (1 << G.MANTISSA_BITS) - 1, G.LANES)
    for s in tl.static_range(8):
        anchor = field(anchors, s, LEVEL_BITS + 1, G.LANES)
        level = anchor & replicated((1 << LEVEL_BITS) - 1, G.LANES)
        word = (top - _middle_depth(level, G.MANTISSA_BITS, REST_BITS, G.LANES)) & replicated(SIGN - 1, G.LANES)
        word |= (anchor & replicated(1 << LEVEL_BITS, G.LANES)) << SIGN_SHIFT
        where = words + first + s * STEP
        if G.PADDED:
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
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Grid: key tiles, then value tiles.

    keys, values: uint8, the pools; strides: bytes; pages: int64 [num_pages], page ids; dense: uint8, dense parts.
    """
    tile = tl.program_id(0)
    if tile < key_tiles:
        _decode_tile(tile, key_tiles, keys, key_layer_stride, key_page_stride, pages, num_pages, key_dense, KEYS)
    else:
        _decode_tile(
            tile - key_tiles, value_tiles, values, value_layer_stride, value_page_stride, pages, num_pages,
            value_dense, VALUES,
        )  # fmt: skip
