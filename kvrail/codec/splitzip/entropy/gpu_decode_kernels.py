"""Triton: blocks of rANS back to bytes of pieces. A program has one warp, and each of its threads one lane of a block.

Pieces are described by a table, int64 [MOST_PIECES, FIELDS], whatever there are: a piece's first block, its bytes,
where its coded form begins in the payload, bytes of that, and where it goes in `inner`. Whatever a payload holds, no
read leaves the coded form of its piece and no write the piece: what does not fit sets wrong, int32 [1], and ends the
program.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvrail.codec.splitzip.entropy.gpu_encode_kernels import (
    BITS,
    BLOCK,
    LANES,
    LOWEST,
    RUN,
    SLOT,
    STATE_WORDS,
    SYMBOLS,
    TOTAL,
    block_of,
    ranks,
)

FIELDS = tl.constexpr(5)


@triton.jit(do_not_specialize_on_alignment=["payload"])
def slots_kernel(payload, table, slots, wrong, SLOTS: tl.constexpr):
    """Grid: pieces, TOTAL / SLOTS. From each piece's frequencies what its slots stand for, uint32 [pieces, TOTAL].

    A slot is its symbol, that one's frequency - 1 (<< 8), and its number among the symbol's slots (<< 20).
    """
    piece = tl.program_id(0)
    symbol = tl.arange(0, SYMBOLS)
    head = (payload + tl.load(table + piece * FIELDS + 2)).to(tl.pointer_type(tl.uint16))
    frequency = tl.load(head + symbol).to(tl.int32)
    end = tl.cumsum(frequency, 0)
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    ahead = end[None, :] <= slot[:, None]
    found = tl.minimum(tl.sum(ahead.to(tl.int32), axis=1), SYMBOLS - 1)
    within = slot - tl.sum(tl.where(ahead, frequency[None, :], 0), axis=1)
    share = tl.load(head + found).to(tl.int32) - 1
    entry = found | ((share & (TOTAL - 1)) << 8) | (within << 20)
    tl.store(slots + piece * TOTAL + slot, entry.to(tl.uint32))
    tl.store(wrong, 1, mask=tl.sum(frequency, axis=0) != TOTAL)


@triton.jit
def _limits(row, number, head, room):
    """Where a block begins and ends among the piece's words, and whether it can; room: words that the piece has."""
    ends = head.to(tl.pointer_type(tl.uint32))
    begin = tl.load(ends + number - 1, mask=number > 0, other=0).to(tl.int64)
    end = tl.load(ends + number).to(tl.int64)
    fits = (end - begin >= STATE_WORDS) & (end - begin <= SLOT) & (end <= room)
    return begin, end, fits


@triton.jit
def _last_words(words, at):
    """The last LANES of the words that are left, zeros where there are fewer: all that a turn can want."""
    where = at - LANES + tl.arange(0, LANES)
    return tl.load(words + where, mask=where >= 0, other=0).to(tl.uint32)


@triton.jit
def _pop(x, real, slots, words, at, window):
    """A symbol a lane, lowest lane first; the states, how many words are left (perhaps less than none), and the last.

    The next turn's words are on their way while its symbols are looked up; here they only change lanes.
    """
    entry = tl.load(slots + (x & (TOTAL - 1)))
    popped = (((entry >> 8) & (TOTAL - 1)) + 1) * (x >> BITS) + (entry >> 20)
    short = real & (popped < LOWEST)
    rank, count = ranks(short)
    word = tl.gather(window, (LANES - rank) & (LANES - 1), 0)
    popped = tl.where(short, (popped << 16) | word, popped)
    at -= count
    return tl.where(real, popped, x), entry & 0xFF, at, _last_words(words, at)


@triton.jit(do_not_specialize_on_alignment=["payload"])
def decode_kernel(payload, table, slots, inner, wrong):
    """Grid: blocks of all pieces; each piece has a multiple of four bytes.

    slots: of slots_kernel; inner: uint8, where the pieces go.
    """
    piece, row, number, left = block_of(table, tl.program_id(0).to(tl.int64), FIELDS)
    slots += piece * TOTAL
    blocks = tl.cdiv(tl.load(row + 1), BLOCK)
    head = payload + tl.load(row + 2) + 2 * SYMBOLS
    room = (tl.load(row + 3) - 2 * SYMBOLS - 4 * blocks) // 2
    begin, end, fits = _limits(row, number, head, room)
    words = (head + 4 * blocks).to(tl.pointer_type(tl.uint16))
    if number == blocks - 1:
        gap = end + tl.arange(0, 4)
        rest = tl.load(words + gap, mask=gap < tl.where(fits, room, 0), other=0).to(tl.int32)
        fits = fits & (room - end < 4) & (tl.sum(rest, axis=0) == 0)
    tl.store(wrong, 1, mask=fits == 0)
    if fits:
        words += begin
        lane = tl.arange(0, LANES)
        count = (end - begin).to(tl.int32) - STATE_WORDS
        x = tl.load(words + count + lane).to(tl.uint32)
        x |= tl.load(words + count + LANES + lane).to(tl.uint32) << 16
        at = tl.zeros([LANES], tl.int32) + count
        target = (inner + tl.load(row + 4) + number * BLOCK).to(tl.pointer_type(tl.uint32))
        size = tl.minimum(left, BLOCK).to(tl.int32) // RUN
        window = _last_words(words, at)
        for start in range(0, size, LANES):
            real = start + lane < size
            run = tl.zeros([LANES], tl.uint32)
            for turn in tl.static_range(RUN):
                x, symbol, at, window = _pop(x, real, slots, words, at, window)
                run |= symbol << (8 * turn)
            tl.store(target + start + lane, run, mask=real)
        unlike = tl.sum((x != LOWEST).to(tl.int32), axis=0) + tl.max((at != 0).to(tl.int32), axis=0)
        tl.store(wrong, 1, mask=unlike != 0)


@triton.jit
def _check_tile(
    tile, tiles, counts, groups, records, num_records, num_extensions, wrong, rows, columns, segment_rows, width,
    per_page, CHUNK: tl.constexpr, GROUP: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    group, other = tile // GROUP, tl.arange(0, GROUP)
    counted = tl.load(counts + tile).to(tl.int64)
    ahead = tl.load(counts + group * GROUP + other, mask=other < tile % GROUP, other=0).to(tl.int64)
    count, longer = counted & 0x7FFF, (counted & 0x7FFF) * (counted >> 15)
    first = tl.load(groups + 2 * group).to(tl.int64) + tl.sum(ahead & 0x7FFF, axis=0)
    extension = tl.load(groups + 2 * group + 1).to(tl.int64) + tl.sum((ahead & 0x7FFF) * (ahead >> 15), axis=0)
    last, closes = tile == tiles - 1, tile % GROUP == GROUP - 1
    following = tl.load(groups + 2 * group + 2, mask=closes & (tile < tiles - 1), other=0).to(tl.int64)
    extensions_after = tl.load(groups + 2 * group + 3, mask=closes & (tile < tiles - 1), other=0).to(tl.int64)
    following = tl.where(last, num_records, following)
    extensions_after = tl.where(last, num_extensions, extensions_after)
    unlike = (first + count != following) | (extension + longer != extensions_after)
    bad = (unlike & (closes | last)) | (count > 8 * segment_rows * width)
    bad = bad | ((tile == 0) & ((first != 0) | (extension != 0)))
    strays = 0
    for begin in range(0, count.to(tl.int32), AT_ONCE):
        at = begin + tl.arange(0, AT_ONCE)
        real = (at < count) & (first + at < num_records)
        position = tl.load(records + first + at, mask=real, other=0).to(tl.int32) & (CHUNK - 1)
        j = position >> 3
        row, column = (position & 7) * segment_rows + j // width, tile % per_page * width + j % width
        stray = real & ((row >= rows) | (column >= columns) | (j >= segment_rows * width))
        strays += tl.sum(stray.to(tl.int32), axis=0)
    tl.store(wrong, 1, mask=bad | (strays > 0))


@triton.jit(
    do_not_specialize=[
        "key_tiles", "value_tiles", "key_records_count", "value_records_count", "key_extensions_count",
        "value_extensions_count", "rows", "segment_rows", "key_columns", "value_columns", "key_width", "value_width",
        "key_per_page", "value_per_page",
    ]
)  # fmt: skip
def check_kernel(
    key_tiles,
    value_tiles,
    key_counts,
    value_counts,
    key_groups,
    value_groups,
    key_records,
    value_records,
    key_records_count: tl.int64,
    value_records_count: tl.int64,
    key_extensions_count: tl.int64,
    value_extensions_count: tl.int64,
    rows,
    segment_rows,
    key_columns,
    value_columns,
    key_width,
    value_width,
    key_per_page,
    value_per_page,
    wrong,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Grid: key tiles, then value tiles. What check_body of tiles/payload.py checks of a top a channel.

    counts: uint16 [tiles]; groups: uint32 [groups, 2]; records: uint16; wrong: int32 [1], set where counts, offsets and
    numbers of escapes do not fit each other, or a record lies on no value.
    """
    tile = tl.program_id(0)
    if tile < key_tiles:
        _check_tile(
            tile, key_tiles, key_counts, key_groups, key_records, key_records_count, key_extensions_count, wrong, rows,
            key_columns, segment_rows, key_width, key_per_page, CHUNK, GROUP, AT_ONCE,
        )  # fmt: skip
    else:
        _check_tile(
            tile - key_tiles, value_tiles, value_counts, value_groups, value_records, value_records_count,
            value_extensions_count, wrong, rows, value_columns, segment_rows, value_width, value_per_page, CHUNK, GROUP,
            AT_ONCE,
        )  # fmt: skip
