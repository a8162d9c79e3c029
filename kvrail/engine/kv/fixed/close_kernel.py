"""Closing of pages in Triton: bit for bit what tests/reference does, each value by the arithmetic of its place."""

import triton
import triton.language as tl

from kvrail.engine.kv.fixed import form

_REFUSED = tl.constexpr(form.REFUSED)
_NO_SCALE = tl.constexpr(form.NO_SCALE)
_LEAST_SCALE = tl.constexpr(form.LEAST_SCALE)
_LEAST_OFFSET = tl.constexpr(form.LEAST_OFFSET)
_SCALE_SHIFT = tl.constexpr(form.SCALE_SHIFT)
_OFFSET_SHIFT = tl.constexpr(form.OFFSET_SHIFT)
_HIGH_SHIFT = tl.constexpr(form.HIGH_SHIFT)
_SHARE_OF_4 = tl.constexpr(form.share(4))
_SHARE_OF_8 = tl.constexpr(form.share(8))
TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""Added to a float32 it leaves the nearest integer, ties to even, in the lowest bits."""


@triton.jit
def widened(bits):
    """Bits of bfloat16, int32, as float32."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _steps_of(low, high, BITS: tl.constexpr):
    """Bits of scales and of offsets, int32, of rows by their smallest and largest values."""
    scale = tl.maximum((high - low) * (_SHARE_OF_4 if BITS == 4 else _SHARE_OF_8), _LEAST_SCALE)
    scales = ((scale.to(tl.uint32, bitcast=True) + 0xFFFF) >> 16).to(tl.int32)
    none = tl.abs(low) <= widened(scales) * _LEAST_OFFSET
    return scales, tl.where(none, 0, (low.to(tl.uint32, bitcast=True) >> 16).to(tl.int32))


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
    KEYS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Grid: (pages, KV_HEADS * BLOCKS, layers). Plain pages of `pool`: int16 [BLOCKS * 64, KV_HEADS, DIM].

    pool_layer: elements of a layer in `pool`; layer_bytes: of closed pages of a layer; BEGIN: where a tile begins in a
    pair.
    """
    number, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    plain = pool + layer * pool_layer + ((source * BLOCKS + number % BLOCKS) * 64 * KV_HEADS + number // BLOCKS) * DIM
    tile = closed + layer * layer_bytes + (target * KV_HEADS * BLOCKS + number) * BOTH_TILES + BEGIN
    tile = tl.multiple_of(tile, 64)
    ROWS: tl.constexpr = DIM if KEYS else 64
    count: tl.constexpr = 64 * DIM * BITS // 32
    steps = (tile + 4 * count).to(tl.pointer_type(tl.int16))
    token, channel = tl.arange(0, 64)[:, None], tl.arange(0, DIM)[None, :]
    bits = tl.load(plain + token * KV_HEADS * DIM + channel).to(tl.int32)
    refused = tl.max(tl.max(bits & 0x7FFF, axis=1), axis=0) >= _REFUSED
    every = widened(tl.where(refused, 0, bits))
    low, high = tl.min(every, axis=0 if KEYS else 1), tl.max(every, axis=0 if KEYS else 1)
    scales, offsets = _steps_of(low, high, BITS)
    row = tl.arange(0, ROWS)
    place = row // 2 % 4 * (ROWS // 2) + row // 16 * 8 + row // 8 % 2 * 2 + row % 2
    tl.store(steps + place, scales.to(tl.int16))
    tl.store(steps + place + 4, offsets.to(tl.int16))
    tl.debug_barrier()  # what follows reads them

    word = tl.arange(0, count)
    words = word * 0
    for value in tl.static_range(32 // BITS):
        inner = (word // 512 * 4 + word % 4) * (32 // BITS) + value  # of a lane's values
        step, repeat = inner // 4 % (ROWS // 16), inner // 4 // (ROWS // 16)
        row = step * 16 + word // 4 % 4 * 2 + inner % 2 + inner // 2 % 2 * 8
        column = (repeat * 4 + word // 128 % 4) * 8 + word // 16 % 8
        place = word // 4 % 4 * (ROWS // 2) + step * 8 + inner % 4
        at = column * KV_HEADS * DIM + row if KEYS else row * KV_HEADS * DIM + column
        x = widened(tl.where(refused, 0, tl.load(plain + at).to(tl.int32)))
        scale = widened(tl.load(steps + place).to(tl.int32))
        code = tl.div_rn(x - widened(tl.load(steps + place + 4).to(tl.int32)), scale)
        code = tl.minimum(tl.maximum(code, 0.0), (1 << BITS) - 1.0)
        code = (code + TO_INTEGER).to(tl.int32, bitcast=True)
        words |= (code & (1 << BITS) - 1) << BITS * (value // 2) + 16 * (value % 2)
    tl.store(tile.to(tl.pointer_type(tl.int32)) + word, words)
    tl.debug_barrier()  # no thread reads the steps any more
    row = tl.arange(0, ROWS)
    place = row // 2 % 4 * (ROWS // 2) + row // 16 * 8 + row // 8 % 2 * 2 + row % 2
    stored = scales + _SCALE_SHIFT - (_HIGH_SHIFT if BITS == 4 else 0) * (row // 8 % 2)
    tl.store(steps + place, tl.where(refused, _NO_SCALE, stored).to(tl.int16))
    tl.store(steps + place + 4, tl.where(offsets == 0, 0, offsets - _OFFSET_SHIFT).to(tl.int16))
