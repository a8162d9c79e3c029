"""Triton: what the encode and decode kernels of all forms share: sections, and the places of a tile's values.

The words (kvrail/codec/core/gpu_word_kernels.py) of a segment are a block [SEGMENT_ROWS, HALVES, HALF], padded to
powers of two. Per channel the columns of a tile are two halves, so that the two columns whose drops share a byte meet
by a sum over HALVES. A run of a page is one row, one half.
"""

# Tuples that grow in unrolled loops have no type that mypy can follow.
# mypy: disable-error-code="assignment, misc, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvrail.codec.core.gpu_word_kernels import aligned, larger_pair, packed, pointer_to, replicated

RUNTIME = [
    "key_layer_stride",
    "value_layer_stride",
    "key_page_stride",
    "value_page_stride",
    "num_pages",
    "num_layers",
    "key_tiles",
    "value_tiles",
]
"""Arguments of kernels of tiles whose values are not compiled in."""


@triton.jit
def sections_after(
    codes, tiles, CODE_BITS: tl.constexpr, SEGMENT: tl.constexpr, WIDTH: tl.constexpr, HALVES: tl.constexpr
):
    """Pointers to tops and drops (where HALVES is 2) and to counts, given one to the code planes."""
    tiles = tiles.to(tl.int64)
    tops = codes
    for level in tl.static_range(4):
        if CODE_BITS & (1 << level):
            tops += aligned(tiles * (SEGMENT << level))
    drops = tops + aligned(tiles)
    counts = drops + aligned(tiles * ((WIDTH + 1) // 2))
    if HALVES == 1:
        counts = tops
    return tops, drops, counts


@triton.jit
def page_of(tile, pool, layer_stride, page_stride, pages, num_pages, PER_PAGE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Layer of a tile, and a pointer to the first byte of its page. Strides are bytes; ALIGNMENT divides them."""
    page = tile // PER_PAGE
    layer = page // num_pages
    offset = layer.to(tl.int64) * layer_stride + tl.load(pages + page % num_pages) * page_stride
    return layer, pool + tl.multiple_of(offset, ALIGNMENT)


@triton.jit
def words_of(
    number,
    COLUMNS: tl.constexpr,
    SEGMENT_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALVES: tl.constexpr,
    LANES: tl.constexpr,
    SEGMENT_ROWS_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """The words of a segment of tile `number` of a page.

    Gives four blocks [SEGMENT_ROWS, HALVES, HALF]: each word's number in the segment; its offset in the page, in words,
    where the segment is the first; whether it is one; whether, besides, its columns are the page's.
    """
    HALF: tl.constexpr = (WIDTH + HALVES * LANES - 1) // (HALVES * LANES)
    row = tl.arange(0, SEGMENT_ROWS_PADDED)[:, None, None]
    half = tl.arange(0, HALVES)[None, :, None]
    within = tl.arange(0, HALF_PADDED)[None, None, :]
    column = half * HALF + within
    inside = (row < SEGMENT_ROWS) & (within < HALF) & (column * LANES < WIDTH)
    index = row * (WIDTH // LANES) + column
    if HALVES == 2:
        first = row * (COLUMNS // LANES) + column + number * (WIDTH // LANES)
        real = inside & (column * LANES + number * WIDTH < COLUMNS)
    else:
        first = index + number * (8 * WIDTH // LANES)
        real = inside
    return index, first, inside, real


@triton.jit
def values_at(
    index,
    lane,
    segment,
    number,
    SEGMENT_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALVES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Offset in the page and column in the tile of values, given their words' numbers, lanes and segments."""
    j = index * LANES + lane
    row, column = j // WIDTH, j % WIDTH
    if HALVES == 2:
        offset = (segment * SEGMENT_ROWS + row) * COLUMNS + number * WIDTH + column
    else:
        offset = (number * 8 + segment) * WIDTH + column
    return offset, column


@triton.jit
def column_tops(tops, drops, tile, column, mask, WIDTH: tl.constexpr):
    """Tops of single columns of a tile, int32, from its top and drops."""
    HALF: tl.constexpr = (WIDTH + 1) // 2
    both = tl.load(drops + tile.to(tl.int64) * HALF + column % HALF, mask=mask, other=0).to(tl.int32)
    return tl.load(tops + tile).to(tl.int32) - ((both >> (column // HALF * 4)) & 15)


@triton.jit
def load_segment(words, where, real, PAGE_WORDS: tl.constexpr, PADDED: tl.constexpr):
    """One segment's words, zeros for padding."""
    mask = (real & (where < PAGE_WORDS)) if PADDED else None
    return tl.load(words + where, mask=mask, other=0 if PADDED else None).to(tl.uint32)


@triton.jit
def halves_first(block):
    """[SEGMENT_ROWS, HALVES, HALF] as [HALVES, SEGMENT_ROWS, HALF].

    Of such a block neighbouring threads have neighbouring words of a segment, as the order of records wants it.
    """
    return tl.permute(block, (1, 0, 2))


@triton.jit
def channel_tops(
    x,
    tops,
    drops,
    tile,
    WIDTH: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store the tile's top and drops; give every column's top, words [2, 1, HALF]. x: the words of all segments."""
    LANE: tl.constexpr = 32 // LANES
    HALF_VALUES: tl.constexpr = (WIDTH + 1) // 2
    largest = ()
    if LANES == 2:  # as magnitudes, both lanes at once
        most = x[0] & 0x7FFF7FFF
        for s in tl.static_range(1, 8):
            most = larger_pair(most, x[s] & 0x7FFF7FFF)
        most = tl.reduce(most, 1, larger_pair)
        for lane in tl.static_range(LANES):
            largest += (((most >> (MANTISSA_BITS + lane * LANE)) & ((1 << EXPONENT_BITS) - 1)).to(tl.int32),)
    else:
        for lane in tl.static_range(LANES):
            # With the exponent on top, what a word holds below it does not change which is the largest.
            most = x[0] << (32 - EXPONENT_BITS - MANTISSA_BITS - lane * LANE)
            for s in tl.static_range(1, 8):
                most = tl.maximum(most, x[s] << (32 - EXPONENT_BITS - MANTISSA_BITS - lane * LANE))
            largest += ((tl.max(most, axis=1) >> (32 - EXPONENT_BITS)).to(tl.int32),)
    most = largest[0]
    for lane in tl.static_range(1, LANES):
        most = tl.maximum(most, largest[lane])
    top = tl.max(tl.max(most, axis=1), axis=0)
    drop = tl.minimum(top - largest[0], 15)
    for lane in tl.static_range(1, LANES):
        drop |= tl.minimum(top - largest[lane], 15) << (lane * LANE)
    half = tl.arange(0, 2)[:, None]
    within = tl.arange(0, HALF_PADDED)
    if WIDTH % 2:  # the last column of the second half is none
        drop = tl.where(half * HALF_VALUES + within[None, :] < WIDTH, drop, 0)
    both = tl.sum(drop << (4 * half), axis=0).to(tl.uint32)
    tl.store(tops + tile, top.to(tl.uint8))
    start = pointer_to(drops + tile.to(tl.int64) * HALF_VALUES, LANES)
    tl.store(start + within, packed(both, LANES), mask=within * LANES < HALF_VALUES)
    return (replicated(top, LANES) - drop).to(tl.uint32)[:, None, :]
