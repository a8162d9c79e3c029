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
_OF_SUMS = tl.constexpr(127 - 13 - 40 - form.BIAS)
"""What the tile's exponent is added to, for a float32's exponent: of sums * scale / SHRUNK."""
_OF_MEANS = tl.constexpr(2.0**12)
_ABOVE = tl.constexpr(2 * 128 + 3)
"""What a code's number, 128 + code, is twice above its level."""


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
def open_rotated(tile, DIM: tl.constexpr):
    """A tile of values / SHRUNK: bfloat16 [64, DIM], DIM 64 or 128. tile: where it begins."""
    BLOCKS: tl.constexpr = DIM // 64
    words = tl.load(tile.to(tl.pointer_type(tl.uint32)) + tl.arange(0, 4 * DIM))
    words = tl.reshape(words, [4, 8, 4, BLOCKS, 2])  # warp, g, t, block, r
    first = tl.join(tl.join(_pair(words, 0), _pair(words, 4)), tl.join(_pair(words, 2), _pair(words, 6)))
    second = tl.join(tl.join(_pair(words, 1), _pair(words, 5)), tl.join(_pair(words, 3), _pair(words, 7)))
    codes = tl.join(first, second)  # warp, g, t, block, r, i, upper s, lower s, h
    codes = tl.reshape(tl.permute(codes, (3, 0, 4, 1, 6, 7, 8, 2, 5)), [BLOCKS * 64, 64])
    turned = (0x3F80 | signs(False) << 15).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    sums = tl.dot(codes, turned)
    sums = tl.reshape(tl.permute(tl.reshape(sums, [BLOCKS, 64, 64]), (1, 0, 2)), [64, DIM])
    channel, token = tl.arange(0, DIM), tl.arange(0, 64)
    sums = sums * 2 - tl.where(channel % 64 == 0, 64.0 * _ABOVE, 0.0)[None, :]

    means = tl.load(tile + 16 * DIM + channel).to(tl.int32)
    scales = tile + 17 * DIM
    codes_of = tl.load(scales + token).to(tl.int32) & 127
    scale = tl.where(codes_of == 0, 0, codes_of + _LEAST_CODE << 20).to(tl.float32, bitcast=True)
    scale = tl.where(codes_of == _REFUSED_CODE, float("nan"), scale)
    unit = (_exponent_of(scales) + _OF_SUMS - (means >> 5) << 23).to(tl.float32, bitcast=True)
    mean = ((means & 31 ^ 16) - 16).to(tl.float32) * _OF_MEANS * unit
    return (sums * unit[None, :] * scale[:, None] + mean[None, :]).to(tl.bfloat16)


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
):
    """Grid: (pages, KV_HEADS * BLOCKS, layers): see `kvrail.engine.kv.fixed.open_kernel.open_pages`."""
    number, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, block = number // BLOCKS, number % BLOCKS
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    tile = closed + layer * layer_bytes + (source * KV_HEADS * BLOCKS + number) * BOTH_TILES + BEGIN
    values = open_rotated(tl.multiple_of(tile, 64), DIM)
    token, channel = tl.arange(0, 64)[:, None], tl.arange(0, DIM)[None, :]
    row = ((target * BLOCKS + block) * 64 + token) * KV_HEADS + head
    tl.store(pool + layer * pool_layer + row * DIM + channel, (values.to(tl.float32) * SHRUNK).to(tl.bfloat16))
