"""Triton kernels: pages to anchors and residuals in one pass, and either stage into pages.

A program has all rows of a page for some columns, as two halves [CHUNKS, CHUNK, WIDTH] of rows whose codes share bytes:
a byte is made of two values that one thread holds. Rows and columns beyond the page are masked. All arithmetic is
float32, every operation rounded by itself, as in reference.py: launches switch the fusion of products and sums off.

On paper, a page of [64, 1024] bfloat16 and the linear map: encoding moves 2 bytes in and 1.09 out, the anchor stage
0.56 in and 2 out, the residual stage 2.53 in and 2 out. Compiled for sm_90, 4,096 values a program of two warps, they
have 34 instructions a value (among them the slow path of a division a channel, which is not taken), 14 and 17. An H200
issues some 20 in the time in which it moves 3 bytes.
"""

# Tuples that grow in unrolled loops have no type that mypy can follow.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc, var-annotated"

import triton
import triton.language as tl

_TINY = tl.constexpr(2.0**-110)


@triton.jit
def aligned(size):
    """`size` rounded up to a section's alignment."""
    return tl.multiple_of((size + 15) // 16 * 16, 16)


@triton.jit
def sections_of(
    base,
    pages,
    MANTISSA_BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGE: tl.constexpr,
    CURVED: tl.constexpr,
):
    """Pointers to a stage's scales, widths, minima, lows and codes, and to what follows the metadata of EXACT.

    One that the stage does not have points to another section.
    """
    ITEM: tl.constexpr = 4 if MANTISSA_BITS == 23 else 2
    channels = pages.to(tl.int64) * COLUMNS
    minima_bytes, scales_bytes = aligned(channels * ITEM), aligned(channels * 2)
    chunk_bytes = aligned(channels * CHUNKS) if CHUNKS > 1 else aligned(channels * 0)
    if STAGE == 0:
        minima = base
        scales = minima + minima_bytes
        lows = scales + scales_bytes
        widths = lows + chunk_bytes
        codes = widths + chunk_bytes
    else:
        scales = base
        widths = scales + scales_bytes
        minima = widths + chunk_bytes
        lows = minima + minima_bytes
        codes = (lows + chunk_bytes) if CURVED and STAGE == 1 else minima
    return scales.to(tl.pointer_type(tl.uint16)), widths, minima, lows, codes


@triton.jit
def load_numbers(elements, mask, MANTISSA_BITS: tl.constexpr):
    """Elements as float32; 0 where masked."""
    if MANTISSA_BITS == 7:
        bits = tl.load(elements.to(tl.pointer_type(tl.uint16)), mask=mask, other=0).to(tl.uint32) << 16
        numbers = bits.to(tl.float32, bitcast=True)
    elif MANTISSA_BITS == 10:
        numbers = tl.load(elements.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)
    else:
        numbers = tl.load(elements.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    return numbers


@triton.jit
def rounded(numbers, MANTISSA_BITS: tl.constexpr):
    """The nearest finite elements, ties to the even one, as they are stored."""
    largest = 3.4028234663852886e38
    if MANTISSA_BITS == 7:
        largest = 3.3895313892515355e38
    elif MANTISSA_BITS == 10:
        largest = 65504.0
    numbers = tl.where(numbers > largest, largest, numbers)
    numbers = tl.where(numbers < -largest, -largest, numbers)
    if MANTISSA_BITS == 7:  # the interpreter's conversion truncates
        bits = numbers.to(tl.uint32, bitcast=True)
        elements = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
    elif MANTISSA_BITS == 10:
        elements = numbers.to(tl.float16)
    else:
        elements = numbers
    return elements


@triton.jit
def elements_at(data, MANTISSA_BITS: tl.constexpr):
    """A pointer to bytes as one to elements' bits."""
    WORD: tl.constexpr = tl.uint32 if MANTISSA_BITS == 23 else tl.uint16
    return data.to(tl.pointer_type(WORD))


@triton.jit
def place_of(
    program,
    pool,
    layer_stride,
    page_stride,
    table,
    num_pages,
    BLOCKS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
):
    """Page number and column block of a program, and a pointer to the page's first element."""
    number = program // BLOCKS
    offset = (number // num_pages).to(tl.int64) * layer_stride + tl.load(table + number % num_pages) * page_stride
    start = pool + tl.multiple_of(offset, ALIGNMENT)
    return number, program % BLOCKS, elements_at(start, MANTISSA_BITS)


@triton.jit
def rows_of(CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS_IN_CHUNK: tl.constexpr):
    """Numbers of the rows of a half, [CHUNKS, CHUNK, 1], and of the chunks that they are of, [CHUNKS, 1]."""
    chunk = tl.arange(0, CHUNKS)
    row = chunk[:, None] * ROWS_IN_CHUNK + tl.arange(0, CHUNK)[None, :]
    return row[:, :, None], chunk[:, None]


@triton.jit
def chunks_of(scale, width, minimum, low, SHARED: tl.constexpr, CENTRED: tl.constexpr):
    """Centres, units and rates of chunks, float32 [CHUNKS, WIDTH], from what is stored of them, float32."""
    centre = scale
    if CENTRED:
        centre = minimum + scale
    if not SHARED:
        if CENTRED:
            centre = centre + scale * ((width + 2.0 * low - 255.0) * (1.0 / 255.0))
        scale = scale * (width * (1.0 / 255.0))
        scale = tl.where(scale < _TINY, 0.0, scale)
    rate = tl.where(scale > 0, tl.div_rn(128.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    return centre, scale * 0.0078125, rate


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
    """Codes in the order of the numbers, in the low eight bits of words; of NaN 0."""
    if CURVED:
        away = (numbers - centre) * rate
        cell = cells_of(away, tables)
        within = (tl.abs(away) - tl.load(tables + cell)) * tl.load(tables + 25 + cell)
        within = tl.where(within > 0, within, 0.0)
        outward = cell * 16 + tl.where(within < 15.0, within, 15.0).to(tl.int32)
        code = tl.where(away < 0, 127 - outward, 128 + outward)
        code = tl.where(away == away, code, 0).to(tl.uint32)
    else:
        away = (numbers - (centre + 0.5 * unit)) * rate
        away = tl.where(away > -128.0, away, -128.0)
        away = tl.where(away < 127.0, away, 127.0)
        code = (away + 12583040.0).to(tl.uint32, bitcast=True)  # 1.5 * 2^23 + 128: the sum is rounded to an integer
    return code


@triton.jit
def coarse_of(code, centre, unit, tables, CURVED: tl.constexpr):
    """Middles of the cells that anchor codes name."""
    if CURVED:
        cell = tl.where(code < 8, 7 - code, code - 8)
        distance = tl.load(tables + 9 + cell) * unit
        distance = tl.where(code < 8, -distance, distance)
    else:
        distance = (code * 16 - 120).to(tl.float32) * unit
    return centre + distance


@triton.jit
def refined_of(coarse, code, centre, unit, rate, tables, CURVED: tl.constexpr):
    """Middles of the residual's steps around coarse values."""
    step = unit
    if CURVED:
        step = tl.load(tables + 17 + cells_of((coarse - centre) * rate, tables)) * unit
    return coarse + (code.to(tl.float32) - 7.5) * step


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
    bits = tl.where(scale < _TINY, 0, bits)
    return bits, tl.where(scale < _TINY, 0.0, scale)


@triton.jit
def _range_of(lows, highs, SHARED: tl.constexpr):
    """Least and largest finite value of each column, given those of either half; 0 where there is none."""
    if SHARED:
        low = tl.min(tl.min(tl.minimum(lows[0], lows[1]), axis=1), axis=0)
        high = tl.max(tl.max(tl.maximum(highs[0], highs[1]), axis=1), axis=0)
    else:
        low = tl.min(tl.minimum(lows[0], lows[1]), axis=0)
        high = tl.max(tl.maximum(highs[0], highs[1]), axis=0)
    some = low <= high
    return tl.where(some, low, 0.0) + 0.0, tl.where(some, high, 0.0) + 0.0  # -0 becomes 0


@triton.jit
def _write_channels(low, scale_bits, channel, inside, ours, other, MANTISSA_BITS: tl.constexpr, CURVED: tl.constexpr):
    """Store minima and scales of both stages."""
    least = rounded(low, MANTISSA_BITS)
    tl.store(ours[2].to(tl.pointer_type(least.dtype)) + channel, least, mask=inside)
    tl.store(ours[0] + channel, scale_bits.to(tl.uint16), mask=inside)
    tl.store(other[0] + channel, scale_bits.to(tl.uint16), mask=inside)
    if CURVED:
        tl.store(other[2].to(tl.pointer_type(least.dtype)) + channel, least, mask=inside)


@triton.jit
def _write_shares(first, last, base, scale, at, there, ours, other, CURVED: tl.constexpr):
    """Store lows and widths of a half's chunks in both stages, and give them; first, last: their extremes."""
    rate = tl.where(scale > 0, tl.div_rn(127.5, tl.where(scale > 0, scale, 1.0)), 0.0)
    some = first <= last
    low = _share_of_page(tl.where(some, first, base), base, rate).to(tl.int32)
    end = _share_of_page(tl.where(some, last, base), base, rate)
    whole = end.to(tl.int32)  # rounding functions would take subnormal shares for 0
    width = whole + (end > whole.to(tl.float32)).to(tl.int32) - low
    tl.store(ours[3] + at, low.to(tl.uint8), mask=there)
    tl.store(ours[1] + at, width.to(tl.uint8), mask=there)
    tl.store(other[1] + at, width.to(tl.uint8), mask=there)
    if CURVED:
        tl.store(other[3] + at, low.to(tl.uint8), mask=there)
    return low.to(tl.float32), width.to(tl.float32)


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
    MANTISSA_BITS: tl.constexpr,
    CURVED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    HALF_ROWS: tl.constexpr,
    ROWS_IN_CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write metadata and codes of some columns of a page; arguments as of gpu_kernels.encode_kernel."""
    SHARED: tl.constexpr = ALL_CHUNKS == 1
    BLOCKS: tl.constexpr = (COLUMNS + WIDTH - 1) // WIDTH
    INFINITY: tl.constexpr = float("inf")
    number, block, page = place_of(
        program, pool, layer_stride, page_stride, table, num_pages, BLOCKS, ALIGNMENT, MANTISSA_BITS
    )
    column = block * WIDTH + tl.arange(0, WIDTH)
    inside = column < COLUMNS
    row, chunk = rows_of(CHUNKS, CHUNK, ROWS_IN_CHUNK)
    x, lows, highs = (), (), ()
    for half in tl.static_range(2):
        here = (row < HALF_ROWS) & (row + half * HALF_ROWS < ROWS) & inside[None, None, :]
        x += (load_numbers(page + (row + half * HALF_ROWS) * COLUMNS + column[None, None, :], here, MANTISSA_BITS),)
        finite = here & (tl.abs(x[half]) < INFINITY)
        lows += (tl.where(finite, x[half], INFINITY),)
        highs += (tl.where(finite, x[half], -INFINITY),)
    if not SHARED:
        lows = (tl.min(lows[0], axis=1), tl.min(lows[1], axis=1))
        highs = (tl.max(highs[0], axis=1), tl.max(highs[1], axis=1))
    base, top = _range_of(lows, highs, SHARED)
    scale_bits, scale = _page_scale(base, top)
    ours = sections_of(anchors, pages, MANTISSA_BITS, COLUMNS, ALL_CHUNKS, 0, CURVED)
    other = sections_of(residuals, pages, MANTISSA_BITS, COLUMNS, ALL_CHUNKS, 1, CURVED)
    channel = number.to(tl.int64) * COLUMNS + column
    _write_channels(base, scale_bits, channel, inside, ours, other, MANTISSA_BITS, CURVED)
    base, scale = base[None, :], scale[None, :]
    anchor = tl.zeros([CHUNKS, CHUNK, WIDTH], dtype=tl.uint32)
    residual = tl.zeros([CHUNKS, CHUNK, WIDTH], dtype=tl.uint32)
    for half in tl.static_range(2):
        low, width = 0.0, 0.0
        if not SHARED:
            which = chunk + half * (HALF_ROWS // ROWS_IN_CHUNK)
            at = (number.to(tl.int64) * ALL_CHUNKS + which) * COLUMNS + column[None, :]
            there = (which < ALL_CHUNKS) & (chunk < HALF_ROWS // ROWS_IN_CHUNK) & inside[None, :]
            low, width = _write_shares(lows[half], highs[half], base, scale, at, there, ours, other, CURVED)
        centre, unit, rate = chunks_of(scale, width, base, low, SHARED, True)
        code = codes_of(x[half], centre[:, None, :], unit[:, None, :], rate[:, None, :], tables, CURVED)
        if half == 0:
            anchor, residual = (code >> 4) & 15, code & 15
        else:
            code = tl.where(row + HALF_ROWS < ROWS, code, 0)
            anchor, residual = anchor | (code & 240), residual | ((code & 15) << 4)
    at = (number.to(tl.int64) * HALF_ROWS + row) * COLUMNS + column[None, None, :]
    there = (row < HALF_ROWS) & inside[None, None, :]
    tl.store(ours[4] + at, anchor.to(tl.uint8), mask=there)
    tl.store(other[4] + at, residual.to(tl.uint8), mask=there)


@triton.jit
def decode_block(
    program,
    pool,
    layer_stride,
    page_stride,
    table,
    num_pages,
    pages,
    dense,
    tables,
    STAGE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    CURVED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    HALF_ROWS: tl.constexpr,
    ROWS_IN_CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the anchors of some columns of a page, or refine them; arguments as of gpu_kernels.decode_kernel."""
    SHARED: tl.constexpr = ALL_CHUNKS == 1
    CENTRED: tl.constexpr = STAGE == 0 or CURVED
    BLOCKS: tl.constexpr = (COLUMNS + WIDTH - 1) // WIDTH
    number, block, page = place_of(
        program, pool, layer_stride, page_stride, table, num_pages, BLOCKS, ALIGNMENT, MANTISSA_BITS
    )
    column = block * WIDTH + tl.arange(0, WIDTH)
    inside = column < COLUMNS
    row, chunk = rows_of(CHUNKS, CHUNK, ROWS_IN_CHUNK)
    scales, widths, minima, lows, codes = sections_of(dense, pages, MANTISSA_BITS, COLUMNS, ALL_CHUNKS, STAGE, CURVED)
    at = (number.to(tl.int64) * HALF_ROWS + row) * COLUMNS + column[None, None, :]
    both = tl.load(codes + at, mask=(row < HALF_ROWS) & inside[None, None, :], other=0).to(tl.int32)
    channel = number.to(tl.int64) * COLUMNS + column
    scale = (tl.load(scales + channel, mask=inside, other=0).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    minimum = scale
    if CENTRED:
        minimum = load_numbers(elements_at(minima, MANTISSA_BITS) + channel, inside, MANTISSA_BITS)
    for half in tl.static_range(2):
        low, width = 0.0, 0.0
        if not SHARED:
            which = chunk + half * (HALF_ROWS // ROWS_IN_CHUNK)
            at = (number.to(tl.int64) * ALL_CHUNKS + which) * COLUMNS + column[None, :]
            there = (which < ALL_CHUNKS) & inside[None, :]
            width = tl.load(widths + at, mask=there, other=0).to(tl.float32)
            if CENTRED:
                low = tl.load(lows + at, mask=there, other=0).to(tl.float32)
        centre, unit, rate = chunks_of(scale[None, :], width, minimum[None, :], low, SHARED, CENTRED)
        centre, unit, rate = centre[:, None, :], unit[:, None, :], rate[:, None, :]
        code = (both >> (4 * half)) & 15
        here = (row < HALF_ROWS) & (row + half * HALF_ROWS < ROWS) & inside[None, None, :]
        where = page + (row + half * HALF_ROWS) * COLUMNS + column[None, None, :]
        if STAGE == 0:
            found = coarse_of(code, centre, unit, tables, CURVED)
        else:
            coarse = load_numbers(where, here, MANTISSA_BITS)
            found = refined_of(coarse, code, centre, unit, rate, tables, CURVED)
        elements = rounded(found, MANTISSA_BITS)
        tl.store(where.to(tl.pointer_type(elements.dtype)), elements, mask=here)
