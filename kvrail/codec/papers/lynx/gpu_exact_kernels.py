"""Triton kernels of the last stage: what leads from the refined values to the exact ones.

A program has one tile, a block [ROWS, WIDTH] in powers of two. A code's width follows from the refined value, so its
place follows from a sum over the codes before it in the tile, row by row. Encoding is two launches, of the tiles'
lengths and, once their sums are known, of the words.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"

import triton
import triton.language as tl

from kvrail.codec.core.gpu_word_kernels import pointer_to
from kvrail.codec.papers.lynx.gpu_word_kernels import (
    chunks_of,
    load_numbers,
    place_of,
    rounded,
    sections_of,
)


@triton.jit
def _ordered(elements, MANTISSA_BITS: tl.constexpr):
    """Integers in the order of the elements' bits; -0 comes just before 0."""
    if MANTISSA_BITS == 23:
        bits = elements.to(tl.uint32, bitcast=True).to(tl.int64)
        sign = bits >> 31
        keys = (bits - (sign << 32)) ^ (-sign & 0x7FFFFFFF)
    else:
        bits = elements.to(tl.uint16, bitcast=True).to(tl.int32)
        sign = bits >> 15
        keys = (bits - (sign << 16)) ^ (-sign & 0x7FFF)
    return keys


@triton.jit
def _exponents(elements, MANTISSA_BITS: tl.constexpr):
    """Sign and exponent of elements."""
    if MANTISSA_BITS == 23:
        top = elements.to(tl.uint32, bitcast=True) >> 23
    else:
        top = elements.to(tl.uint16, bitcast=True) >> MANTISSA_BITS
    return top


@triton.jit
def _side(numbers, reach, octave, SIDE: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """Ordered integers of where values end on one side."""
    end = rounded(numbers + SIDE * reach, MANTISSA_BITS)
    other = (_exponents(end, MANTISSA_BITS) != octave).to(tl.int32)
    return _ordered(end, MANTISSA_BITS) + SIDE * other


@triton.jit
def _intervals(page, where, real, row, column, number, pages, dense, reach, G: tl.constexpr):
    """For each exact value, given the refined one: the least it can be, how many more there are, bits of a code."""
    scales, widths, _, _, _ = sections_of(dense, pages, 2, False, G)
    channel = number.to(tl.int64) * G.COLUMNS + column[None, :]
    scale = (tl.load(scales + channel, mask=column[None, :] < G.COLUMNS, other=0).to(tl.uint32) << 16).to(
        tl.float32, bitcast=True
    )
    width = 0.0
    if G.ALL_CHUNKS > 1:
        at = (number.to(tl.int64) * G.ALL_CHUNKS + row[:, None] // G.ROWS_IN_CHUNK) * G.COLUMNS + column[None, :]
        width = tl.load(widths + at, mask=real, other=0).to(tl.float32)
    _, unit, _ = chunks_of(scale, width, scale, 0.0, G.ALL_CHUNKS == 1, False)
    numbers = load_numbers(page + where, real, G.MANTISSA_BITS)
    octave = (numbers.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    reach = reach * unit + octave * (0.5 / (1 << G.MANTISSA_BITS))
    octave = _exponents(tl.load(page + where, mask=real, other=0), G.MANTISSA_BITS)
    low = _side(numbers, reach, octave, -1, G.MANTISSA_BITS)
    span = _side(numbers, reach, octave, 1, G.MANTISSA_BITS) - low
    span = tl.where(real & (span > 0), span, 0)
    if G.MANTISSA_BITS == 23:
        bits = ((span.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1022).to(tl.int32)
    else:
        bits = (span.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    return low, span, tl.where(span > 0, bits, 0)


@triton.jit
def _tile_of(G: tl.constexpr):
    """Tile and page number of a program; rows, columns, offsets in the page of its values, and whether they are any."""
    PER_PAGE: tl.constexpr = (G.COLUMNS + G.TILE_COLUMNS - 1) // G.TILE_COLUMNS
    tile = tl.program_id(0)
    row, within = tl.arange(0, G.ROWS_PADDED), tl.arange(0, G.WIDTH)
    column = tile % PER_PAGE * G.TILE_COLUMNS + within
    real = (row[:, None] < G.ROWS) & (within[None, :] < G.TILE_COLUMNS) & (column[None, :] < G.COLUMNS)
    return tile, tile // PER_PAGE, row, column, row[:, None] * G.COLUMNS + column[None, :], real


@triton.jit
def _ahead_of(counts):
    """The sum of all counts before each, row by row; int32."""
    rows = tl.sum(counts, axis=1)
    return (tl.cumsum(rows, 0) - rows)[:, None] + tl.cumsum(counts, 1) - counts


@triton.jit
def _lengths_of(dense, pages, G: tl.constexpr):
    _, _, lengths, _, _ = sections_of(dense, pages, 2, False, G)
    return lengths.to(tl.pointer_type(tl.uint32))


@triton.jit(do_not_specialize=["num_pages", "pages"])
def lengths_kernel(refined, num_pages, pages, dense, reach, G: tl.constexpr):
    """Grid: tiles. refined: pages as the stage before leaves them, in a row; dense: EXACT's fixed sections.

    G: gpu_launch.ExactGeometry, a constant.
    """
    tile, number, row, column, where, real = _tile_of(G)
    page = refined + number.to(tl.int64) * (G.ROWS * G.COLUMNS)
    _, _, bits = _intervals(page, where, real, row, column, number, pages, dense, reach, G)
    words = (tl.sum(tl.sum(bits, axis=1), axis=0) + 31) // 32
    tl.store(_lengths_of(dense, pages, G) + tile, words.to(tl.uint32))


@triton.jit(do_not_specialize=["layer_stride", "page_stride", "num_pages", "pages", "most_escapes"])
def exact_encode_kernel(
    pool,
    layer_stride: tl.int64,
    page_stride: tl.int64,
    table,
    refined,
    num_pages,
    pages,
    dense,
    ends,
    reach,
    words,
    escapes,
    positions,
    elements,
    most_escapes,
    ALIGNMENT: tl.constexpr,
    G: tl.constexpr,
):
    """Grid: tiles. pool: uint8, strides in bytes; table: int64, page ids; ends: int64, words up to each tile's last.

    words: int32, zeros; escapes: int64 [1], how many have been counted; positions and elements: int32, of the first
    `most_escapes` of them, in any order.
    """
    tile, number, row, column, where, real = _tile_of(G)
    near = refined + number.to(tl.int64) * (G.ROWS * G.COLUMNS)
    low, span, bits = _intervals(near, where, real, row, column, number, pages, dense, reach, G)
    _, _, page = place_of(number, pool, layer_stride, page_stride, table, num_pages, 1, ALIGNMENT)
    page = pointer_to(page, 4 if G.MANTISSA_BITS == 23 else 2)
    found = tl.load(page + where, mask=real, other=0)
    code = _ordered(found, G.MANTISSA_BITS) - low
    escaped = real & ((code < 0) | (code > span))
    place = _ahead_of(bits)
    length = tl.load(_lengths_of(dense, pages, G) + tile).to(tl.int64)
    target = words + tl.load(ends + tile) - length
    code = tl.where(real & (escaped == 0), code, 0).to(tl.uint64)
    # Codes of neighbours are brought together first, as many as 64 bits hold.
    NEAR: tl.constexpr = min(G.WIDTH, 1 if G.MANTISSA_BITS == 23 else 4)
    place = tl.reshape(place, [G.ROWS_PADDED, G.WIDTH // NEAR, NEAR])
    begin = tl.min(place, axis=2)
    code = tl.sum(
        tl.reshape(code, [G.ROWS_PADDED, G.WIDTH // NEAR, NEAR]) << (place - begin[:, :, None]).to(tl.uint64), axis=2
    )
    shift = (begin & 31).to(tl.uint64)
    low, high = code << shift, (code >> 32) >> (32 - shift)
    target += begin >> 5
    tl.atomic_or(target, (low & 0xFFFFFFFF).to(tl.int32), mask=(low & 0xFFFFFFFF) > 0, sem="relaxed")
    tl.atomic_or(target + 1, (low >> 32).to(tl.int32), mask=(low >> 32) > 0, sem="relaxed")
    tl.atomic_or(target + 2, high.to(tl.int32), mask=high > 0, sem="relaxed")
    count = tl.sum(tl.sum(escaped.to(tl.int32), axis=1), axis=0)
    if count > 0:
        first = tl.atomic_add(escapes, count.to(tl.int64), sem="relaxed")
        slot = first + _ahead_of(escaped.to(tl.int32))
        position = (tile * G.ROWS + row[:, None]) * G.TILE_COLUMNS + tl.arange(0, G.WIDTH)[None, :]
        here = escaped & (slot < most_escapes)
        tl.store(positions + slot, position, mask=here)
        tl.store(elements + slot, found.to(tl.int32), mask=here)


@triton.jit(do_not_specialize=["layer_stride", "page_stride", "num_pages", "pages"])
def exact_decode_kernel(
    pool,
    layer_stride: tl.int64,
    page_stride: tl.int64,
    table,
    num_pages,
    pages,
    dense,
    ends,
    reach,
    words,
    ALIGNMENT: tl.constexpr,
    G: tl.constexpr,
):
    """As exact_encode_kernel, the other way, in place. What a tile's words do not reach is read as zeros."""
    tile, number, row, column, where, real = _tile_of(G)
    _, _, page = place_of(number, pool, layer_stride, page_stride, table, num_pages, 1, ALIGNMENT)
    page = pointer_to(page, 4 if G.MANTISSA_BITS == 23 else 2)
    low, _, bits = _intervals(page, where, real, row, column, number, pages, dense, reach, G)
    place = _ahead_of(bits)
    length = tl.load(_lengths_of(dense, pages, G) + tile).to(tl.int64)
    source, word = words + tl.load(ends + tile) - length, place >> 5
    first = tl.load(source + word, mask=(bits > 0) & (word < length), other=0).to(tl.uint32, bitcast=True)
    second = tl.load(source + word + 1, mask=(bits > 0) & (word + 1 < length), other=0).to(tl.uint32, bitcast=True)
    both = (first.to(tl.uint64) | (second.to(tl.uint64) << 32)) >> (place & 31).to(tl.uint64)
    code = both & ((tl.full([], 1, tl.uint64) << bits.to(tl.uint64)) - 1)
    key = low + code.to(low.dtype)
    if G.MANTISSA_BITS == 23:
        element = tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.uint32)
    else:
        element = tl.where(key >= 0, key, key ^ 0x7FFF).to(tl.uint16)
    tl.store(page + where, element, mask=real)
