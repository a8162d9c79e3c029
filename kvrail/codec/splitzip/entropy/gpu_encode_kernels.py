"""Triton: bytes of pieces to blocks of rANS. A program has one warp, and each of its threads one lane of a block.

Pieces are described by a table, int64 [MOST_PIECES, FIELDS], whatever there are: a piece's first block, its bytes,
where it begins in `inner`, and, once that is known, where its coded form begins in the payload (less than 0: nowhere).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvrail.codec.core.gpu_word_kernels import COMPILED
from kvrail.codec.splitzip.entropy import format as code

FIELDS = tl.constexpr(4)
MOST_PIECES = tl.constexpr(code.MOST_PIECES)
LANES = tl.constexpr(code.LANES)
RUN = tl.constexpr(code.RUN)
BLOCK = tl.constexpr(code.BLOCK_BYTES)
STATE_WORDS = tl.constexpr(code.STATE_WORDS)
SYMBOLS = tl.constexpr(code.SYMBOLS)
BITS = tl.constexpr(code.PROBABILITY_BITS)
TOTAL = tl.constexpr(code.TOTAL)
LOWEST = tl.constexpr(code.LOWEST_STATE)
RECIPROCAL_BITS = tl.constexpr(code.RECIPROCAL_BITS)
RECIPROCAL = tl.constexpr(1 << code.RECIPROCAL_BITS)
SLOT = tl.constexpr(code.BLOCK_BYTES + code.STATE_WORDS)
"""Words that a coded block has at most: no symbol takes more than one."""


@triton.jit
def ranks(chosen):
    """For each lane, how many lanes up to itself are chosen; and how many in all, also a block [LANES]."""
    if COMPILED:
        rank, count = tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 all, mask; setp.ne.u32 p, $2, 0; vote.sync.ballot.b32 all, p, 0xffffffff;"
            " mov.u32 mask, %lanemask_le; and.b32 mask, mask, all; popc.b32 $0, mask; popc.b32 $1, all; }",
            "=r,=r,r", [chosen.to(tl.int32)], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        rank = tl.cumsum(chosen.to(tl.int32), 0)
        count = tl.zeros_like(rank) + tl.sum(chosen.to(tl.int32), axis=0)
    return rank, count


@triton.jit
def block_of(table, block, COLUMNS: tl.constexpr):
    """A block's piece, that piece's row of the table, the block's number in it, and bytes of it from there on."""
    piece = 0
    for other in tl.static_range(1, MOST_PIECES):
        piece += (block >= tl.load(table + other * COLUMNS)).to(tl.int32)
    row = table + piece * COLUMNS
    number = block - tl.load(row)
    return piece, row, number, tl.load(row + 1) - number * BLOCK


@triton.jit
def count_kernel(inner, table, counts, AT_ONCE: tl.constexpr):
    """Grid: blocks of all pieces. Adds how often each byte occurs to counts, int64 [pieces, 256]."""
    piece, row, number, left = block_of(table, tl.program_id(0).to(tl.int64), FIELDS)
    source = inner + tl.load(row + 2) + number * BLOCK
    found = tl.zeros([SYMBOLS], tl.int32)
    size = tl.minimum(left, BLOCK).to(tl.int32)
    at = tl.arange(0, AT_ONCE)
    for begin in range(0, size, AT_ONCE):
        real = begin + at < size
        found += tl.histogram(tl.load(source + begin + at, mask=real, other=0).to(tl.int32), SYMBOLS, mask=real)
    tl.atomic_add(counts + piece * SYMBOLS + tl.arange(0, SYMBOLS), found.to(tl.int64), sem="relaxed")


@triton.jit
def model_kernel(counts, model, reciprocals):
    """Grid: pieces. From counts, int64 [pieces, 256], what format.frequencies_of gives.

    model: uint32, frequency << 16 | frequencies before it; reciprocals: int64; both [pieces, 256].
    """
    at = tl.program_id(0) * SYMBOLS + tl.arange(0, SYMBOLS)
    count = tl.load(counts + at)
    rare = (count > 0) & (count * TOTAL < 2 * tl.sum(count, axis=0))
    common = tl.where(rare, 0, count)
    shared = TOTAL - tl.sum(rare.to(tl.int64), axis=0)
    whole = tl.maximum(tl.sum(common, axis=0), 1)
    end = tl.cumsum(common, 0)
    frequency = end * shared // whole - (end - common) * shared // whole + rare.to(tl.int64)
    below = tl.cumsum(frequency, 0) - frequency
    tl.store(model + at, (frequency << 16 | below).to(tl.uint32))
    tl.store(reciprocals + at, tl.full([SYMBOLS], RECIPROCAL, tl.int64) // tl.maximum(frequency, 1) + 1)


@triton.jit
def _look_up(run, model, reciprocals, TURN: tl.constexpr):
    """What the model has of a lane's symbol in one of its turns."""
    symbol = (run >> (8 * TURN)) & 0xFF
    return tl.load(model + symbol), tl.load(reciprocals + symbol).to(tl.uint64, bitcast=True)


@triton.jit
def _push(x, entry, reciprocal, real, words, at):
    """Code a symbol a lane, highest lane first; the states, and where the next words go."""
    frequency = entry >> 16
    full = real & ((x >> (32 - BITS)) >= frequency)
    rank, count = ranks(full)
    tl.store(words + (at + count - rank), x.to(tl.uint16), mask=full)
    x = tl.where(full, x >> 16, x)
    quotient = ((x.to(tl.uint64) * reciprocal) >> RECIPROCAL_BITS).to(tl.uint32)
    coded = x + quotient * (TOTAL - frequency) + (entry & 0xFFFF)
    return tl.where(real, coded, x), at + count


@triton.jit
def encode_kernel(inner, table, model, reciprocals, slots, sizes):
    """Grid: blocks of all pieces. Each into a slot of its own; every piece has a multiple of four bytes.

    slots: uint16 [blocks, SLOT]; sizes: int64 [blocks], words in each.
    """
    block = tl.program_id(0).to(tl.int64)
    piece, row, number, left = block_of(table, block, FIELDS)
    source = (inner + tl.load(row + 2) + number * BLOCK).to(tl.pointer_type(tl.uint32))
    model += piece * SYMBOLS
    reciprocals += piece * SYMBOLS
    words = slots + block * SLOT
    size = tl.minimum(left, BLOCK).to(tl.int32) // RUN
    lane = tl.arange(0, LANES)
    x = tl.full([LANES], LOWEST, tl.uint32)
    at = tl.zeros([LANES], tl.int32)
    where = (size - 1) // LANES * LANES + lane
    run = tl.load(source + where, mask=where < size, other=0)
    for _ in range(tl.cdiv(size, LANES)):
        following = tl.load(source + (where - LANES), mask=where >= LANES, other=0)  # on its way meanwhile
        real = where < size
        # All of a run are looked up before any word is stored, behind which no load could be brought forward.
        first, by_first = _look_up(run, model, reciprocals, 0)
        second, by_second = _look_up(run, model, reciprocals, 1)
        third, by_third = _look_up(run, model, reciprocals, 2)
        fourth, by_fourth = _look_up(run, model, reciprocals, 3)
        x, at = _push(x, fourth, by_fourth, real, words, at)
        x, at = _push(x, third, by_third, real, words, at)
        x, at = _push(x, second, by_second, real, words, at)
        x, at = _push(x, first, by_first, real, words, at)
        run = following
        where -= LANES
    tl.store(words + at + lane, x.to(tl.uint16))
    tl.store(words + at + LANES + lane, (x >> 16).to(tl.uint16))
    tl.store(sizes + block, tl.max(at, axis=0).to(tl.int64) + STATE_WORDS)


@triton.jit
def place_kernel(table, model, slots, ends, payload, AT_ONCE: tl.constexpr):
    """Grid: blocks of all pieces. The pieces' coded forms into their places; ends: int64 [blocks], sums of the sizes.

    A piece's first program writes its frequencies, and its last the zeros behind it.
    """
    block = tl.program_id(0).to(tl.int64)
    piece, row, number, _left = block_of(table, block, FIELDS)
    place = tl.load(row + 3)
    if place >= 0:
        first = tl.load(row)
        blocks = tl.cdiv(tl.load(row + 1), BLOCK)
        before = tl.load(ends + first - 1, mask=first > 0, other=0)
        begin = tl.load(ends + block - 1, mask=block > 0, other=0)
        end = tl.load(ends + block)
        head = payload + place
        tl.store((head + 2 * SYMBOLS).to(tl.pointer_type(tl.uint32)) + number, (end - before).to(tl.uint32))
        if number == 0:
            symbol = tl.arange(0, SYMBOLS)
            frequency = tl.load(model + piece * SYMBOLS + symbol) >> 16
            tl.store(head.to(tl.pointer_type(tl.uint16)) + symbol, frequency.to(tl.uint16))
        source = slots + block * SLOT
        target = (head + 2 * SYMBOLS + 4 * blocks).to(tl.pointer_type(tl.uint16)) + (begin - before)
        size = (end - begin).to(tl.int32)
        at = tl.arange(0, AT_ONCE)
        for start in range(0, size, AT_ONCE):
            inside = start + at < size
            tl.store(target + start + at, tl.load(source + start + at, mask=inside, other=0), mask=inside)
        if number == blocks - 1:
            head_words = SYMBOLS + 2 * blocks + (end - before)
            gap = tl.arange(0, 4)
            zero = tl.zeros([4], tl.uint16)
            tl.store(target + size + gap, zero, mask=gap < (4 - head_words % 4) % 4)
