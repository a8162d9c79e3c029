"""Triton kernel: payload to pages, keys and values in one launch.

One program restores one tile: first all values as if none were an escape, then, behind a barrier, those for which there
is a record. Counts and records are asked for before the rest is written, so that nothing waits for them later.

On paper, bfloat16 with four bits, a page of [64, 1024]: a value moves 1.5 bytes in and 2 out. Compiled for sm_90 with
two warps (four words of a segment a thread), a tile of 4,096 values takes about 900 instructions a warp, patches
included, with loads of 8 and stores of 16 bytes a thread; moving its 14 KB takes an H200 as long as it needs to issue
some 3,000. So memory, not arithmetic, should bound it.
"""

# Tuples that grow in unrolled loops have no type that mypy can follow.
# mypy: disable-error-code="assignment, misc, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvrail.codec.core.gpu_word_kernels import aligned, pointer_to, replicated, spread, store
from kvrail.codec.splitzip.tiles.gpu_escape_kernels import RECORDS_AT_ONCE, load_records, records_of
from kvrail.codec.splitzip.tiles.gpu_plane_kernels import field, fields_at, load_planes
from kvrail.codec.splitzip.tiles.gpu_tile_kernels import (
    column_tops,
    page_of,
    sections_after,
    values_at,
    words_of,
)


@triton.jit
def _escaped_values(
    record,
    beyond,
    live,
    dense,
    fixed_top,
    tops,
    drops,
    tile,
    tiles,
    G: tl.constexpr,
):
    """Offsets in the page and bits, int32, of the values that records stand for."""
    EXPONENTS: tl.constexpr = (1 << G.EXPONENT_BITS) - 1
    far = (record >> G.POSITION_BITS) + (beyond << (16 - G.POSITION_BITS))
    j8 = record & ((1 << G.POSITION_BITS) - 1)
    j, segment = j8 >> 3, j8 & 7
    offset, column = values_at(j, segment, tile % G.PER_PAGE, G)
    significand = fields_at(dense, tile, tiles, j, segment, live, 1 + G.MANTISSA_BITS, G.SEGMENT_ROWS * G.WIDTH)
    top = fixed_top
    if G.HALVES == 2:
        top = column_tops(tops, drops, tile, column, live, G)
    exponent = (top - (1 << G.CODE_BITS) - far) & EXPONENTS
    sign = (significand >> G.MANTISSA_BITS) << (G.EXPONENT_BITS + G.MANTISSA_BITS)
    return offset, sign | (exponent << G.MANTISSA_BITS) | (significand & ((1 << G.MANTISSA_BITS) - 1))


@triton.jit
def decode_tile(
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
    EXPONENTS: tl.constexpr = (1 << G.EXPONENT_BITS) - 1
    HALF_VALUES: tl.constexpr = (G.WIDTH + 1) // 2
    layer, page = page_of(tile, pool, layer_stride, page_stride, pages, num_pages, G)
    words = pointer_to(page, G.ITEM_BYTES * G.LANES)
    index, first, inside, real = words_of(tile % G.PER_PAGE, G)
    significands, codes = load_planes(
        dense, tile, tiles, index, inside, 1 + G.MANTISSA_BITS, SEGMENT, G.PADDED, G.LANES
    )
    distances, tops = load_planes(codes, tile, tiles, index, inside, G.CODE_BITS, SEGMENT, G.PADDED, G.LANES)
    tops, drops, counts = sections_after(codes, tiles, SEGMENT, G)
    groups = (counts + aligned(tiles.to(tl.int64) * 2)).to(tl.pointer_type(tl.uint32))
    count, wide, records, extensions = records_of(
        tile, counts.to(tl.pointer_type(tl.uint16)), groups, records, extensions
    )
    record, beyond, live = load_records(0, count, wide, records, extensions)  # on their way while the rest is written
    fixed_top = 0
    if G.HALVES == 2:
        within = tl.arange(0, G.HALF_PADDED)[None, None, :]
        both = pointer_to(drops + tile.to(tl.int64) * HALF_VALUES, G.LANES) + within
        drop = spread(tl.load(both, mask=within * G.LANES < HALF_VALUES, other=0), G.LANES)
        drop = (drop >> (4 * tl.arange(0, 2)[None, :, None]).to(tl.uint32)) & replicated(15, G.LANES)
        highest = tl.load(tops + tile).to(tl.uint32) & EXPONENTS
        # Two bits above the exponents: neither drop nor distance can borrow, whatever the payload holds.
        top = replicated(highest + (2 << G.EXPONENT_BITS), G.LANES) - drop
    else:
        fixed_top = tl.load(fixed_tops + layer).to(tl.int32)
        top = replicated(fixed_top.to(tl.uint32) + (2 << G.EXPONENT_BITS), G.LANES)
    for s in tl.static_range(8):
        significand = field(significands, s, 1 + G.MANTISSA_BITS, G.LANES)
        exponent = (top - field(distances, s, G.CODE_BITS, G.LANES)) & replicated(EXPONENTS, G.LANES)
        word = (significand & replicated((1 << G.MANTISSA_BITS) - 1, G.LANES)) | (exponent << G.MANTISSA_BITS)
        word |= (significand & replicated(1 << G.MANTISSA_BITS, G.LANES)) << G.EXPONENT_BITS
        store(words + first + s * STEP, word, real & (first + s * STEP < PAGE_WORDS), G.PADDED)
    if count > 0:
        tl.debug_barrier()  # other threads of the program wrote what the next overwrite
        values = pointer_to(page, G.ITEM_BYTES)
        for begin in range(0, count, RECORDS_AT_ONCE):
            if begin > 0:
                record, beyond, live = load_records(begin, count, wide, records, extensions)
            offset, value = _escaped_values(record, beyond, live, dense, fixed_top, tops, drops, tile, tiles, G)
            tl.store(values + offset, value.to(values.dtype.element_ty), mask=live)
