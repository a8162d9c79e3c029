"""Triton kernel: both stages to pages, keys and values in one launch.

One program restores one tile, as in one_stage/gpu_decode_kernel.py, of the parts that `tiles` has: first all values as
if none were an escape, then, behind a barrier, those for which there is a record. Nothing is read of the pages. Whoever
reads them meanwhile finds values of the stage that was there or of this one, or an escape's mantissa under the exponent
of the first stage.

On paper, bfloat16, a page of [64, 1024]: a value moves 1.43 bytes in and 2 out. Compiled for sm_90 with two warps, a
tile of 4,096 values takes about 860 instructions a warp, patches included, 470 of them of integers and logic. Moving
its 14 KB takes an H200 as long as it needs to issue some 3,000, or 1,500 of those.
"""

# Tuples that grow in unrolled loops have no type that mypy can follow.
# mypy: disable-error-code="assignment, misc, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvrail.codec.core.gpu_word_kernels import aligned, clamped, half_of_quad, pointer_to, replicated, risen, spread
from kvrail.codec.splitzip.progressive.format import CODE_BITS
from kvrail.codec.splitzip.tiles.gpu_escape_kernels import RECORDS_AT_ONCE, load_records, records_of
from kvrail.codec.splitzip.tiles.gpu_plane_kernels import field, fields_at, load_planes
from kvrail.codec.splitzip.tiles.gpu_tile_kernels import (
    RUNTIME,
    column_tops,
    page_of,
    sections_after,
    values_at,
    words_of,
)

_CODE_BITS = tl.constexpr(CODE_BITS)


@triton.jit
def _magnitudes(top, anchor, LEVEL_BITS: tl.constexpr, REST_BITS: tl.constexpr, LANES: tl.constexpr):
    """README.md, "Levels": exponents and first mantissa bits of what anchors name, in place; below them are others.

    top: of the highest level. Sums of lanes may reach into the next one: what is taken from them last brings it back.
    """
    LEVELS: tl.constexpr = (1 << LEVEL_BITS) - 1
    if REST_BITS > 0:
        HALF: tl.constexpr = (1 << (LEVEL_BITS - _CODE_BITS.value + REST_BITS)) // 4  # of an octave, as levels are here
        level = (anchor << (REST_BITS - 1)) & replicated(LEVELS << (REST_BITS - 1), LANES)  # half of what one is worth
        first = clamped(level, HALF, 3 * HALF, LANES)
        second = clamped(level, 4 * HALF, 6 * HALF, LANES)
        word = top - replicated(5 * HALF - (1 << (REST_BITS - 1)), LANES) + first + second - level * 2
    else:
        word = top - (anchor & replicated(LEVELS, LANES))
    return word


@triton.jit
def _quad_magnitudes(top, level, zero, MANTISSA_BITS: tl.constexpr, REST_BITS: tl.constexpr):
    """As _magnitudes, given levels in two lanes and tops as _store_quads has them. zero: as of `risen`."""
    HALF: tl.constexpr = (1 << MANTISSA_BITS) // 4
    level = level << (REST_BITS - 1)
    return top + risen(level, HALF, 2 * HALF, zero) + risen(level, 4 * HALF, 2 * HALF, zero) - level * 2


@triton.jit
def _store_quads(
    anchors,
    rests,
    highest,
    drop,
    words,
    first,
    real,
    zero,
    G: tl.constexpr,
    STEP: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
):
    """As _store_words, of quads: fields are made of planes four values at a time."""
    LEVEL_BITS: tl.constexpr = _CODE_BITS.value + G.KEPT_BITS
    REST_BITS: tl.constexpr = G.MANTISSA_BITS - G.KEPT_BITS
    SIGN: tl.constexpr = 1 << (G.EXPONENT_BITS + G.MANTISSA_BITS)
    EXPONENTS: tl.constexpr = (1 << G.EXPONENT_BITS) - 1
    MIDDLE: tl.constexpr = (1 << G.MANTISSA_BITS) - (1 << (REST_BITS - 1))  # of the highest level
    tops = ()
    for part in tl.static_range(2):
        top = replicated(highest + (1 << G.EXPONENT_BITS), 2) - half_of_quad(drop, 0, part)  # bits above, as there
        tops += (((top & replicated(EXPONENTS, 2)) << G.MANTISSA_BITS) + replicated(SIGN + MIDDLE, 2),)
    for s in tl.static_range(8):
        anchor = field(anchors, s, LEVEL_BITS + 1, 4)
        level = anchor & replicated((1 << LEVEL_BITS) - 1, 4)
        upper = (anchor << (7 - LEVEL_BITS)) & replicated(1 << 7, 4)
        if REST_BITS > 8:
            upper |= field(rests[8:], s, REST_BITS - 8, 4)
        lower = field(rests, s, min(REST_BITS, 8), 4)
        halves = ()
        for part in tl.static_range(2):
            half = _quad_magnitudes(tops[part], half_of_quad(level, 0, part), zero, G.MANTISSA_BITS, REST_BITS)
            half = (half & replicated(SIGN - (1 << REST_BITS), 2)) | half_of_quad(lower, upper, part)
            halves += (half.to(tl.uint64),)
        where = first + s * STEP
        if G.PADDED:
            tl.store(words + where, halves[0] | (halves[1] << 32), mask=real & (where < PAGE_WORDS))
        else:
            tl.store(words + where, halves[0] | (halves[1] << 32))


@triton.jit
def _store_words(
    anchors,
    rests,
    highest,
    drop,
    words,
    first,
    real,
    G: tl.constexpr,
    STEP: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
):
    """Store a tile's values as if none were an escape. highest: the tile's top; drop: its columns', in lanes."""
    LEVEL_BITS: tl.constexpr = _CODE_BITS.value + G.KEPT_BITS
    REST_BITS: tl.constexpr = G.MANTISSA_BITS - G.KEPT_BITS
    SIGN: tl.constexpr = 1 << (G.EXPONENT_BITS + G.MANTISSA_BITS)
    SIGN_SHIFT: tl.constexpr = G.EXPONENT_BITS + G.MANTISSA_BITS - LEVEL_BITS
    EXPONENTS: tl.constexpr = (1 << G.EXPONENT_BITS) - 1
    # Neither drop nor level can borrow, whatever the payload holds: the bits above are there to be taken from.
    top = (replicated(highest + (1 << G.EXPONENT_BITS), G.LANES) - drop) & replicated(EXPONENTS, G.LANES)
    top = (top << G.MANTISSA_BITS) + replicated(SIGN + (1 << G.MANTISSA_BITS) - (1 << REST_BITS), G.LANES)
    for s in tl.static_range(8):
        anchor = field(anchors, s, LEVEL_BITS + 1, G.LANES, AT_ONCE=True)
        word = (anchor & replicated(1 << LEVEL_BITS, G.LANES)) << SIGN_SHIFT
        if REST_BITS > 0:
            word |= field(rests, s, REST_BITS, G.LANES, AT_ONCE=True)
        word |= _magnitudes(top, anchor, LEVEL_BITS, REST_BITS, G.LANES) & replicated(SIGN - (1 << REST_BITS), G.LANES)
        where = words + first + s * STEP
        if G.PADDED:
            tl.store(where, word.to(words.dtype.element_ty), mask=real & (first + s * STEP < PAGE_WORDS))
        else:
            tl.store(where, word.to(words.dtype.element_ty))


@triton.jit
def _escaped_values(
    record,
    beyond,
    live,
    dense,
    rest,
    tops,
    drops,
    tile,
    tiles,
    G: tl.constexpr,
):
    """Offsets in the page and bits, int32, of the values that records stand for."""
    LEVEL_BITS: tl.constexpr = _CODE_BITS.value + G.KEPT_BITS
    REST_BITS: tl.constexpr = G.MANTISSA_BITS - G.KEPT_BITS
    VALUES: tl.constexpr = G.SEGMENT_ROWS * G.WIDTH
    far = (record >> G.POSITION_BITS) + (beyond << (16 - G.POSITION_BITS))
    j8 = record & ((1 << G.POSITION_BITS) - 1)
    j, segment = j8 >> 3, j8 & 7
    offset, column = values_at(j, 0, segment, tile % G.PER_PAGE, G.SEGMENT_ROWS, G.COLUMNS, G.WIDTH, 2, 1)
    anchor = fields_at(dense, tile, tiles, j, segment, live, LEVEL_BITS + 1, VALUES)
    low = fields_at(rest, tile, tiles, j, segment, live, REST_BITS, VALUES)
    top = column_tops(tops, drops, tile, column, live, G.WIDTH)
    exponent = (top - G.WINDOW - far) & ((1 << G.EXPONENT_BITS) - 1)
    kept = ~anchor & ((1 << G.KEPT_BITS) - 1)  # levels are counted downwards
    sign = (anchor >> LEVEL_BITS) << (G.EXPONENT_BITS + G.MANTISSA_BITS)
    return offset, sign | (exponent << G.MANTISSA_BITS) | (kept << REST_BITS) | low


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
    rest,
    records,
    extensions,
    G: tl.constexpr,
):
    SEGMENT: tl.constexpr = G.SEGMENT_ROWS * G.WIDTH
    STEP: tl.constexpr = G.SEGMENT_ROWS * G.COLUMNS // G.LANES
    PAGE_WORDS: tl.constexpr = G.ROWS * G.COLUMNS // G.LANES
    LEVEL_BITS: tl.constexpr = _CODE_BITS.value + G.KEPT_BITS
    REST_BITS: tl.constexpr = G.MANTISSA_BITS - G.KEPT_BITS
    EXPONENTS: tl.constexpr = (1 << G.EXPONENT_BITS) - 1
    HALF_VALUES: tl.constexpr = (G.WIDTH + 1) // 2
    _, page = page_of(tile, pool, layer_stride, page_stride, pages, num_pages, G.PER_PAGE, G.ALIGNMENT)
    words = pointer_to(page, G.ITEM_BYTES * G.LANES)
    index, first, inside, real = words_of(
        tile % G.PER_PAGE, G.COLUMNS, G.SEGMENT_ROWS, G.WIDTH, 2, G.LANES, G.SEGMENT_ROWS_PADDED, G.HALF_PADDED
    )
    anchors, _ = load_planes(dense, tile, tiles, index, inside, LEVEL_BITS + 1, SEGMENT, G.PADDED, G.LANES)
    rests, _ = load_planes(rest, tile, tiles, index, inside, REST_BITS, SEGMENT, G.PADDED, G.LANES)
    tops, drops, _ = sections_after(dense, tiles, LEVEL_BITS + 1, SEGMENT, G.WIDTH, 2)
    _, _, counts = sections_after(rest, tiles, REST_BITS, SEGMENT, G.WIDTH, 1)
    groups = (counts + aligned(tiles.to(tl.int64) * 2)).to(tl.pointer_type(tl.uint32))
    count, wide, records, extensions = records_of(
        tile, counts.to(tl.pointer_type(tl.uint16)), groups, records, extensions
    )
    record, beyond, live = load_records(0, count, wide, records, extensions)  # on their way while the rest is written
    within = tl.arange(0, G.HALF_PADDED)[None, None, :]
    both = pointer_to(drops + tile.to(tl.int64) * HALF_VALUES, G.LANES) + within
    drop = spread(tl.load(both, mask=within * G.LANES < HALF_VALUES, other=0), G.LANES)
    drop = (drop >> (4 * tl.arange(0, 2)[None, :, None]).to(tl.uint32)) & replicated(15, G.LANES)
    highest = tl.load(tops + tile).to(tl.uint32) & EXPONENTS
    if G.ITEM_BYTES * G.LANES == 8:
        _store_quads(
            anchors, rests, highest, drop, words, first, real, (num_pages >> 31).to(tl.uint32), G, STEP, PAGE_WORDS,
        )  # fmt: skip
    else:
        _store_words(anchors, rests, highest, drop, words, first, real, G, STEP, PAGE_WORDS)
    if count > 0:
        tl.debug_barrier()  # other threads of the program wrote what the next overwrite
        values = pointer_to(page, G.ITEM_BYTES)
        for begin in range(0, count, RECORDS_AT_ONCE):
            if begin > 0:
                record, beyond, live = load_records(begin, count, wide, records, extensions)
            offset, value = _escaped_values(record, beyond, live, dense, rest, tops, drops, tile, tiles, G)
            tl.store(values + offset, value.to(values.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=RUNTIME)
def decode_exact_kernel(
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

    keys, values: uint8, the pools; strides: bytes; pages: int64 [num_pages], page ids; dense, rest: uint8, dense parts
    of the first and of the second stage; records uint16, extensions uint8: of a tensor's tiles, in order. Every record
    must lie on a value.
    """
    tile = tl.program_id(0)
    if tile < key_tiles:
        _decode_tile(
            tile, key_tiles, keys, key_layer_stride, key_page_stride, pages, num_pages, key_dense, key_rest,
            key_records, key_extensions, KEYS,
        )  # fmt: skip
    else:
        _decode_tile(
            tile - key_tiles, value_tiles, values, value_layer_stride, value_page_stride, pages, num_pages,
            value_dense, value_rest, value_records, value_extensions, VALUES,
        )  # fmt: skip
