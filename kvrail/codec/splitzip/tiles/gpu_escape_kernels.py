"""Triton: how kernels list the escapes of a tile, and find them again."""

# Tuples that grow in unrolled loops have no type that mypy can follow.
# mypy: disable-error-code="assignment, misc, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvrail.codec.core.gpu_word_kernels import packed, popcount, replicated

RECORDS_AT_ONCE = tl.constexpr(64)
_TILES_PER_GROUP = tl.constexpr(64)


@triton.jit
def _rows_of(words, ROW: tl.constexpr, PARTS: tl.constexpr):
    """Words of a segment, row after row: a block [rows / PARTS, PARTS, ROW]."""
    return tl.reshape(tl.permute(words, (1, 0, 2)), [words.numel // (ROW * PARTS), PARTS, ROW])


@triton.jit
def _in_rows(words, LANES: tl.constexpr, ROW: tl.constexpr, PARTS: tl.constexpr):
    """Low bytes of all lanes of each row's words as one 64-bit number, from its low byte up, [rows / PARTS, PARTS]."""
    place = (8 * LANES * tl.arange(0, ROW)[None, None, :]).to(tl.uint64)
    return tl.sum(_rows_of(packed(words, LANES), ROW, PARTS).to(tl.uint64) << place, axis=2)


@triton.jit
def _lowest(escaped, values, STEP: tl.constexpr):
    """The lowest bit of each row that is set, and the value that it stands for; undefined where there is none."""
    below = ~escaped & (escaped - 1)
    bit = (popcount(below.to(tl.uint32)) + popcount((below >> 32).to(tl.uint32))) & 63
    return bit, tl.load(values + (bit >> 3) + (bit & 7) * STEP, mask=escaped != 0, other=0)


@triton.jit
def store_escapes(
    escaped,
    index,
    first,
    top,
    values,
    records,
    extensions,
    STEP: tl.constexpr,
    ROW: tl.constexpr,
    G: tl.constexpr,
):
    """Store a tile's records and extensions; the tile's count.

    A row is 8 neighbouring values of a segment (fewer where the geometry is odd): its escapes in all segments are 64
    bits, in the order of records. A thread takes them one by one and finds each value again in the page, which the
    cache still holds.

    Blocks of rows are [rows / 2, 2]: with neighbouring rows in one thread, as its values are, none crosses threads.
    """
    PARTS: tl.constexpr = min(2, escaped.numel // ROW)
    NEAR: tl.constexpr = 1 << (16 - G.POSITION_BITS)
    EXPONENTS: tl.constexpr = (1 << G.EXPONENT_BITS) - 1
    tops = _in_rows(tl.broadcast_to(top & replicated(EXPONENTS, G.LANES), escaped.shape), G.LANES, ROW, PARTS)
    escaped = _in_rows(escaped, G.LANES, ROW, PARTS)
    index = tl.min(_rows_of(index, ROW, PARTS), axis=2) * G.LANES
    first = tl.min(_rows_of(first, ROW, PARTS), axis=2) * G.LANES
    count = popcount(escaped.to(tl.uint32)) + popcount((escaped >> 32).to(tl.uint32))
    sums = tl.sum(count, axis=1)
    first_at = tl.cumsum(sums, 0) - sums
    at = first_at[:, None] + (sums[:, None] - count) * tl.arange(0, PARTS)[None, :]  # the second behind the first
    furthest = tl.zeros_like(count)
    bit, value = _lowest(escaped, values + first, STEP * G.LANES)
    for _ in range(tl.max(count)):
        live, this, found = escaped != 0, bit, value
        escaped = escaped & (escaped - 1)
        bit, value = _lowest(escaped, values + first, STEP * G.LANES)  # under way while this one is stored
        far = (tops >> (this & 56).to(tl.uint64)).to(tl.int32) - (found.to(tl.int32) >> G.MANTISSA_BITS)
        far = (far & EXPONENTS) - (1 << G.CODE_BITS)
        record = index * 8 + this + ((far & (NEAR - 1)) << G.POSITION_BITS)
        tl.store(records + at, record.to(tl.uint16), mask=live)
        tl.store(extensions + at, (far >> (16 - G.POSITION_BITS)).to(tl.uint8), mask=live)
        furthest = tl.maximum(furthest, tl.where(live, far, 0))
        at += live.to(tl.int32)
    return tl.sum(sums) + tl.where(tl.max(furthest) >= NEAR, 0x8000, 0)


@triton.jit
def records_of(tile, counts, groups, records, extensions):
    """How many escapes a tile has, whether they have extensions, and pointers to its first record and extension."""
    count = tl.load(counts + tile).to(tl.int32)
    group = tile // _TILES_PER_GROUP
    other = tl.arange(0, _TILES_PER_GROUP)
    ahead = tl.load(counts + group * _TILES_PER_GROUP + other, mask=other < tile % _TILES_PER_GROUP, other=0).to(
        tl.int32
    )
    records += tl.load(groups + 2 * group).to(tl.int64) + tl.sum(ahead & 0x7FFF)
    extensions += tl.load(groups + 2 * group + 1).to(tl.int64) + tl.sum((ahead & 0x7FFF) * (ahead >> 15))
    return count & 0x7FFF, count >> 15, records, extensions


@triton.jit
def load_records(begin, count, wide, records, extensions):
    """Records and extensions from number `begin` on, int32; 0 beyond the last."""
    at = begin + tl.arange(0, RECORDS_AT_ONCE)
    record = tl.load(records + at, mask=at < count, other=0).to(tl.int32)
    beyond = tl.load(extensions + at, mask=at < count * wide, other=0).to(tl.int32)
    return record, beyond, at < count
