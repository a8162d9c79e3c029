"""Opening of pages of fixed width in Triton: see `form` for their bytes.

As with lossless pages, what a thread loads of a tile is what it multiplies.
"""

import triton
import triton.language as tl


@triton.jit
def _value_of(code, scale, middle):
    """Bits of bfloat16 of a code, by its row's scale and middle, each in the lower half of a word."""
    scale = (scale << 16).to(tl.float32, bitcast=True).to(tl.float64)
    middle = (middle << 16).to(tl.float32, bitcast=True).to(tl.float64)
    bits = (code.to(tl.float64) * scale + middle).to(tl.uint64, bitcast=True)
    bits = (bits + ((1 << 44) - 1) + (bits >> 45 & 1)) >> 45 << 45
    return bits.to(tl.float64, bitcast=True).to(tl.float32).to(tl.uint32, bitcast=True) >> 16


@triton.jit
def _values_of(codes, scales, middles, BITS: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Words of two bfloat16 each, from words of two codes, two scales and two middles.

    Codes are the lowest bits of each half. ASSEMBLED: by the instructions for it, which Triton's interpreter does not
    know. With a code as the last bits of its mantissa, a half is 128 + code, from which 136 is taken. Of 8 bits, 7 have
    room; the bit above decides whether 128 or 256 is taken.
    """
    if ASSEMBLED:
        if BITS == 4:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 c, one, less; lop3.b32 c, $1, 0x000F000F, 0x43004300, 0xEA; mov.b32 one, 0x3F803F80; "
                "mov.b32 less, 0xC308C308; fma.rn.bf16x2 c, c, one, less; fma.rn.bf16x2 $0, c, $2, $3; }",
                "=r,r,r,r", [codes, scales, middles], dtype=tl.uint32, is_pure=True, pack=1,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            "{ .reg .b32 c, less, minus; lop3.b32 c, $1, 0x007F007F, 0x43004300, 0xEA; "
            "lop3.b32 less, $1, 0x00800080, 0x43004300, 0xAE; mov.b32 minus, 0xBF80BF80; "
            "fma.rn.bf16x2 c, less, minus, c; fma.rn.bf16x2 $0, c, $2, $3; }",
            "=r,r,r,r", [codes, scales, middles], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    mask: tl.constexpr = (1 << BITS) - 1
    half: tl.constexpr = 1 << BITS - 1
    lower = _value_of((codes & mask).to(tl.int32) - half, scales & 0xFFFF, middles & 0xFFFF)
    upper = _value_of((codes >> 16 & mask).to(tl.int32) - half, scales >> 16, middles >> 16)
    return lower | upper << 16


@triton.jit
def _half(words, shift: tl.constexpr):
    return (words >> shift).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def open_tile(tile, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ASSEMBLED: tl.constexpr):
    """A tile as an operand: bfloat16 [ROWS, COLUMNS]. tile: where it begins. Rows: 64 or 128; so are columns."""
    words = tile.to(tl.pointer_type(tl.uint32))
    count: tl.constexpr = ROWS * COLUMNS * BITS // 32
    codes = tl.load(words + tl.arange(0, count))
    t, pair = tl.arange(0, 4)[:, None], tl.arange(0, ROWS // 8)[None, :]
    scales = tl.load(words + count + t * (ROWS // 8) + pair)
    middles = tl.load(words + count + ROWS // 2 + t * (ROWS // 8) + pair)
    if BITS == 4:
        repeats: tl.constexpr = 128 // ROWS
        steps: tl.constexpr = ROWS // 32  # in twos
        codes = tl.reshape(codes, [count // 512, 4, 8, 4, repeats, steps])  # chunk, warp, column, t
        codes = tl.join(tl.join(codes, codes >> 8), tl.join(codes >> 4, codes >> 12))
        scales = tl.reshape(scales, [1, 1, 1, 4, 1, steps, 2, 2])
        middles = tl.reshape(middles, [1, 1, 1, 4, 1, steps, 2, 2])
        values = _values_of(codes, scales, middles, BITS, ASSEMBLED)
        values = tl.permute(tl.join(_half(values, 0), _half(values, 16)), (5, 6, 7, 3, 8, 0, 4, 1, 2))
    else:
        chunks: tl.constexpr = ROWS // 64  # of a repeat
        codes = tl.reshape(codes, [COLUMNS // 32, chunks, 4, 8, 4, 4])  # repeat, chunk, warp, column, t, step
        codes = tl.join(codes, codes >> 8)
        scales = tl.permute(tl.reshape(scales, [4, chunks, 1, 1, 1, 4, 2]), (2, 1, 3, 4, 0, 5, 6))
        middles = tl.permute(tl.reshape(middles, [4, chunks, 1, 1, 1, 4, 2]), (2, 1, 3, 4, 0, 5, 6))
        values = _values_of(codes, scales, middles, BITS, ASSEMBLED)
        values = tl.permute(tl.join(_half(values, 0), _half(values, 16)), (1, 5, 6, 4, 7, 0, 2, 3))
    return tl.reshape(values, [ROWS, COLUMNS])


@triton.jit
def open_pages(
    closed,
    pool,
    sources,
    targets,
    layer_bytes,
    pool_layer,
    KV_HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIM: tl.constexpr,
    BEGIN: tl.constexpr,
    BOTH_TILES: tl.constexpr,
    KEYS: tl.constexpr,
    BITS: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):
    """Grid: (pages, KV_HEADS * BLOCKS, layers). Plain pages of `pool`: bfloat16 [BLOCKS * 64, KV_HEADS, DIM].

    layer_bytes: of closed pages of a layer; pool_layer: elements of a layer in `pool`; BEGIN: where a tile begins in a
    pair.
    """
    number, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, block = number // BLOCKS, number % BLOCKS
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    tile = closed + layer * layer_bytes + (source * KV_HEADS * BLOCKS + number) * BOTH_TILES + BEGIN
    tile = tl.multiple_of(tile, 64)
    if KEYS:  # noqa: SIM108 a branch on constants
        values = tl.trans(open_tile(tile, BITS, DIM, 64, ASSEMBLED))
    else:
        values = open_tile(tile, BITS, 64, DIM, ASSEMBLED)
    token, channel = tl.arange(0, 64)[:, None], tl.arange(0, DIM)[None, :]
    row = ((target * BLOCKS + block) * 64 + token) * KV_HEADS + head
    tl.store(pool + layer * pool_layer + row * DIM + channel, values)
