"""Opening of KVComp's pages in Triton: see `form` for their bits.

A thread reads one stream of a tile, whose symbols are those that it multiplies: four at a time, as a word of four codes
that `kvrail.engine.kv.fixed.open_kernel` makes values of. So nothing moves between threads, and no copy is made.
"""

import triton
import triton.language as tl

from kvrail.engine.kv.fixed.open_kernel import SHRUNK, load_steps, values_of_bytes
from kvrail.engine.kv.kvcomp import form

CODED = tl.constexpr(form.CODED)
LANES_BYTES = tl.constexpr(form.LANES_BYTES)
UNIT = tl.constexpr(form.UNIT)
_TABLE = tl.constexpr(2 << form.MAX_BITS)
"""Bytes of a code's table."""


@triton.jit
def _packed(first, second, third, fourth, ASSEMBLED: tl.constexpr):
    """The symbols of four entries as a word of four codes.

    ASSEMBLED: by the instruction for it, which Triton's interpreter does not know.
    """
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; mad.lo.u32 a, $3, 65536, $1; mad.lo.u32 b, $4, 65536, $2; prmt.b32 $0, a, b, 0x7531; }",
            "=r,r,r,r,r", [first, second, third, fourth], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    return first >> 8 | third >> 8 << 8 | second >> 8 << 16 | fourth >> 8 << 24


@triton.jit
def _from(low, high, bit, ASSEMBLED: tl.constexpr):
    """32 bits of two words, from the one on that `bit` counts, modulo 32."""
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, bit], dtype=tl.uint32, is_pure=True, pack=1
        )
    return ((high.to(tl.uint64) << 32 | low) >> (bit & 31).to(tl.uint64)).to(tl.uint32)


@triton.jit
def _entries(tables, table, ASSEMBLED: tl.constexpr):
    """What `_entry` takes: each lane has the entry of its number, of 32. The interpreter has where they begin."""
    entries = (tables + table).to(tl.pointer_type(tl.uint16))
    if ASSEMBLED:
        lane = tl.inline_asm_elementwise(
            "mov.u32 $0, %laneid;", "=r,r", [table], dtype=tl.int32, is_pure=True, pack=1
        )  # fmt: skip
        entries = tl.load(entries + lane).to(tl.uint32)
    return entries


@triton.jit
def _entry(held, entries, ASSEMBLED: tl.constexpr):
    """The entry of the code that `held` begins with: lanes ask one another, since a load takes longer."""
    if ASSEMBLED:
        entry = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", [entries, held],
            dtype=tl.uint32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        entry = tl.load(entries + (held & 31)).to(tl.uint32)
    return entry


@triton.jit
def _behind(held, entry, above, ASSEMBLED: tl.constexpr):
    """What follows in `held` the code that `entry` is of, with bits of `above` behind it that nothing needs.

    So it has to wait for these, and the compiler cannot put them off.
    """
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $3, $2;", "=r,r,r,r", [held, entry, above], dtype=tl.uint32, is_pure=True, pack=1
        )
    return held >> (entry & 31)


@triton.jit
def _behind_in_step(held, entry, ASSEMBLED: tl.constexpr):
    """What follows the code. A thread with two streams waits for the entries of both, so that look-ups take turns."""
    if ASSEMBLED and held.shape[0] == 256:
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $2, $5, $4; shf.r.wrap.b32 $1, $3, $4, $5;", "=r,=r,r,r,r,r", [held, entry],
            dtype=tl.uint32, is_pure=True, pack=2,
        )  # fmt: skip
    return _behind(held, entry, entry, ASSEMBLED)


@triton.jit
def _passed(bit, after, ASSEMBLED: tl.constexpr):
    """32 where one bit is in another word than the other, else 0."""
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, 32, 0x28;", "=r,r,r", [bit, after], dtype=tl.uint32, is_pure=True, pack=1
        )
    return (bit ^ after) & 32


@triton.jit
def _four(words, at, bit, low, high, ahead, entries, ASSEMBLED: tl.constexpr):
    """The next four symbols of each stream, as a word, and the state behind them.

    The state: the word that the next code begins in, and the bit, modulo 64; that word, and the two behind it. So it is
    loaded before a symbol waits for it.
    """
    held = _from(low, high, bit, ASSEMBLED)
    first = _entry(held, entries, ASSEMBLED)
    held = _behind_in_step(held, first, ASSEMBLED)
    second = _entry(held, entries, ASSEMBLED)
    held = _behind_in_step(held, second, ASSEMBLED)
    third = _entry(held, entries, ASSEMBLED)
    held = _behind(held, third, ahead, ASSEMBLED)
    fourth = _entry(held, entries, ASSEMBLED)
    after = bit + first + second + third + fourth  # four symbols come to less than 32 bits
    passed = _passed(bit, after, ASSEMBLED)
    low, high = tl.where(passed != 0, high, low), tl.where(passed != 0, ahead, high)
    at += passed >> 5
    ahead = tl.load(words + at + 2)
    return _packed(first, second, third, fourth, ASSEMBLED), at, after, low, high, ahead


@triton.jit
def _sixteen(words, at, bit, low, high, ahead, entries, ASSEMBLED: tl.constexpr):
    """The next sixteen symbols of each stream, [stream, two, two], and the state behind them."""
    first, at, bit, low, high, ahead = _four(words, at, bit, low, high, ahead, entries, ASSEMBLED)
    second, at, bit, low, high, ahead = _four(words, at, bit, low, high, ahead, entries, ASSEMBLED)
    third, at, bit, low, high, ahead = _four(words, at, bit, low, high, ahead, entries, ASSEMBLED)
    fourth, at, bit, low, high, ahead = _four(words, at, bit, low, high, ahead, entries, ASSEMBLED)
    return tl.join(tl.join(first, third), tl.join(second, fourth)), at, bit, low, high, ahead


@triton.jit
def _codes_of(pair, begin, lanes, kind, tables, WORDS: tl.constexpr, ASSEMBLED: tl.constexpr):
    """The words of 128 or 256 streams: [stream, fours.., four], eight or sixteen of each.

    begin, lanes, kind: of each stream, where its part and the part's lanes begin in the pair, in bytes; 0 of keys, 1 of
    values. They have one dimension, so that a thread has the stream of its number, whose symbols it multiplies.
    """
    STREAMS: tl.constexpr = begin.shape[0]
    words = pair.to(tl.pointer_type(tl.uint32))
    stream = tl.arange(0, STREAMS) % 128
    longer = tl.load(pair + lanes + stream // 2).to(tl.int32) >> 4 * (stream % 2) & 15
    head = (pair + lanes + LANES_BYTES).to(tl.pointer_type(tl.uint16))
    units = longer + tl.load(head).to(tl.int32)
    before = tl.reshape(tl.cumsum(tl.reshape(units, [STREAMS // 32, 32]), 1), [STREAMS]) - units
    bit = (8 * begin + UNIT * (tl.load(head + 2 + stream // 32).to(tl.int32) + before)).to(tl.uint32)
    entries = _entries(tables, _TABLE * (tl.load(head + 1).to(tl.int32) + 2 * kind), ASSEMBLED)
    at = bit >> 5
    low, high, ahead = tl.load(words + at), tl.load(words + at + 1), tl.load(words + at + 2)
    codes, at, bit, low, high, ahead = _sixteen(words, at, bit, low, high, ahead, entries, ASSEMBLED)
    others, at, bit, low, high, ahead = _sixteen(words, at, bit, low, high, ahead, entries, ASSEMBLED)
    codes = tl.join(codes, others)
    if WORDS == 16:
        third, at, bit, low, high, ahead = _sixteen(words, at, bit, low, high, ahead, entries, ASSEMBLED)
        others, at, bit, low, high, ahead = _sixteen(words, at, bit, low, high, ahead, entries, ASSEMBLED)
        codes = tl.join(codes, tl.join(third, others))
    return codes


@triton.jit
def codes_of_tile(
    pair, tables, BEGIN: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """The words of one tile's streams, as `open_coded` takes them. BEGIN: where its part begins in the pair."""
    begin = BEGIN + 0 * tl.arange(0, 128)
    words: tl.constexpr = ROWS * COLUMNS // 512
    codes = _codes_of(pair, begin, begin + 4 * ROWS, begin * 0 + (not KEYS), tables, words, ASSEMBLED)
    if words == 16:  # noqa: SIM108 a branch on constants
        codes = tl.permute(codes, (4, 3, 0, 1, 2))
    else:
        codes = tl.permute(codes, (3, 0, 1, 2))
    return codes


@triton.jit
def codes_of_pair(
    pair, tables, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, KEY_TILE: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """The words of both tiles' streams: see `codes_of_tile`.

    A symbol waits for the one before, so a thread reads a stream of keys and one of values side by side.
    """
    if KEY_DIM != VALUE_DIM:
        keys = codes_of_tile(pair, tables, 0, True, KEY_DIM, BLOCK, ASSEMBLED)
        values = codes_of_tile(pair, tables, KEY_TILE, False, BLOCK, VALUE_DIM, ASSEMBLED)
    else:
        kind = tl.arange(0, 256) // 128
        begin = kind * KEY_TILE
        lanes = 4 * KEY_DIM + kind * (KEY_TILE + 4 * (BLOCK - KEY_DIM))
        codes = _codes_of(pair, begin, lanes, kind, tables, KEY_DIM * BLOCK // 512, ASSEMBLED)
        if KEY_DIM == 128:
            codes = tl.permute(tl.reshape(codes, [2, 128, 2, 2, 2, 2]), (5, 4, 1, 2, 3, 0))
        else:
            codes = tl.permute(tl.reshape(codes, [2, 128, 2, 2, 2]), (4, 1, 2, 3, 0))
        keys, values = tl.split(codes)
    return keys, values


@triton.jit
def fetch_ahead(pair, ASSEMBLED: tl.constexpr):
    """Have a pair of tiles be on its way to the cache that all programs share: no loop over blocks loads it early."""
    if ASSEMBLED:
        line = (pair + 64 * tl.arange(0, 128)).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], dtype=tl.uint32, is_pure=False, pack=1
        )


@triton.jit
def open_coded(part, codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ASSEMBLED: tl.constexpr):
    """A tile / SHRUNK as an operand: bfloat16 [ROWS, COLUMNS], each 64 or 128.

    part: where its part begins; codes: the words of its streams, [fours, stream, four].
    """
    # 128 words, with some behind them that nothing needs where steps are 64: see `fixed.open_kernel.open_tile`.
    steps_of = load_steps(part.to(tl.pointer_type(tl.uint32)), ROWS)
    both = steps_of if ROWS == 128 else tl.split(tl.permute(tl.reshape(steps_of, [2, 64]), (1, 0)))[0]
    codes = tl.reshape(codes, [COLUMNS // 32, ROWS // 64, 4, 8, 4, 4])
    return tl.reshape(values_of_bytes(codes, both, ROWS, ASSEMBLED), [ROWS, COLUMNS])


@triton.jit
def open_pages(
    closed,
    tables,
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
    ASSEMBLED: tl.constexpr,
):
    """Grid: (pages, KV_HEADS * BLOCKS, layers). Plain pages of `pool`: bfloat16 [BLOCKS * 64, KV_HEADS, DIM].

    layer_bytes: of closed pages of a layer; pool_layer: elements of a layer in `pool`; BEGIN: where a part begins in a
    pair.
    """
    number, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, block = number // BLOCKS, number % BLOCKS
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    pair = closed + layer * layer_bytes + (source * KV_HEADS * BLOCKS + number) * BOTH_TILES
    pair = tl.multiple_of(pair, 64)
    rows: tl.constexpr = DIM if KEYS else 64
    columns: tl.constexpr = 64 if KEYS else DIM
    codes = codes_of_tile(pair, tables, BEGIN, KEYS, rows, columns, ASSEMBLED)
    values = open_coded(pair + BEGIN, codes, rows, columns, ASSEMBLED)
    if KEYS:
        values = tl.trans(values)
    token, channel = tl.arange(0, 64)[:, None], tl.arange(0, DIM)[None, :]
    row = ((target * BLOCKS + block) * 64 + token) * KV_HEADS + head
    tl.store(pool + layer * pool_layer + row * DIM + channel, (values.to(tl.float32) * SHRUNK).to(tl.bfloat16))
