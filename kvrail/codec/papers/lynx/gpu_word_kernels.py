"""Triton: what the kernels of all stages share. Sections, elements and the places of a page's values.

A **word** is LANES neighbouring values of a row, four of 16 bits or, where the geometry is odd, a single one. Blocks
are of words; the numbers of their lanes are a tuple of blocks.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc, var-annotated"

import triton
import triton.language as tl

from kvrail.codec.core.gpu_word_kernels import COMPILED, pointer_to

TINY = tl.constexpr(2.0**-110)


@triton.jit
def aligned(size):
    """`size` rounded up to a section's alignment."""
    return tl.multiple_of((size + 15) // 16 * 16, 16)


@triton.jit
def sections_of(base, pages, STAGE: tl.constexpr, CURVED: tl.constexpr, G: tl.constexpr):
    """Pointers to a stage's scales, widths, minima, lows and codes, and to what follows the metadata of EXACT.

    One that the stage does not have points to another section. G: of what the kernel is compiled for.
    """
    ITEM: tl.constexpr = 4 if G.MANTISSA_BITS == 23 else 2
    channels = pages.to(tl.int64) * G.COLUMNS
    minima_bytes, scales_bytes = aligned(channels * ITEM), aligned(channels * 2)
    chunk_bytes = aligned(channels * G.ALL_CHUNKS) if G.ALL_CHUNKS > 1 else aligned(channels * 0)
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
def words_at(data, BITS: tl.constexpr, LANES: tl.constexpr):
    """A pointer to bytes as one to words of LANES times BITS bits."""
    return pointer_to(data, BITS * LANES // 8)


@triton.jit
def numbers_of(words, MANTISSA_BITS: tl.constexpr, LANES: tl.constexpr):
    """The elements of words, float32, by lane."""
    numbers = ()
    for lane in tl.static_range(LANES):
        if MANTISSA_BITS == 23:
            number = words.to(tl.float32, bitcast=True)
        elif MANTISSA_BITS == 10:
            number = (words >> (16 * lane)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            number = ((words >> (16 * lane)).to(tl.uint16).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        numbers += (number,)
    return numbers


@triton.jit
def packed(lanes, BITS: tl.constexpr, LANES: tl.constexpr):
    """Unsigned integers of BITS bits, by lane, as words: of 64 bits where that takes more than 32, else of 32."""
    if BITS * LANES > 32:
        word = lanes[0].to(tl.uint64)
        for lane in tl.static_range(1, LANES):
            word |= lanes[lane].to(tl.uint64) << (BITS * lane)
    else:
        word = lanes[0].to(tl.uint32)
        for lane in tl.static_range(1, LANES):
            word |= lanes[lane].to(tl.uint32) << (BITS * lane)
    return word


@triton.jit
def _rounded_pair(low, high, MANTISSA_BITS: tl.constexpr):
    """Two numbers, `rounded`, in the halves of a word: one instruction in place of a dozen."""
    CONVERT: tl.constexpr = (
        "cvt.rn.satfinite.bf16x2.f32 $0, $2, $1;" if MANTISSA_BITS == 7 else "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;"
    )
    return tl.inline_asm_elementwise(CONVERT, "=r,r,r", [low, high], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def elements_of(numbers, MANTISSA_BITS: tl.constexpr, LANES: tl.constexpr):
    """Words of the nearest finite elements to numbers, which are given by lane."""
    if MANTISSA_BITS == 23:
        words = rounded(numbers[0], MANTISSA_BITS).to(tl.uint32, bitcast=True)
    elif LANES > 1 and COMPILED:
        pairs = ()
        for lane in tl.static_range(0, LANES, 2):
            pairs += (_rounded_pair(numbers[lane], numbers[lane + 1], MANTISSA_BITS),)
        words = packed(pairs, 32, LANES // 2)
    else:
        elements = ()
        for lane in tl.static_range(LANES):
            elements += (rounded(numbers[lane], MANTISSA_BITS).to(tl.uint16, bitcast=True),)
        words = packed(elements, 16, LANES)
    return words


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
):
    """Page number and column block of a program, and a pointer to the page's first byte."""
    number = program // BLOCKS
    offset = (number // num_pages).to(tl.int64) * layer_stride + tl.load(table + number % num_pages) * page_stride
    return number, program % BLOCKS, pool + tl.multiple_of(offset, ALIGNMENT)


@triton.jit
def columns_of(block, WORDS: tl.constexpr):
    """Numbers of the words of a row that a block of columns has.

    The compiler shall have a thread load two neighbouring ones and no more: else it would bring codes, which are
    narrower, into another order for their store, by way of shared memory.
    """
    return tl.max_contiguous(block * WORDS + tl.arange(0, WORDS), 2)


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
        scale = tl.where(scale < TINY, 0.0, scale)
    rate = tl.where(scale > 0, tl.div_rn(128.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    return centre, scale * 0.0078125, rate
