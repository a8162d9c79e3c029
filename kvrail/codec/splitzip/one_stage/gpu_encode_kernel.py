"""Triton kernel: dense part, records and extensions of keys and values, in one pass over the pages.

One program makes one tile. It reads its values once, into registers, and writes everything that has a fixed place; its
records and extensions go to a slot of its own, from where gpu_pack_kernel.py takes them.

On paper, a page of [64, 1024]: a value of bfloat16 moves 2 bytes in and 1.5 out (1.375 per channel). Compiled for sm_90
with one warp (eight words of a segment a thread, loads and stores of 16 bytes), a tile of 4,096 values takes about
1,150 instructions, one round of escapes included, and 1,550 per channel; of float8_e5m2 about 750. An H200 moves the
tile's bytes in the time in which it issues some 3,000 (16 bits) or 1,700 (8 bits), but half as many where they are
shifts and logic, as most are. With two warps the sums and scans also cross warps; registers are 65 to 130 a
thread with one.
"""

# Tuples that grow in unrolled loops have no type that mypy can follow.
# mypy: disable-error-code="assignment, misc, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvrail.codec.core.gpu_word_kernels import pointer_to, replicated
from kvrail.codec.splitzip.tiles.gpu_escape_kernels import store_escapes
from kvrail.codec.splitzip.tiles.gpu_plane_kernels import store_planes
from kvrail.codec.splitzip.tiles.gpu_tile_kernels import (
    channel_tops,
    halves_first,
    load_segment,
    page_of,
    sections_after,
    words_of,
)


@triton.jit
def _significand(word, G: tl.constexpr):
    mantissa = word & replicated((1 << G.MANTISSA_BITS) - 1, G.LANES)
    return mantissa | ((word >> G.EXPONENT_BITS) & replicated(1 << G.MANTISSA_BITS, G.LANES))


@triton.jit
def distance_of(word, top, G: tl.constexpr):
    """How far below their tops exponents lie, in the low CODE_BITS of lanes; bit EXPONENT_BITS: beyond the window.

    Bits between, and above the latter, are undefined.
    """
    EXPONENTS: tl.constexpr = ((1 << G.EXPONENT_BITS) - 1) << G.MANTISSA_BITS
    BEYOND: tl.constexpr = ((1 << G.EXPONENT_BITS) - (1 << G.CODE_BITS)) << G.MANTISSA_BITS
    exponents = word & replicated(EXPONENTS, G.LANES)
    if G.HALVES == 2:  # no exponent is above its column's top, so that no lane borrows
        distance = (top << G.MANTISSA_BITS) + replicated(BEYOND, G.LANES) - exponents
    else:
        distance = (top << G.MANTISSA_BITS) + replicated(EXPONENTS + (1 << G.MANTISSA_BITS), G.LANES) - exponents
        distance = (distance & replicated(EXPONENTS, G.LANES)) + replicated(BEYOND, G.LANES)
    return distance >> G.MANTISSA_BITS  # beyond the window the sum has carried


@triton.jit
def encode_tile(
    tile,
    tiles,
    pool,
    layer_stride,
    page_stride,
    pages,
    fixed_tops,
    num_pages,
    dense,
    records,
    extensions,
    G: tl.constexpr,
):
    """One tile; arguments as of gpu_kernels.tiles_kernel."""
    SEGMENT: tl.constexpr = G.SEGMENT_ROWS * G.WIDTH
    STEP: tl.constexpr = G.SEGMENT_ROWS * (G.COLUMNS if G.HALVES == 2 else G.WIDTH) // G.LANES
    PAGE_WORDS: tl.constexpr = G.ROWS * G.COLUMNS // G.LANES
    ROW: tl.constexpr = min(8 // G.LANES, G.HALF_PADDED)
    number = tile % G.PER_PAGE
    layer, page = page_of(tile, pool, layer_stride, page_stride, pages, num_pages, G)
    words = pointer_to(page, G.ITEM_BYTES * G.LANES)
    index, first, inside, real = words_of(number, G)
    index, first, inside, real = halves_first(index), halves_first(first), halves_first(inside), halves_first(real)
    x = ()
    for s in tl.static_range(8):  # all loads are under way before the first is used
        x += (load_segment(words, first + s * STEP, real, PAGE_WORDS, G.PADDED),)
    fields = ()
    for s in tl.static_range(8):
        fields += (_significand(x[s], G),)
    codes = store_planes(fields, dense, tile, tiles, index, inside, 1 + G.MANTISSA_BITS, SEGMENT, G.PADDED, G.LANES)
    tops, drops, counts = sections_after(codes, tiles, SEGMENT, G)
    if G.HALVES == 2:
        top = channel_tops(x, tops, drops, tile, G)
    else:
        top = replicated(tl.load(fixed_tops + layer).to(tl.uint32), G.LANES)
    fields = ()
    escaped = tl.zeros_like(x[0])
    for s in tl.static_range(8):
        distance = distance_of(x[s], top, G)
        if G.PADDED:
            distance = tl.where(real & (first + s * STEP < PAGE_WORDS), distance, 0)
        escaped += ((distance >> G.EXPONENT_BITS) & replicated(1, G.LANES)) * (1 << s)
        fields += (distance,)
    store_planes(fields, codes, tile, tiles, index, inside, G.CODE_BITS, SEGMENT, G.PADDED, G.LANES)
    slot = tile.to(tl.int64) * (8 * SEGMENT)
    count = store_escapes(
        escaped, index, first, top, pointer_to(page, G.ITEM_BYTES), records + slot, extensions + slot, STEP, ROW, G
    )
    tl.store(counts.to(tl.pointer_type(tl.uint16)) + tile, count.to(tl.uint16))
