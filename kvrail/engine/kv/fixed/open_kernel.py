"""Opening of pages of fixed width in Triton: see `form` for their bytes, and for why tiles are opened / SHRUNK.

As with lossless pages, what a thread loads of a tile is what it multiplies.
"""

import triton
import triton.language as tl

from kvrail.engine.kv.fixed import form

SHRUNK = tl.constexpr(form.SHRUNK)


@triton.jit
def _widened(bits):
    """Bits of bfloat16 as float64."""
    return (bits << 16).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _fma(a, b, c):
    """Bits of a * b + c, rounded once, of bfloat16 in the lower half of each word."""
    bits = (_widened(a) * _widened(b) + _widened(c)).to(tl.uint64, bitcast=True)
    bits = (bits + ((1 << 44) - 1) + (bits >> 45 & 1)) >> 45 << 45
    return bits.to(tl.float64, bitcast=True).to(tl.float32).to(tl.uint32, bitcast=True) >> 16


@triton.jit
def _values_of(codes, scales, offsets, ASSEMBLED: tl.constexpr):
    """Words of two values each, from words of two codes, two scales and two offsets, all bfloat16.

    ASSEMBLED: by the instruction for it, which Triton's interpreter does not know.
    """
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [codes, scales, offsets],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    lower = _fma(codes & 0xFFFF, scales & 0xFFFF, offsets & 0xFFFF)
    return lower | _fma(codes >> 16, scales >> 16, offsets >> 16) << 16


@triton.jit
def _odd_bytes(words, ASSEMBLED: tl.constexpr):
    """The upper byte of each half of a word, as the half."""
    if ASSEMBLED:  # one instruction instead of two
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x4341;", "=r,r", [words], dtype=tl.uint32, is_pure=True, pack=1
        )
    return words >> 8 & 0x00FF00FF


@triton.jit
def _half(words, shift: tl.constexpr):
    return (words >> shift).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def values_of_bytes(codes, both, ROWS: tl.constexpr, ASSEMBLED: tl.constexpr):
    """A tile / SHRUNK from words of four codes, [repeat, chunk, warp, column, t, step], and its steps, [rows]."""
    chunks: tl.constexpr = ROWS // 64  # of a repeat
    codes = tl.join(codes & 0x00FF00FF, _odd_bytes(codes, ASSEMBLED))
    both = tl.permute(tl.reshape(both, [4, chunks, 1, 1, 1, 4, 2, 2]), (2, 1, 3, 4, 0, 5, 7, 6))
    scales, offsets = tl.split(both)
    values = _values_of(codes, scales, offsets, ASSEMBLED)
    return tl.permute(tl.join(_half(values, 0), _half(values, 16)), (1, 5, 6, 4, 7, 0, 2, 3))


@triton.jit
def load_steps(words, ROWS: tl.constexpr):
    """128 words: the steps of 128 rows, or of 64 with 64 words before or behind them.

    Four lanes need a quarter of a tile's steps each, and read them from shared memory, four words at a time. What they
    read together lies side by side there, so that no two of them need the same bank.
    """
    place = tl.arange(0, 128)
    word = place // ROWS * ROWS + place % 16 // 4 * (ROWS // 4) + place % ROWS // 16 * 4 + place % 4
    found = tl.reshape(tl.load(words + word), [128 // ROWS, ROWS // 16, 4, 4])
    return tl.reshape(tl.permute(found, (0, 2, 1, 3)), [128])


@triton.jit
def open_tile(tile, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ASSEMBLED: tl.constexpr):
    """A tile / SHRUNK as an operand: bfloat16 [ROWS, COLUMNS], each 64 or 128. tile: where it begins."""
    words = tile.to(tl.pointer_type(tl.uint32))
    count: tl.constexpr = ROWS * COLUMNS * BITS // 32
    codes = tl.load(words + tl.arange(0, count))
    # 128 words, with codes before them that nothing needs where steps are 64. Of fewer than it has threads, a program
    # would load all words in each thread that needs some, four bytes at a time.
    steps_of = load_steps(words + count + ROWS - 128, ROWS)
    both = steps_of if ROWS == 128 else tl.split(tl.permute(tl.reshape(steps_of, [2, 64]), (1, 0)))[1]
    if BITS == 4:
        repeats: tl.constexpr = 128 // ROWS
        steps: tl.constexpr = ROWS // 32  # in twos
        codes = tl.reshape(codes, [count // 512, 4, 8, 4, repeats, steps])  # chunk, warp, column, t
        upper = codes >> 8
        codes = tl.join(
            tl.join(codes & 0x000F000F, upper & 0x000F000F), tl.join(codes & 0x00F000F0, upper & 0x00F000F0)
        )
        both = tl.permute(tl.reshape(both, [1, 1, 1, 4, 1, steps, 2, 2, 2]), (0, 1, 2, 3, 4, 5, 6, 8, 7))
        scales, offsets = tl.split(both)
        values = _values_of(codes, scales, offsets, ASSEMBLED)
        values = tl.permute(tl.join(_half(values, 0), _half(values, 16)), (5, 6, 7, 3, 8, 0, 4, 1, 2))
    else:
        codes = tl.reshape(codes, [COLUMNS // 32, ROWS // 64, 4, 8, 4, 4])
        values = values_of_bytes(codes, both, ROWS, ASSEMBLED)
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
    tl.store(pool + layer * pool_layer + row * DIM + channel, (values.to(tl.float32) * SHRUNK).to(tl.bfloat16))
