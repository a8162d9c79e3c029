"""Closing of values in Triton: bit for bit what tests/reference does. All sums are of integers, exact in any order."""

import triton
import triton.language as tl

from kvrail.engine.kv.fixed import form as fixed
from kvrail.engine.kv.fixed.close_kernel import TO_INTEGER, widened
from kvrail.engine.kv.rotated import form
from kvrail.engine.kv.rotated.open_kernel import signs

_REFUSED = tl.constexpr(fixed.REFUSED)
_BIAS = tl.constexpr(form.BIAS)
_FRACTION = tl.constexpr(form.FRACTION)
_LEAST_MAGNITUDE = tl.constexpr(form.LEAST_MAGNITUDE)
_LARGEST = tl.constexpr(float(form.LARGEST))
_UNIT = tl.constexpr(form.UNIT)
_MOST_MEAN = tl.constexpr(form.MOST_MEAN)
_MOST_SHIFT = tl.constexpr(form.MOST_SHIFT)
_LEAST_CODE = tl.constexpr(form.LEAST_CODE)
_MOST_CODE = tl.constexpr(form.MOST_CODE)
_INTEGER_BITS = tl.constexpr(0x4B400000)
"""Those of TO_INTEGER."""


@triton.jit
def _nearest(values):
    """Integers, ties to even, of magnitudes below 2^22."""
    return (values + TO_INTEGER).to(tl.int32, bitcast=True) - _INTEGER_BITS


@triton.jit
def _power(exponent):
    """2^exponent."""
    return (exponent + 127 << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exponent(numbers):
    """The exponents of integers, 0 or more, as float32; that of 0 is -127."""
    return (numbers.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _channels(values):
    """Each channel's unit as a power of two, and its mean in halves of it, int32 [DIM], of int32 [64, DIM]."""
    wide = values.to(tl.int64)
    total = tl.sum(wide, 0)
    spread = _exponent(64 * tl.sum(wide * wide, 0) - total * total)
    units = tl.maximum(tl.maximum(spread - 11 >> 1, _exponent(tl.abs(total)) - 8), 0)
    units = tl.maximum(units, tl.max(units, 0) - _MOST_SHIFT)
    means = (total.to(tl.int32) + (16 << units)) >> 5 + units
    return units, tl.minimum(tl.maximum(means, -_MOST_MEAN), _MOST_MEAN)


@triton.jit
def _rotated(y, DIM: tl.constexpr):
    """Codes, int32 [64, DIM], and scales, int32 [64], of int32 [64, DIM]."""
    BLOCKS: tl.constexpr = DIM // 64
    rows = tl.reshape(tl.permute(tl.reshape(y, [64, BLOCKS, 64]), (1, 0, 2)), [BLOCKS * 64, 64])
    z = tl.dot(rows.to(tl.float16), (1 - 2 * signs(True)).to(tl.float16)).to(tl.int32)
    z = tl.reshape(tl.permute(tl.reshape(z, [BLOCKS, 64, 64]), (1, 0, 2)), [64, DIM])
    norm = 64 * tl.sum((y * y).to(tl.int64), 1)
    wide = z.to(tl.int64)
    outer = (DIM * wide * wide > norm[:, None]).to(tl.int32)
    product = tl.maximum(tl.sum(tl.abs(z) * (1 + 2 * outer), 1), 1)
    fair = tl.div_rn(norm.to(tl.float32), product.to(tl.float32))
    bound = tl.div_rn((2 * product).to(tl.float32), tl.sum(1 + 8 * outer, 1).to(tl.float32))
    bits = tl.minimum(fair, bound).to(tl.int32, bitcast=True)
    scales = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - _LEAST_CODE
    return tl.where(z < 0, 1 - outer, 2 + outer), tl.minimum(tl.maximum(scales, 0), _MOST_CODE)


@triton.jit
def _packed(codes, DIM: tl.constexpr):
    """Words of sixteen codes each, int32 [4 * DIM], in the order of storage."""
    channel = tl.arange(0, DIM)
    moved = codes << (16 * (channel % 2) + 4 * (channel // 16 % 4) + 2 * (channel // 8 % 2))[None, :]
    moved = tl.reshape(moved, [4, 2, 8, DIM // 64, 8, 4, 2])  # warp, r, g, block, s and h, t, i
    return tl.sum(tl.reshape(tl.permute(moved, (0, 2, 5, 3, 1, 4, 6)), [4 * DIM, 16]), 1)


@triton.jit
def close_pages(
    pool,
    closed,
    sources,
    targets,
    pool_layer,
    layer_bytes,
    KV_HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIM: tl.constexpr,
    BEGIN: tl.constexpr,
    BOTH_TILES: tl.constexpr,
):
    """Grid: (pages, KV_HEADS * BLOCKS, layers): see `kvrail.engine.kv.fixed.close_kernel.close_pages`."""
    number, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    plain = pool + layer * pool_layer + ((source * BLOCKS + number % BLOCKS) * 64 * KV_HEADS + number // BLOCKS) * DIM
    tile = closed + layer * layer_bytes + (target * KV_HEADS * BLOCKS + number) * BOTH_TILES + BEGIN
    tile = tl.multiple_of(tile, 64)
    token, channel = tl.arange(0, 64), tl.arange(0, DIM)
    bits = tl.load(plain + token[:, None] * KV_HEADS * DIM + channel[None, :]).to(tl.int32)
    largest = tl.max(tl.max(bits & 0x7FFF, axis=1), axis=0)
    refused = largest >= _REFUSED
    bits = tl.where(refused, 0, bits)
    magnitude = tl.maximum(tl.where(refused, 0, largest >> 7) - 127, _LEAST_MAGNITUDE)
    values = _nearest(widened(bits) * _power(-magnitude + _FRACTION))
    units, means = _channels(values)
    y = (2 * values - (means << units)[None, :]).to(tl.float32) * _power(-units + (_UNIT - 1))[None, :]
    codes, scales = _rotated(_nearest(tl.minimum(tl.maximum(y, -_LARGEST), _LARGEST)), DIM)
    tl.store(tile.to(tl.pointer_type(tl.int32)) + tl.arange(0, 4 * DIM), _packed(codes, DIM))
    unit = tl.max(units, 0)
    place = channel // 2 % 4 * (DIM // 4) + channel // 16 * 4 + channel % 2 * 2 + channel // 8 % 2
    tl.store(tile + 16 * DIM + place, (means & 31 | unit - units << 5).to(tl.uint8))
    scales |= (unit + magnitude - _FRACTION + _BIAS >> token % 8 & 1) << 7
    tl.store(tile + 17 * DIM + token, tl.where(refused, 255, scales).to(tl.uint8))
