"""Closing of pages in Triton: bit for bit what tests/reference does, each value by the arithmetic of its place."""

import triton
import triton.language as tl

from kvrail.engine.kv.fixed import form as fixed
from kvrail.engine.kv.fixed.close_kernel import TO_INTEGER, widened
from kvrail.engine.kv.kvcomp import form
from kvrail.engine.kv.kvcomp.open_kernel import LANES_BYTES, UNIT

_REFUSED = tl.constexpr(fixed.REFUSED)
_NO_SCALE = tl.constexpr(fixed.NO_SCALE)
_LEAST_SCALE = tl.constexpr(fixed.LEAST_SCALE)
_LEAST_OFFSET = tl.constexpr(fixed.LEAST_OFFSET)
_SCALE_SHIFT = tl.constexpr(fixed.SCALE_SHIFT)
_OFFSET_SHIFT = tl.constexpr(fixed.OFFSET_SHIFT)
_SPREAD = tl.constexpr(form.SPREAD)
_FINE, _COARSE = (tl.constexpr(form.share(code)) for code in form.KEYS)
_FINE_TOP, _COARSE_TOP = (tl.constexpr(float(code.top)) for code in form.KEYS)
_OF_VALUES = tl.constexpr(form.share(form.VALUES[0]))
_TOP_OF_VALUES = tl.constexpr(float(form.VALUES[0].top))
_SYMBOLS = tl.constexpr(32)
"""Entries of a table of codes."""


@triton.jit
def _write_steps(plain, part, KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, SHARE: tl.constexpr):
    """Write scales and offsets of rows as they are, not as they are stored; whether the tile is refused."""
    ROWS: tl.constexpr = DIM if KEYS else 64
    token, channel = tl.arange(0, 64)[:, None], tl.arange(0, DIM)[None, :]
    bits = tl.load(plain + token * KV_HEADS * DIM + channel).to(tl.int32)
    refused = tl.max(tl.max(bits & 0x7FFF, axis=1), axis=0) >= _REFUSED
    every = widened(tl.where(refused, 0, bits))
    low, high = tl.min(every, axis=0 if KEYS else 1), tl.max(every, axis=0 if KEYS else 1)
    scales = (tl.maximum((high - low) * SHARE, _LEAST_SCALE).to(tl.uint32, bitcast=True) >> 16).to(tl.int32)
    none = tl.abs(low) <= widened(scales) * _LEAST_OFFSET
    offsets = tl.where(none, 0, (low.to(tl.uint32, bitcast=True) >> 16).to(tl.int32))
    row = tl.arange(0, ROWS)
    steps = part.to(tl.pointer_type(tl.int16)) + _step_places(row, ROWS)
    tl.debug_barrier()  # no thread reads those of another code any more
    tl.store(steps, scales.to(tl.int16))
    tl.store(steps + 4, offsets.to(tl.int16))
    tl.debug_barrier()  # what follows reads them
    return refused


@triton.jit
def _step_places(row, ROWS: tl.constexpr):
    return row // 2 % 4 * (ROWS // 2) + row // 16 * 8 + row // 8 % 2 * 2 + row % 2


@triton.jit
def _codes_at(
    plain, part, codes, number, refused,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Codes, with their lengths from bit 8 on, of symbol `number` of each stream: int32 [4, 32]."""
    ROWS: tl.constexpr = DIM if KEYS else 64
    warp, lane = tl.arange(0, 4)[:, None], tl.arange(0, 32)[None, :]
    row = number // 4 % (ROWS // 16) * 16 + lane % 4 * 2 + number % 2 + number // 2 % 2 * 8
    column = (number // (ROWS // 4) * 4 + warp) * 8 + lane // 4
    at = column * KV_HEADS * DIM + row if KEYS else row * KV_HEADS * DIM + column
    value = widened(tl.where(refused, 0, tl.load(plain + at).to(tl.int32)))
    steps = part.to(tl.pointer_type(tl.int16)) + _step_places(row + warp * 0, ROWS)
    symbol = tl.div_rn(value - widened(tl.load(steps + 4).to(tl.int32)), widened(tl.load(steps).to(tl.int32)))
    symbol = (tl.minimum(tl.maximum(symbol, 0.0), TOP) + TO_INTEGER).to(tl.int32, bitcast=True) & (_SYMBOLS - 1)
    return tl.load(codes + symbol).to(tl.int32)


@triton.jit
def _measure(
    plain, part, codes, refused, KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, TOP: tl.constexpr
):
    """Units of each stream, int32 [4, 32]."""
    bits = tl.zeros([4, 32], tl.int32)
    for number in range(DIM // 2):
        bits += _codes_at(plain, part, codes, number, refused, KV_HEADS, DIM, KEYS, TOP) >> 8
    return (bits + UNIT - 1) // UNIT


@triton.jit
def _all(units):
    return tl.sum(tl.sum(units, 1), 0)


@triton.jit
def _fits(units):
    """Whether the lengths of streams can be said."""
    return tl.max(tl.max(units, 1), 0) - tl.min(tl.min(units, 1), 0) <= _SPREAD


@triton.jit
def _write_streams(
    plain, part, codes, units, begin, refused,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Add a tile's streams, from unit `begin` of its part on, to words that are zeros."""
    words, sums = part.to(tl.pointer_type(tl.int32)), tl.sum(units, 1)
    starts = begin + tl.cumsum(sums, 0) - sums
    bit = UNIT * (starts[:, None] + tl.cumsum(units, 1) - units)
    for four in range(DIM // 8):
        held, bits = tl.zeros([4, 32], tl.int32), tl.zeros([4, 32], tl.int32)
        for inner in tl.static_range(4):
            code = _codes_at(plain, part, codes, 4 * four + inner, refused, KV_HEADS, DIM, KEYS, TOP)
            held |= (code & 0xFF) << bits
            bits += code >> 8
        both = held.to(tl.int64) << (bit & 31).to(tl.int64)
        upper = (both >> 32).to(tl.int32)
        tl.atomic_or(words + (bit >> 5), both.to(tl.int32), sem="relaxed")
        tl.atomic_or(words + (bit >> 5) + 1, upper, mask=upper != 0, sem="relaxed")
        bit += bits


@triton.jit
def _write_part(part, units, begin, number, refused, ROWS: tl.constexpr):
    """Write lengths of streams and the head of a tile, and its steps as they are stored."""
    base = tl.min(tl.min(units, 1), 0)
    lower, upper = tl.split(tl.reshape(units - base, [64, 2]))
    lanes = part + 4 * ROWS
    tl.store(lanes + tl.arange(0, 64), (lower | upper << 4).to(tl.uint8))
    head, sums = (lanes + LANES_BYTES).to(tl.pointer_type(tl.int16)), tl.sum(units, 1)
    tl.store(head, base.to(tl.int16))
    tl.store(head + 1, number.to(tl.int16))
    tl.store(head + 2 + tl.arange(0, 4), (begin + tl.cumsum(sums, 0) - sums).to(tl.int16))
    tl.debug_barrier()  # no thread reads the steps any more
    steps = part.to(tl.pointer_type(tl.int16)) + _step_places(tl.arange(0, ROWS), ROWS)
    scales, offsets = tl.load(steps).to(tl.int32), tl.load(steps + 4).to(tl.int32)
    tl.debug_barrier()  # several threads may have read a row, and write it
    tl.store(steps, tl.where(refused, _NO_SCALE, scales + _SCALE_SHIFT).to(tl.int16))
    tl.store(steps + 4, tl.where(offsets == 0, 0, offsets - _OFFSET_SHIFT).to(tl.int16))


@triton.jit
def close_pages(
    keys,
    values,
    closed,
    codes,
    sources,
    targets,
    key_layer,
    value_layer,
    layer_bytes,
    KV_HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PART: tl.constexpr,
    STREAMS: tl.constexpr,
    BOTH_TILES: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Grid: (pages, KV_HEADS * BLOCKS, layers). Plain pages of keys and values: int16 [BLOCKS * 64, KV_HEADS, dim].

    codes: `form.writing_tables`. key_layer, value_layer: elements of a layer of each; layer_bytes: of closed pages of a
    layer. KEY_PART: bytes of the keys' part; STREAMS: where streams begin in a pair; ROOM: units of streams that fit.
    """
    number, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    pair = closed + layer * layer_bytes + (target * KV_HEADS * BLOCKS + number) * BOTH_TILES
    pair = tl.multiple_of(pair, 64)
    row = (source * BLOCKS + number % BLOCKS) * 64 * KV_HEADS + number // BLOCKS
    keys += layer * key_layer + row * KEY_DIM
    values += layer * value_layer + row * VALUE_DIM
    part = pair + KEY_PART

    words: tl.constexpr = (BOTH_TILES - STREAMS) // 4
    for at in range(0, words, 128):
        word = at + tl.arange(0, 128)
        tl.store((pair + STREAMS).to(tl.pointer_type(tl.int32)) + word, word * 0, mask=word < words)
    odd_values = _write_steps(values, part, KV_HEADS, VALUE_DIM, False, _OF_VALUES)
    short = codes + 2 * _SYMBOLS
    second = _measure(values, part, short, odd_values, KV_HEADS, VALUE_DIM, False, _TOP_OF_VALUES)
    even = second * 0 + (3 * VALUE_DIM // 2 + UNIT - 1) // UNIT
    of_values = 1 - (_fits(second) & (_all(second) <= _all(even))).to(tl.int32)
    second = tl.where(of_values == 1, even, second)

    odd_keys = _write_steps(keys, pair, KV_HEADS, KEY_DIM, True, _FINE)
    first = _measure(keys, pair, codes, odd_keys, KV_HEADS, KEY_DIM, True, _FINE_TOP)
    begin = 2 * STREAMS
    of_keys = 1 - (_fits(first) & (_all(first) + _all(second) <= ROOM)).to(tl.int32)
    if of_keys == 1:
        _write_steps(keys, pair, KV_HEADS, KEY_DIM, True, _COARSE)
        first = first * 0 + (4 * KEY_DIM // 2 + UNIT - 1) // UNIT
        _write_streams(keys, pair, codes + _SYMBOLS, first, begin, odd_keys, KV_HEADS, KEY_DIM, True, _COARSE_TOP)
    else:
        _write_streams(keys, pair, codes, first, begin, odd_keys, KV_HEADS, KEY_DIM, True, _FINE_TOP)
    _write_part(pair, first, begin, of_keys, odd_keys, KEY_DIM)
    begin += _all(first) - 2 * KEY_PART
    _write_streams(
        values, part, short + of_values * _SYMBOLS, second, begin, odd_values, KV_HEADS, VALUE_DIM, False,
        _TOP_OF_VALUES,
    )  # fmt: skip
    _write_part(part, second, begin, of_values, odd_values, 64)
