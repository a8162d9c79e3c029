"""Triton kernel: a second stage into the pages that hold the first, keys and values in one launch.

One program refines one tile. Each word is read, its low mantissa bits are replaced and it is written at once, so that
whoever reads the page meanwhile finds values of the one stage or of the other.
"""

# Tuples that grow in unrolled loops have no type that mypy can follow.
# mypy: disable-error-code="assignment, misc, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from codec.splitzip.gpu_decode_kernel import _field, _load_planes
from codec.splitzip.gpu_encode_kernel import _load_segment
from codec.splitzip.gpu_word_kernels import page_of, pointer_to, replicated, words_of


@triton.jit
def _refine_tile(
    tile,
    tiles,
    pool,
    layer_stride,
    page_stride,
    pages,
    num_pages,
    rest,
    ITEM_BYTES: tl.constexpr,
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
    REST_BITS: tl.constexpr,
):
    SEGMENT: tl.constexpr = SEGMENT_ROWS * WIDTH
    STEP: tl.constexpr = SEGMENT_ROWS * COLUMNS // LANES
    PAGE_WORDS: tl.constexpr = ROWS * COLUMNS // LANES
    _, page = page_of(tile, pool, layer_stride, page_stride, pages, num_pages, PER_PAGE, ALIGNMENT)
    words = pointer_to(page, ITEM_BYTES * LANES)
    index, first, inside, real = words_of(
        tile % PER_PAGE, COLUMNS, SEGMENT_ROWS, WIDTH, 2, LANES, SEGMENT_ROWS_PADDED, HALF_PADDED
    )
    x = ()
    for s in tl.static_range(8):  # all loads are under way before the first is used
        x += (_load_segment(words, first + s * STEP, real, PAGE_WORDS, PADDED),)
    planes, _ = _load_planes(rest, tile, tiles, index, inside, REST_BITS, SEGMENT, PADDED, LANES)
    for s in tl.static_range(8):
        low = _field(planes, s, REST_BITS, LANES)
        word = (x[s] & (0xFFFFFFFF - replicated((1 << REST_BITS) - 1, LANES))) | low
        where = words + first + s * STEP
        if PADDED:
            tl.store(where, word.to(words.dtype.element_ty), mask=real & (first + s * STEP < PAGE_WORDS))
        else:
            tl.store(where, word.to(words.dtype.element_ty))


@triton.jit(
    do_not_specialize=[
        "key_layer_stride",
        "value_layer_stride",
        "key_page_stride",
        "value_page_stride",
        "num_pages",
        "key_tiles",
        "value_tiles",
    ]
)
def refine_kernel(
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
    key_rest,
    value_rest,
    ITEM_BYTES: tl.constexpr,
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

    keys, values: uint8, the pools; strides: bytes; pages: int64 [num_pages], page ids; rest: uint8, parts of the second
    stage.
    """
    tile = tl.program_id(0)
    if tile < key_tiles:
        _refine_tile(
            tile, key_tiles, keys, key_layer_stride, key_page_stride, pages, num_pages, key_rest,
            ITEM_BYTES, LANES, ALIGNMENT, ROWS, SEGMENT_ROWS, SEGMENT_ROWS_PADDED,
            KEY_COLUMNS, KEY_WIDTH, KEY_HALF_PADDED, KEY_PER_PAGE, KEY_PADDED, MANTISSA_BITS - KEY_KEPT_BITS,
        )  # fmt: skip
    else:
        _refine_tile(
            tile - key_tiles, value_tiles, values, value_layer_stride, value_page_stride, pages, num_pages, value_rest,
            ITEM_BYTES, LANES, ALIGNMENT, ROWS, SEGMENT_ROWS, SEGMENT_ROWS_PADDED,
            VALUE_COLUMNS, VALUE_WIDTH, VALUE_HALF_PADDED, VALUE_PER_PAGE, VALUE_PADDED,
            MANTISSA_BITS - VALUE_KEPT_BITS,
        )  # fmt: skip
