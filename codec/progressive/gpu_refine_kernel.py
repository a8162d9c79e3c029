"""Triton kernel: a second stage into the pages that hold the first, keys and values in one launch.

One program refines one tile. Each word is read, its low mantissa bits are replaced and it is written at once; then,
behind a barrier, the exponents of escapes are lowered. So whoever reads the page meanwhile finds values of the one
stage or of the other, or an escape's mantissa of the second under its exponent of the first. Counts and records are
asked for before the words are written, so that nothing waits for them later.
"""

# Tuples that grow in unrolled loops have no type that mypy can follow.
# mypy: disable-error-code="assignment, misc, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from codec.splitzip.gpu_decode_kernel import RECORDS_AT_ONCE, field, load_planes, load_records, records_of
from codec.splitzip.gpu_encode_kernel import load_segment
from codec.splitzip.gpu_word_kernels import (
    RUNTIME,
    aligned,
    page_of,
    pointer_to,
    replicated,
    sections_after,
    values_at,
    words_of,
)


@triton.jit
def _lower_escapes(
    values,
    record,
    beyond,
    live,
    tile,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    POSITION_BITS: tl.constexpr,
    SEGMENT_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_PAGE: tl.constexpr,
):
    """Take the exponents of the values that records stand for from the window's lower end to where they lie.

    values: pointer to the page's first.
    """
    EXPONENTS: tl.constexpr = ((1 << EXPONENT_BITS) - 1) << MANTISSA_BITS
    far = (record >> POSITION_BITS) + (beyond << (16 - POSITION_BITS))
    j8 = record & ((1 << POSITION_BITS) - 1)
    offset, _ = values_at(j8 >> 3, 0, j8 & 7, tile % PER_PAGE, SEGMENT_ROWS, COLUMNS, WIDTH, 2, 1)
    value = tl.load(values + offset, mask=live, other=0).to(tl.int32)
    lowered = tl.maximum((value & EXPONENTS) - ((far + 1) << MANTISSA_BITS), 0)
    tl.store(values + offset, (value & ~EXPONENTS | lowered).to(values.dtype.element_ty), mask=live)


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
    records,
    extensions,
    ITEM_BYTES: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
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
    REST_BITS: tl.constexpr = MANTISSA_BITS - KEPT_BITS
    SEGMENT: tl.constexpr = SEGMENT_ROWS * WIDTH
    STEP: tl.constexpr = SEGMENT_ROWS * COLUMNS // LANES
    PAGE_WORDS: tl.constexpr = ROWS * COLUMNS // LANES
    _, page = page_of(tile, pool, layer_stride, page_stride, pages, num_pages, PER_PAGE, ALIGNMENT)
    words = pointer_to(page, ITEM_BYTES * LANES)
    index, first, inside, real = words_of(
        tile % PER_PAGE, COLUMNS, SEGMENT_ROWS, WIDTH, 2, LANES, SEGMENT_ROWS_PADDED, HALF_PADDED
    )
    x = ()
    if REST_BITS > 0:
        for s in tl.static_range(8):  # all loads are under way before the first is used
            x += (load_segment(words, first + s * STEP, real, PAGE_WORDS, PADDED),)
        planes, _ = load_planes(rest, tile, tiles, index, inside, REST_BITS, SEGMENT, PADDED, LANES)
    _, _, counts = sections_after(rest, tiles, REST_BITS, SEGMENT, WIDTH, 1)
    groups = (counts + aligned(tiles.to(tl.int64) * 2)).to(tl.pointer_type(tl.uint32))
    count, wide, records, extensions = records_of(
        tile, counts.to(tl.pointer_type(tl.uint16)), groups, records, extensions
    )
    record, beyond, live = load_records(0, count, wide, records, extensions)
    if REST_BITS > 0:
        for s in tl.static_range(8):
            low = field(planes, s, REST_BITS, LANES)
            word = x[s] ^ ((x[s] ^ low) & replicated((1 << REST_BITS) - 1, LANES))
            where = words + first + s * STEP
            if PADDED:
                tl.store(where, word.to(words.dtype.element_ty), mask=real & (first + s * STEP < PAGE_WORDS))
            else:
                tl.store(where, word.to(words.dtype.element_ty))
    if count > 0:
        tl.debug_barrier()  # other threads of the program wrote what is changed now
        values = pointer_to(page, ITEM_BYTES)
        for begin in range(0, count, RECORDS_AT_ONCE):
            if begin > 0:
                record, beyond, live = load_records(begin, count, wide, records, extensions)
            _lower_escapes(
                values, record, beyond, live, tile,
                EXPONENT_BITS, MANTISSA_BITS, POSITION_BITS, SEGMENT_ROWS, COLUMNS, WIDTH, PER_PAGE,
            )  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
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
    key_records,
    value_records,
    key_extensions,
    value_extensions,
    ITEM_BYTES: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
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

    keys, values: uint8, the pools; strides: bytes; pages: int64 [num_pages], page ids; rest: uint8, parts of the second
    stage; records uint16, extensions uint8: of a tensor's tiles, in order. Every record must lie on a value.
    """
    tile = tl.program_id(0)
    if tile < key_tiles:
        _refine_tile(
            tile, key_tiles, keys, key_layer_stride, key_page_stride, pages, num_pages,
            key_rest, key_records, key_extensions,
            ITEM_BYTES, EXPONENT_BITS, MANTISSA_BITS, POSITION_BITS, LANES, ALIGNMENT, ROWS,
            SEGMENT_ROWS, SEGMENT_ROWS_PADDED, KEY_COLUMNS, KEY_WIDTH, KEY_HALF_PADDED, KEY_PER_PAGE, KEY_PADDED,
            KEY_KEPT_BITS,
        )  # fmt: skip
    else:
        _refine_tile(
            tile - key_tiles, value_tiles, values, value_layer_stride, value_page_stride, pages, num_pages,
            value_rest, value_records, value_extensions,
            ITEM_BYTES, EXPONENT_BITS, MANTISSA_BITS, POSITION_BITS, LANES, ALIGNMENT, ROWS,
            SEGMENT_ROWS, SEGMENT_ROWS_PADDED, VALUE_COLUMNS, VALUE_WIDTH, VALUE_HALF_PADDED, VALUE_PER_PAGE,
            VALUE_PADDED, VALUE_KEPT_BITS,
        )  # fmt: skip
