"""Triton kernels: pages to anchors and residuals in one pass, and the first stage or both into pages.

A program has all rows of a page for some columns, as two halves of rows whose codes share bytes: a byte is made of two
values that one thread holds. Each half is a block [CHUNKS, CHUNK, words]. Rows and columns beyond the page are masked.
All arithmetic is float32, every operation rounded by itself, as numpy's is: launches switch the fusion of products and
sums off.

On paper, a page of [64, 1024] bfloat16 and the linear map: encoding moves 2 bytes in and 1.09 out, the anchor stage
0.56 in and 2 out, both stages 1.06 in and 2 out. Compiled for sm_90, 4,096 values a program, they have 17
instructions a value (with all numbers finite), 8 and 17. An H200 issues some 25, 20 and 24 in the time in which it
moves the bytes, or half as many of most of those that are not sums or products of floats.
"""

# Tuples that grow in unrolled loops have no type that mypy can follow.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc, var-annotated"

import triton
import triton.language as tl

from kvrail.codec.core.gpu_word_kernels import COMPILED, load, store
from kvrail.codec.papers.lynx.gpu_word_kernels import (
    TINY,
    chunks_of,
    columns_of,
    elements_of,
    numbers_of,
    packed,
    place_of,
    rows_of,
    sections_of,
    words_at,
)


@triton.jit
def cells_of(away, tables):
    """Number of the cell on its side, by the distance from the centre in units; of NaN 0."""
    away = tl.abs(away)
    cell = (away >= tl.load(tables + 1)).to(tl.int32)
    for number in tl.static_range(2, 8):
        cell += (away >= tl.load(tables + number)).to(tl.int32)
    return cell


@triton.jit
def codes_of(numbers, centre, unit, rate, tables, CURVED: tl.constexpr):
    """Codes in the order of the numbers, uint32, and 0x4B000000 besides; of NaN 0."""
    if CURVED:
        away = (numbers - centre) * rate
        cell = cells_of(away, tables)
        within = (tl.abs(away) - tl.load(tables + cell)) * tl.load(tables + 25 + cell)
        within = tl.where(within > 0, within, 0.0)
        outward = cell * 16 + tl.where(within < 15.0, within, 15.0).to(tl.int32)
        code = tl.where(away < 0, 127 - outward, 128 + outward)
        code = tl.where(away == away, code, 0).to(tl.uint32) + 0x4B000000
    else:
        away = (numbers - (centre + 0.5 * unit)) * rate
        away = tl.where(away > -128.0, away, -128.0)
        away = tl.where(away < 127.0, away, 127.0)
        code = (away + 8388736.0).to(tl.uint32, bitcast=True)  # 2^23 + 128: the sum is rounded to an integer
    return code


@triton.jit
def code_word(codes, LANES: tl.constexpr):
    """A word of the codes of `codes_of`, given by lane; products and sums are cheaper than masks."""
    word = codes[0] - 0x4B000000
    for lane in tl.static_range(1, LANES):
        word += codes[lane] * (1 << (8 * lane))
    return word


@triton.jit
def middles_of(codes, BIT: tl.constexpr):
    """How far codes, four bits of words from BIT on, which is not 0, lie above 7.5: float32."""
    # Bits of the mantissa of a number whose last bit is worth 2^-BIT.
    EXPONENT: tl.constexpr = (150 - BIT) << 23
    if COMPILED:  # two constants: the compiler would take two instructions
        number = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;",
            "=r,r,r,r",
            [codes, 15 << BIT, EXPONENT],
            tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        number = (codes & (15 << BIT)) | EXPONENT
    return number.to(tl.float32, bitcast=True) - ((1 << (23 - BIT)) + 7.5)


@triton.jit
def coarse_of(codes, centre, unit, tables, BIT: tl.constexpr, CURVED: tl.constexpr):
    """Middles of the cells that anchor codes name, which are four bits of words from BIT on."""
    if CURVED:
        code = ((codes >> BIT) & 15).to(tl.int32)
        cell = tl.where(code < 8, 7 - code, code - 8)
        distance = tl.load(tables + 9 + cell) * unit
        distance = tl.where(code < 8, -distance, distance)
    else:
        distance = middles_of(codes, BIT) * (unit * 16.0)
    return centre + distance


@triton.jit
def refined_of(coarse, codes, centre, unit, rate, tables, BIT: tl.constexpr, CURVED: tl.constexpr):
    """Middles of the residual's steps around coarse values; codes as of coarse_of."""
    step = unit
    if CURVED:
        step = tl.load(tables + 17 + cells_of((coarse - centre) * rate, tables)) * unit
    return coarse + middles_of(codes, BIT) * step


@triton.jit
def _share_of_page(low, base, rate):
    """How far `low` lies above the page's least value, in 255ths of its range, clamped."""
    share = (low - base) * rate
    share = tl.where(share > 0, share, 0.0)
    return tl.where(share < 255.0, share, 255.0)


@triton.jit
def _page_scale(low, high):
    """Half the range, rounded up to bfloat16: its bits and its value; 0 where it is tiny."""
    half = 0.5 * high - 0.5 * low
    bits = (half.to(tl.uint32, bitcast=True) + 0xFFFF) >> 16
    bits = tl.where(bits < 0x7F7F, bits, 0x7F7F)
    scale = (bits << 16).to(tl.float32, bitcast=True)
    bits = tl.where(scale < TINY, 0, bits)
    return bits, tl.where(scale < TINY, 0.0, scale)


@triton.jit
def _finite_extremes(numbers, others, some, more, PADDED: tl.constexpr):
    """Least and largest finite number of two blocks along axis 1, where masks let; inf and -inf where there is none."""
    INFINITY: tl.constexpr = float("inf")
    fine, other = tl.abs(numbers) < INFINITY, tl.abs(others) < INFINITY
    if PADDED:
        fine, other = fine & some, other & more
    low = tl.minimum(tl.where(fine, numbers, INFINITY), tl.where(other, others, INFINITY))
    high = tl.maximum(tl.where(fine, numbers, -INFINITY), tl.where(other, others, -INFINITY))
    return tl.min(low, axis=1), tl.max(high, axis=1)


@triton.jit
def _extremes(numbers, others, some, more, PADDED: tl.constexpr):
    """As _finite_extremes, which is called only where some number is not finite."""
    INFINITY: tl.constexpr = float("inf")
    if PADDED:
        low, high = _finite_extremes(numbers, others, some, more, PADDED)
    else:
        low = tl.min(tl.minimum(numbers, others), axis=1)
        high = tl.max(tl.maximum(numbers, others), axis=1)
        fine = (low > -INFINITY) & (high < INFINITY)
        if tl.min(tl.min(fine.to(tl.int32), axis=1), axis=0) == 0:
            low, high = _finite_extremes(numbers, others, some, more, PADDED)
    return low, high


@triton.jit
def _page_range(lows, highs, LANES: tl.constexpr, SHARED: tl.constexpr):
    """Least and largest finite value of each column, by lane, given those of chunks; 0 where there is none."""
    base, top = (), ()
    for lane in tl.static_range(LANES):
        low, high = lows[lane], highs[lane]
        if not SHARED:
            low, high = tl.minimum(low, lows[LANES + lane]), tl.maximum(high, highs[LANES + lane])
        low, high = tl.min(low, axis=0), tl.max(high, axis=0)
        base += (tl.where(low <= high, low, 0.0) + 0.0,)  # -0 becomes 0
        top += (tl.where(low <= high, high, 0.0) + 0.0,)
    return base, top


@triton.jit
def _write_channels(
    base, top, word, inside, ours, other, MANTISSA_BITS: tl.constexpr, LANES: tl.constexpr, CURVED: tl.constexpr
):
    """Store minima and scales of both stages; the scales, by lane. ours, other: of sections_of."""
    ITEM: tl.constexpr = 32 if MANTISSA_BITS == 23 else 16
    bits, scales = (), ()
    for lane in tl.static_range(LANES):
        found, scale = _page_scale(base[lane], top[lane])
        bits += (found,)
        scales += (scale,)
    least, scale = elements_of(base, MANTISSA_BITS, LANES), packed(bits, 16, LANES)
    store(words_at(ours[2], ITEM, LANES) + word, least, inside, True)
    store(words_at(ours[0], 16, LANES) + word, scale, inside, True)
    store(words_at(other[0], 16, LANES) + word, scale, inside, True)
    if CURVED:
        store(words_at(other[2], ITEM, LANES) + word, least, inside, True)
    return scales


@triton.jit
def _shares_of(first, last, base, scale):
    """Lows and widths of chunks, given their extremes."""
    rate = tl.where(scale > 0, tl.div_rn(127.5, tl.where(scale > 0, scale, 1.0)), 0.0)
    some = first <= last
    low = _share_of_page(tl.where(some, first, base), base, rate).to(tl.int32)
    end = _share_of_page(tl.where(some, last, base), base, rate)
    whole = end.to(tl.int32)  # rounding functions would take subnormal shares for 0
    return low, whole + (end > whole.to(tl.float32)).to(tl.int32) - low


@triton.jit
def _write_shares(
    lows, highs, base, scales, at, there, ours, other, HALF: tl.constexpr, LANES: tl.constexpr, CURVED: tl.constexpr
):
    """Store lows and widths of a half's chunks in both stages, and give them by lane, float32."""
    starts, spans, low_numbers, width_numbers = (), (), (), ()
    for lane in tl.static_range(LANES):
        first, last = lows[HALF * LANES + lane], highs[HALF * LANES + lane]
        low, width = _shares_of(first, last, base[lane][None, :], scales[lane][None, :])
        starts += (low.to(tl.uint32),)
        spans += (width.to(tl.uint32),)
        low_numbers += (low.to(tl.float32),)
        width_numbers += (width.to(tl.float32),)
    low, width = packed(starts, 8, LANES), packed(spans, 8, LANES)
    store(words_at(ours[3], 8, LANES) + at, low, there, True)
    store(words_at(ours[1], 8, LANES) + at, width, there, True)
    store(words_at(other[1], 8, LANES) + at, width, there, True)
    if CURVED:
        store(words_at(other[3], 8, LANES) + at, low, there, True)
    return low_numbers, width_numbers


@triton.jit
def encode_block(
    program,
    pool,
    layer_stride,
    page_stride,
    table,
    num_pages,
    pages,
    anchors,
    residuals,
    tables,
    G: tl.constexpr,
):
    """Write metadata and codes of some columns of a page; arguments as of gpu_kernels.pages_kernel."""
    LANES: tl.constexpr = G.LANES  # loops are unrolled by constants of their own alone, before Triton 3.9
    SHARED: tl.constexpr = G.ALL_CHUNKS == 1
    WORDS: tl.constexpr = G.COLUMNS // LANES
    BLOCKS: tl.constexpr = (G.COLUMNS + G.WIDTH - 1) // G.WIDTH
    number, block, page = place_of(program, pool, layer_stride, page_stride, table, num_pages, BLOCKS, G.ALIGNMENT)
    column = columns_of(block, G.WIDTH // LANES)
    inside = column < WORDS
    row, chunk = rows_of(G.CHUNKS, G.CHUNK, G.ROWS_IN_CHUNK)
    words = words_at(page, 32 if G.MANTISSA_BITS == 23 else 16, LANES)
    x, here = (), ()
    for half in tl.static_range(2):
        here += ((row < G.HALF_ROWS) & (row + half * G.HALF_ROWS < G.ROWS) & inside[None, None, :],)
        word = load(words + (row + half * G.HALF_ROWS) * WORDS + column[None, None, :], here[half], G.PADDED)
        x += numbers_of(word, G.MANTISSA_BITS, LANES)
    lows, highs = (), ()
    for half in tl.static_range(1 if SHARED else 2):
        for lane in tl.static_range(LANES):
            other = x[(LANES if SHARED else half * LANES) + lane]
            low, high = _extremes(x[half * LANES + lane], other, here[half], here[1 if SHARED else half], G.PADDED)
            lows += (low,)
            highs += (high,)
    base, top = _page_range(lows, highs, LANES, SHARED)
    ours = sections_of(anchors, pages, 0, G.CURVED, G)
    other = sections_of(residuals, pages, 1, G.CURVED, G)
    channel = number.to(tl.int64) * WORDS + column
    scales = _write_channels(base, top, channel, inside, ours, other, G.MANTISSA_BITS, LANES, G.CURVED)
    both = ()
    for half in tl.static_range(2):
        if not SHARED:
            which = chunk + half * (G.HALF_ROWS // G.ROWS_IN_CHUNK)
            at = (number.to(tl.int64) * G.ALL_CHUNKS + which) * WORDS + column[None, :]
            there = (which < G.ALL_CHUNKS) & (chunk < G.HALF_ROWS // G.ROWS_IN_CHUNK) & inside[None, :]
            low, width = _write_shares(lows, highs, base, scales, at, there, ours, other, half, LANES, G.CURVED)
        codes = ()
        for lane in tl.static_range(LANES):
            centre, unit, rate = chunks_of(
                scales[lane][None, :], 0.0 if SHARED else width[lane], base[lane][None, :],
                0.0 if SHARED else low[lane], SHARED, True,
            )  # fmt: skip
            codes += (
                codes_of(
                    x[half * LANES + lane], centre[:, None, :], unit[:, None, :], rate[:, None, :], tables, G.CURVED
                ),
            )
        both += (code_word(codes, LANES),)
    second = both[1]
    if G.PADDED:
        second = tl.where(row + G.HALF_ROWS < G.ROWS, second, 0)
    at = (number.to(tl.int64) * G.HALF_ROWS + row) * WORDS + column[None, None, :]
    there = (row < G.HALF_ROWS) & inside[None, None, :]
    store(words_at(ours[4], 8, LANES) + at, ((both[0] >> 4) & 0x0F0F0F0F) | (second & 0xF0F0F0F0), there, G.PADDED)
    store(words_at(other[4], 8, LANES) + at, (both[0] & 0x0F0F0F0F) | ((second & 0x0F0F0F0F) << 4), there, G.PADDED)


@triton.jit
def decode_block(
    program,
    pool,
    layer_stride,
    page_stride,
    table,
    num_pages,
    pages,
    anchors,
    residuals,
    tables,
    STAGE: tl.constexpr,
    G: tl.constexpr,
):
    """Write what the codes of some columns of a page stand for; arguments as of gpu_kernels.pages_kernel."""
    LANES: tl.constexpr = G.LANES  # loops are unrolled by constants of their own alone, before Triton 3.9
    SHARED: tl.constexpr = G.ALL_CHUNKS == 1
    WORDS: tl.constexpr = G.COLUMNS // LANES
    BLOCKS: tl.constexpr = (G.COLUMNS + G.WIDTH - 1) // G.WIDTH
    ITEM: tl.constexpr = 32 if G.MANTISSA_BITS == 23 else 16
    number, block, page = place_of(program, pool, layer_stride, page_stride, table, num_pages, BLOCKS, G.ALIGNMENT)
    column = columns_of(block, G.WIDTH // LANES)
    inside = column < WORDS
    row, chunk = rows_of(G.CHUNKS, G.CHUNK, G.ROWS_IN_CHUNK)
    scales, widths, minima, lows, codes = sections_of(anchors, pages, 0, G.CURVED, G)
    words = words_at(page, ITEM, LANES) + row * WORDS + column[None, None, :]
    at = (number.to(tl.int64) * G.HALF_ROWS + row) * WORDS + column[None, None, :]
    there = (row < G.HALF_ROWS) & inside[None, None, :]
    both = load(words_at(codes, 8, LANES) + at, there, G.PADDED).to(tl.uint32)
    fine = both
    if STAGE == 1:
        _, _, _, _, codes = sections_of(residuals, pages, 1, G.CURVED, G)
        fine = load(words_at(codes, 8, LANES) + at, there, G.PADDED).to(tl.uint32)
    channel = number.to(tl.int64) * WORDS + column
    scale = numbers_of(load(words_at(scales, 16, LANES) + channel, inside, True), 7, LANES)
    minimum = numbers_of(load(words_at(minima, ITEM, LANES) + channel, inside, True), G.MANTISSA_BITS, LANES)
    for half in tl.static_range(2):
        if not SHARED:
            which = chunk + half * (G.HALF_ROWS // G.ROWS_IN_CHUNK)
            at = (number.to(tl.int64) * G.ALL_CHUNKS + which) * WORDS + column[None, :]
            there = (which < G.ALL_CHUNKS) & inside[None, :]
            width = load(words_at(widths, 8, LANES) + at, there, True).to(tl.uint32)
            low = load(words_at(lows, 8, LANES) + at, there, True).to(tl.uint32)
        here = (row < G.HALF_ROWS) & (row + half * G.HALF_ROWS < G.ROWS) & inside[None, None, :]
        centres, units, rates, found = (), (), (), ()
        for lane in tl.static_range(LANES):
            centre, unit, rate = chunks_of(
                scale[lane][None, :], 0.0 if SHARED else ((width >> (8 * lane)) & 255).to(tl.float32),
                minimum[lane][None, :], 0.0 if SHARED else ((low >> (8 * lane)) & 255).to(tl.float32), SHARED, True,
            )  # fmt: skip
            centres += (centre[:, None, :],)
            units += (unit[:, None, :],)
            rates += (rate[:, None, :],)
            code = (both << 1) if lane == 0 else (both >> (8 * lane - 1))
            found += (coarse_of(code, centres[lane], units[lane], tables, 1 + 4 * half, G.CURVED),)
        elements = elements_of(found, G.MANTISSA_BITS, LANES)
        if STAGE == 1:
            coarse = numbers_of(elements, G.MANTISSA_BITS, LANES)  # as ANCHOR alone leaves them: rounded
            found = ()
            for lane in tl.static_range(LANES):
                code = (fine << 1) if lane == 0 else (fine >> (8 * lane - 1))
                found += (
                    refined_of(
                        coarse[lane], code, centres[lane], units[lane], rates[lane], tables, 1 + 4 * half, G.CURVED
                    ),
                )
            elements = elements_of(found, G.MANTISSA_BITS, LANES)
        store(words + half * (G.HALF_ROWS * WORDS), elements, here, G.PADDED)
