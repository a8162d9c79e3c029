"""Opening of rotated values in Triton: see `form` for their bits, and for why no order of sums matters.

What a thread loads of a tile's codes is its part of a product's first operand. The product undoes the rotation.
"""

import triton
import triton.language as tl

from kvrail.engine.kv.fixed.open_kernel import SHRUNK
from kvrail.engine.kv.rotated import form

KEY_BITS = tl.constexpr(form.KEY_BITS)
ROTATED = tl.constexpr(form.ROTATED)
_LEAST_CODE = tl.constexpr(form.LEAST_CODE)
_REFUSED_CODE = tl.constexpr(form.REFUSED_CODE)
_OF_UNITS = tl.constexpr(127 - 12 - 40 - form.BIAS)
"""What the tile's exponent is added to, for a bfloat16's exponent: of half sums * scale / SHRUNK."""
_ABOVE = tl.constexpr(-64 * (128 + 1.5))
"""What 128 + code is above half a level, of 64 values."""


@triton.jit
def signs(TRANSPOSED: tl.constexpr):
    """`form.signs`, by rotated value and channel, as 0 and 1: int32 [64, 64]."""
    i, j = tl.arange(0, 64)[None, :], tl.arange(0, 64)[:, None]
    if TRANSPOSED:
        i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    bits = i & (j ^ (i >> 1 & 21))
    bits ^= bits >> 4
    bits ^= bits >> 2
    return (bits ^ bits >> 1) & 1


@triton.jit
def _pair(words, number: tl.constexpr):
    """128 + code of pair `number` of each word, two bfloat16 in a new dimension."""
    both = (words >> 2 * number) & 0x00030003 | 0x43004300
    lower, upper = (both & 0xFFFF).to(tl.uint16), (both >> 16).to(tl.uint16)
    return tl.join(lower.to(tl.bfloat16, bitcast=True), upper.to(tl.bfloat16, bitcast=True))


@triton.jit
def _exponent_of(scales):
    """E + BIAS, from the upper bits of a tile's first eight scales."""
    words = scales.to(tl.pointer_type(tl.uint32))
    # Bits 0, 8, 16 and 24 come to lie in bits 24 to 27; no other product reaches these.
    lower = (tl.load(words) >> 7 & 0x01010101) * 0x01020408 >> 24 & 15
    upper = (tl.load(words + 1) >> 7 & 0x01010101) * 0x01020408 >> 24 & 15
    return (lower | upper << 4).to(tl.int32)


@triton.jit
def _widened(half):
    """bfloat16 in the lower half of each word as float32."""
    return (half << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(values):
    """Words of one bfloat16."""
    return values.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _opened(lower, upper, units, scales, means, ASSEMBLED: tl.constexpr):
    """Words of two values, of two half sums, float32, and words of two units, scales and means, bfloat16.

    ASSEMBLED: by instructions for two bfloat16, which Triton's interpreter does not know. Half sums are integers of at
    most 96, and units powers of two: only the multiply-add rounds.
    """
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 h; cvt.rn.bf16x2.f32 h, $2, $1; fma.rn.bf16x2 h, h, $4, $5; mul.rn.bf16x2 $0, h, $3; }",
            "=r,r,r,r,r,r", [lower, upper, units, scales, means], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    first = (lower * _widened(scales & 0xFFFF) + _widened(means & 0xFFFF)) * _widened(units & 0xFFFF)
    second = (upper * _widened(scales >> 16) + _widened(means >> 16)) * _widened(units >> 16)
    return _rounded(first) | _rounded(second) << 16


@triton.jit
def _means_of(bytes, ASSEMBLED: tl.constexpr):
    """Words of two means, bfloat16, of words of two bytes: n * 2^11, what half sums * scale count in."""
    numbers = (bytes & 0x001F001F) ^ 0x48904890  # (144 + n) * 2^11
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; mov.b32 a, 0xC890C890; add.rn.bf16x2 $0, $1, a; }",
            "=r,r", [numbers], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    below: tl.constexpr = 144.0 * 2048
    return _rounded(_widened(numbers & 0xFFFF) - below) | _rounded(_widened(numbers >> 16) - below) << 16


@triton.jit
def _open_block(tile, turned, scale, exponent, BLOCK: tl.constexpr, DIM: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Words of two values each of a block of channels: [64, 32]. turned: signs; exponent: of two units, bfloat16."""
    place = tl.arange(0, 256)
    words = tl.load(tile.to(tl.pointer_type(tl.uint32)) + place // 2 * (DIM // 32) + 2 * BLOCK + place % 2)
    words = tl.reshape(words, [4, 8, 4, 2])  # warp, g, t, r
    first = tl.join(tl.join(_pair(words, 0), _pair(words, 4)), tl.join(_pair(words, 2), _pair(words, 6)))
    second = tl.join(tl.join(_pair(words, 1), _pair(words, 5)), tl.join(_pair(words, 3), _pair(words, 7)))
    codes = tl.join(first, second)  # warp, g, t, r, i, upper s, lower s, h
    codes = tl.reshape(tl.permute(codes, (0, 3, 1, 5, 6, 7, 2, 4)), [64, 64])
    lower, upper = tl.split(tl.reshape(tl.dot(codes, turned), [64, 32, 2]))
    lower = tl.where((tl.arange(0, 32) == 0)[None, :], lower + _ABOVE, lower)

    place = tl.arange(0, 16)
    channels = (tile + 16 * DIM).to(tl.pointer_type(tl.uint32)) + place // 4 * (DIM // 16) + 4 * BLOCK + place % 4
    channels = tl.permute(tl.reshape(tl.load(channels), [4, 4]), (1, 0))  # s, t
    both = tl.permute(tl.join(channels, channels >> 8), (0, 2, 1))  # s, h, t
    both = tl.reshape(both, [1, 32])
    units = exponent - (both & 0x00E000E0) * 4
    means = tl.broadcast_to(_means_of(both, ASSEMBLED), [64, 32])
    return _opened(lower, upper, tl.broadcast_to(units, [64, 32]), scale, means, ASSEMBLED)


@triton.jit
def open_rotated(tile, DIM: tl.constexpr, ASSEMBLED: tl.constexpr):
    """A tile of values / SHRUNK: bfloat16 [64, DIM], DIM 64 or 128. tile: where it begins."""
    turned = (0x3F80 | signs(False) << 15).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    scales = tile + 17 * DIM
    exponent = (_exponent_of(scales) + _OF_UNITS).to(tl.uint32) * 0x00800080
    code = tl.load(scales + tl.arange(0, 64)).to(tl.uint32) & 127
    scale = tl.where(code == 0, 0, code + _LEAST_CODE << 4) * 0x00010001
    scale = tl.broadcast_to(tl.where(code == _REFUSED_CODE, 0x7FC07FC0, scale)[:, None], [64, 32])
    words = _open_block(tile, turned, scale, exponent, 0, DIM, ASSEMBLED)
    if DIM == 128:
        second = _open_block(tile, turned, scale, exponent, 1, DIM, ASSEMBLED)
        words = tl.reshape(tl.permute(tl.join(words, second), (0, 2, 1)), [64, 64])
    values = tl.join((words & 0xFFFF).to(tl.uint16), (words >> 16).to(tl.uint16))
    return tl.reshape(values.to(tl.bfloat16, bitcast=True), [64, DIM])


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
    ASSEMBLED: tl.constexpr,
):
    """Grid: (pages, KV_HEADS * BLOCKS, layers): see `kvrail.engine.kv.fixed.open_kernel.open_pages`."""
    number, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, block = number // BLOCKS, number % BLOCKS
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    tile = closed + layer * layer_bytes + (source * KV_HEADS * BLOCKS + number) * BOTH_TILES + BEGIN
    values = open_rotated(tl.multiple_of(tile, 64), DIM, ASSEMBLED)
    token, channel = tl.arange(0, 64)[:, None], tl.arange(0, DIM)[None, :]
    row = ((target * BLOCKS + block) * 64 + token) * KV_HEADS + head
    tl.store(pool + layer * pool_layer + row * DIM + channel, (values.to(tl.float32) * SHRUNK).to(tl.bfloat16))
