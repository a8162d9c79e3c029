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
_TABLE = tl.constexpr(1 << form.MAX_BITS)


@triton.jit
def _packed(first, second, third, fourth, ASSEMBLED: tl.constexpr):
    """The symbols of four entries as a word of four codes.

    ASSEMBLED: by the instruction for it, which Triton's interpreter does not know.
    """
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; prmt.b32 a, $1, $3, 0x0040; prmt.b32 b, $2, $4, 0x0040; prmt.b32 $0, a, b, 0x5410; }",
            "=r,r,r,r,r", [first, second, third, fourth], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    return first & 0xFF | (third & 0xFF) << 8 | (second & 0xFF) << 16 | (fourth & 0xFF) << 24


@triton.jit
def _four(words, bit, table, ASSEMBLED: tl.constexpr):
    """The next four symbols of each stream, as a word, and where what follows begins. bit: counted from `words`."""
    at = words + (bit >> 5)
    both = tl.load(at + 1).to(tl.uint64) << 32 | tl.load(at)
    held = (both >> (bit & 31).to(tl.uint64)).to(tl.uint32)
    first = tl.load(table + (held & (_TABLE - 1))).to(tl.uint32)
    held >>= first >> 8
    second = tl.load(table + (held & (_TABLE - 1))).to(tl.uint32)
    held >>= second >> 8
    third = tl.load(table + (held & (_TABLE - 1))).to(tl.uint32)
    held >>= third >> 8
    fourth = tl.load(table + (held & (_TABLE - 1))).to(tl.uint32)
    bits = first + second + third + fourth >> 8  # four symbols come to less than 256
    return _packed(first, second, third, fourth, ASSEMBLED), bit + bits.to(tl.int32)


@triton.jit
def _sixteen(words, bit, table, ASSEMBLED: tl.constexpr):
    """The next sixteen symbols of each stream, as four words, and where what follows begins."""
    first, bit = _four(words, bit, table, ASSEMBLED)
    second, bit = _four(words, bit, table, ASSEMBLED)
    third, bit = _four(words, bit, table, ASSEMBLED)
    fourth, bit = _four(words, bit, table, ASSEMBLED)
    return first, second, third, fourth, bit


@triton.jit
def _either(take, a, b, c, d, e, f, g, h):
    """The first four, or the others."""
    return tl.where(take, a, e), tl.where(take, b, f), tl.where(take, c, g), tl.where(take, d, h)


@triton.jit
def _joined(a, b, c, d):
    """Side by side in two new dimensions."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _codes_of(words, bit, table, WORDS: tl.constexpr, ASSEMBLED: tl.constexpr):
    """The words of each stream in fours: [fours, stream, four]. WORDS: of a stream, 8 or 16.

    They are read in two turns of a loop, since Triton's compiler takes cubically long for a line of loads. What the
    loop carries has one dimension, so that a thread has the stream of its number, whose symbols it multiplies.
    """
    a = tl.zeros([128], tl.uint32)
    b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = a, a, a, a, a, a, a, a, a, a, a, a, a, a, a  # noqa: E741
    for half in range(2):
        i, j, k, l, bit = _sixteen(words, bit, table, ASSEMBLED)  # noqa: E741
        a, b, c, d = _either(half == 0, i, j, k, l, a, b, c, d)
        if WORDS == 16:
            m, n, o, p, bit = _sixteen(words, bit, table, ASSEMBLED)
            e, f, g, h = _either(half == 0, m, n, o, p, e, f, g, h)
    if WORDS == 16:
        codes = _joined(_joined(a, b, c, d), _joined(e, f, g, h), _joined(i, j, k, l), _joined(m, n, o, p))
        codes = tl.permute(codes, (3, 4, 0, 1, 2))
    else:
        codes = tl.permute(tl.join(_joined(a, b, c, d), _joined(i, j, k, l)), (3, 0, 1, 2))
    return codes


@triton.jit
def fetch_ahead(pair, ASSEMBLED: tl.constexpr):
    """Have a pair of tiles be on its way to the cache that all programs share: no loop over blocks loads it early."""
    if ASSEMBLED:
        line = (pair + 64 * tl.arange(0, 128)).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], dtype=tl.uint32, is_pure=False, pack=1
        )


@triton.jit
def open_coded(part, tables, KEYS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ASSEMBLED: tl.constexpr):
    """A tile / SHRUNK as an operand: bfloat16 [ROWS, COLUMNS], each 64 or 128.

    part: where its part begins; tables: `form.reading_tables`.
    """
    words = part.to(tl.pointer_type(tl.uint32))
    # 128 words, with some behind them that nothing needs where steps are 64: see `fixed.open_kernel.open_tile`.
    steps_of = load_steps(words, ROWS)
    both = steps_of if ROWS == 128 else tl.split(tl.permute(tl.reshape(steps_of, [2, 64]), (1, 0)))[0]
    stream = tl.arange(0, 128)
    lanes = part + 4 * ROWS
    longer = tl.load(lanes + stream // 2).to(tl.int32) >> 4 * (stream % 2) & 15
    head = (lanes + LANES_BYTES).to(tl.pointer_type(tl.uint16))
    units = longer + tl.load(head).to(tl.int32)
    before = tl.reshape(tl.cumsum(tl.reshape(units, [4, 32]), 1), [128]) - units
    bit = UNIT * (tl.load(head + 2 + stream // 32).to(tl.int32) + before)
    table = tables.to(tl.pointer_type(tl.uint16)) + _TABLE * (tl.load(head + 1).to(tl.int32) + (0 if KEYS else 2))
    codes = _codes_of(words, bit, table, ROWS * COLUMNS // 512, ASSEMBLED)
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
    part = tl.multiple_of(pair, 64) + BEGIN
    if KEYS:
        values = tl.trans(open_coded(part, tables, True, DIM, 64, ASSEMBLED))
    else:
        values = open_coded(part, tables, False, 64, DIM, ASSEMBLED)
    token, channel = tl.arange(0, 64)[:, None], tl.arange(0, DIM)[None, :]
    row = ((target * BLOCKS + block) * 64 + token) * KV_HEADS + head
    tl.store(pool + layer * pool_layer + row * DIM + channel, (values.to(tl.float32) * SHRUNK).to(tl.bfloat16))
