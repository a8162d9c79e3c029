"""Triton: what the encode and decode kernels of all forms share: sections, and the places of a tile's values.

G: gpu_geometry.Geometry, a constant.

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
def sections_after(codes, tiles, SEGMENT: tl.constexpr, G: tl.constexpr):
    """Pointers to tops and drops (where HALVES is 2) and to counts, given one to the code planes."""
    tiles = tiles.to(tl.int64)
    tops = codes
    for level in tl.static_range(4):
        if G.CODE_BITS & (1 << level):
            tops += aligned(tiles * (SEGMENT << level))
    drops = tops + aligned(tiles)
    counts = drops + aligned(tiles * ((G.WIDTH + 1) // 2))
    if G.HALVES == 1:
        counts = tops
    return tops, drops, counts


@triton.jit
def page_of(tile, pool, layer_stride, page_stride, pages, num_pages, G: tl.constexpr):
    """Layer of a tile, and a pointer to the first byte of its page. Strides are bytes; ALIGNMENT divides them."""
    ALIGNMENT: tl.constexpr = G.ALIGNMENT  # Triton 3.6 takes no number here
    page = tile // G.PER_PAGE
    layer = page // num_pages
    offset = layer.to(tl.int64) * layer_stride + tl.load(pages + page % num_pages) * page_stride
    return layer, pool + tl.multiple_of(offset, ALIGNMENT)


@triton.jit
def words_of(number, G: tl.constexpr):
    """The words of a segment of tile `number` of a page.

    Gives four blocks [SEGMENT_ROWS, HALVES, HALF]: each word's number in the segment; its offset in the page, in words,
    where the segment is the first; whether it is one; whether, besides, its columns are the page's.
    """
    HALF: tl.constexpr = (G.WIDTH + G.HALVES * G.LANES - 1) // (G.HALVES * G.LANES)
    row = tl.arange(0, G.SEGMENT_ROWS_PADDED)[:, None, None]
    half = tl.arange(0, G.HALVES)[None, :, None]
    within = tl.arange(0, G.HALF_PADDED)[None, None, :]
    column = half * HALF + within
    inside = (row < G.SEGMENT_ROWS) & (within < HALF) & (column * G.LANES < G.WIDTH)
    index = row * (G.WIDTH // G.LANES) + column
    if G.HALVES == 2:
        first = row * (G.COLUMNS // G.LANES) + column + number * (G.WIDTH // G.LANES)
        real = inside & (column * G.LANES + number * G.WIDTH < G.COLUMNS)
    else:
        first = index + number * (8 * G.WIDTH // G.LANES)
        real = inside
    return index, first, inside, real


@triton.jit
def values_at(j, segment, number, G: tl.constexpr):
    """Offset in the page and column in the tile of values, given their numbers in a segment, and segments."""
    row, column = j // G.WIDTH, j % G.WIDTH
    if G.HALVES == 2:
        offset = (segment * G.SEGMENT_ROWS + row) * G.COLUMNS + number * G.WIDTH + column
    else:
        offset = (number * 8 + segment) * G.WIDTH + column
    return offset, column


@triton.jit
def column_tops(tops, drops, tile, column, mask, G: tl.constexpr):
    """Tops of single columns of a tile, int32, from its top and drops."""
    HALF: tl.constexpr = (G.WIDTH + 1) // 2
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
def channel_tops(x, tops, drops, tile, G: tl.constexpr):
    """Store the tile's top and drops; give every column's top, words [2, 1, HALF]. x: the words of all segments."""
    LANES: tl.constexpr = G.LANES  # loops are unrolled by constants of their own alone, before Triton 3.9
    LANE: tl.constexpr = 32 // LANES
    HALF_VALUES: tl.constexpr = (G.WIDTH + 1) // 2
    largest = ()
    if LANES == 2:  # as magnitudes, both lanes at once
        most = x[0] & 0x7FFF7FFF
        for s in tl.static_range(1, 8):
            most = larger_pair(most, x[s] & 0x7FFF7FFF)
        most = tl.reduce(most, 1, larger_pair)
        for lane in tl.static_range(LANES):
            largest += (((most >> (G.MANTISSA_BITS + lane * LANE)) & ((1 << G.EXPONENT_BITS) - 1)).to(tl.int32),)
    else:
        for lane in tl.static_range(LANES):
            # With the exponent on top, what a word holds below it does not change which is the largest.
            most = x[0] << (32 - G.EXPONENT_BITS - G.MANTISSA_BITS - lane * LANE)
            for s in tl.static_range(1, 8):
                most = tl.maximum(most, x[s] << (32 - G.EXPONENT_BITS - G.MANTISSA_BITS - lane * LANE))
            largest += ((tl.max(most, axis=1) >> (32 - G.EXPONENT_BITS)).to(tl.int32),)
    most = largest[0]
    for lane in tl.static_range(1, LANES):
        most = tl.maximum(most, largest[lane])
    top = tl.max(tl.max(most, axis=1), axis=0)
    drop = tl.minimum(top - largest[0], 15)
    for lane in tl.static_range(1, LANES):
        drop |= tl.minimum(top - largest[lane], 15) << (lane * LANE)
    half = tl.arange(0, 2)[:, None]
    within = tl.arange(0, G.HALF_PADDED)
    if G.WIDTH % 2:  # the last column of the second half is none
        drop = tl.where(half * HALF_VALUES + within[None, :] < G.WIDTH, drop, 0)
    both = tl.sum(drop << (4 * half), axis=0).to(tl.uint32)
    tl.store(tops + tile, top.to(tl.uint8))
    start = pointer_to(drops + tile.to(tl.int64) * HALF_VALUES, LANES)
    tl.store(start + within, packed(both, LANES), mask=within * LANES < HALF_VALUES)
    return (replicated(top, LANES) - drop).to(tl.uint32)[:, None, :]
