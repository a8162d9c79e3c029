"""Opening of closed pages in Triton: see `form` for their bytes.

With four warps that share the columns of a product, what a thread loads of a tile is what it multiplies, so that
opening a tile as an operand moves nothing between threads.
"""

import triton
import triton.language as tl

from kvrail.engine.kv.lossless import form

_RAW = tl.constexpr(form.RAW)
_SPECIAL_TILE = tl.constexpr(form.RAW | form.SOME)
_PLACE = tl.constexpr(form.SOME - 1)


@triton.jit
def _words_of(low, high, UPPER: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Words of two bfloat16 each: the lower two values of a word of low bytes and one of high bytes, or the UPPER two.

    ASSEMBLED: by the instruction for it, which Triton's interpreter does not know.
    """
    if ASSEMBLED:
        if UPPER:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x7362;", "=r,r,r", [low, high], dtype=tl.uint32, is_pure=True, pack=1
            )
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )
    if UPPER:
        low, high = low >> 16, high >> 16
    return (low & 0xFF) | (low & 0xFF00) << 8 | (high & 0xFF) << 8 | (high & 0xFF00) << 16


@triton.jit
def _values_of(low, high, ASSEMBLED: tl.constexpr):
    """The four bfloat16 of each word of low bytes and of high bytes, [..., 2, 2]."""
    lower = _words_of(low, high, False, ASSEMBLED)
    upper = _words_of(low, high, True, ASSEMBLED)
    words = tl.join(lower, upper)
    return tl.join(_half(words, 0), _half(words, 16))


@triton.jit
def _half(words, shift: tl.constexpr):
    return (words >> shift).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _spread(nibbles, DIM: tl.constexpr):
    """Parts of high bytes from words of nibbles, in the order of low bytes: [2, DIM / 64, 4, 8, 4, 4]."""
    first = nibbles & 0x87878787
    second = (nibbles << 4 | nibbles >> 28) & 0x87878787
    both = tl.reshape(tl.join(first, second), [DIM // 64, 128, 2, 2, 2])  # pair of chunks, lane, chunk, half, word
    return tl.reshape(tl.permute(both, (0, 2, 1, 3, 4)), [2, DIM // 64, 4, 8, 4, 4])


@triton.jit
def _with_escape(high, word, DIM: tl.constexpr):
    """High bytes, [2, DIM / 64, 4, 8, 4, 4], with an escape of each group in its place; word: of each group, [8]."""
    place = tl.reshape(tl.arange(0, DIM * 2), [1, DIM // 64, 1, 8, 4, 4])
    word = tl.reshape(word, [2, 1, 4, 1, 1, 1])
    return high ^ tl.where(place == (word & _PLACE) >> 2, word >> 24 << 8 * (word & 3), 0)


@triton.constexpr_function
def _escaping(words: int) -> str:
    """PTX of `_with_escapes` for a thread's words of a group: a warp whose group has no escapes takes a branch."""
    first, second, lane = (f"${number * words}" for number in (2, 3, 4))
    code = [f"mov.b32 ${word}, ${words + word};" for word in range(words)]
    code += [f"or.b32 a, {first}, {second};", "setp.lt.u32 p, a, 0x1000000;", "@p bra none_${:uid};"]
    for escape in (first, second):
        code += [f"and.b32 a, {escape}, 3;", "shl.b32 a, a, 3;", f"shr.u32 b, {escape}, 24;", "shl.b32 b, b, a;"]
        code += [f"bfe.u32 a, {escape}, 2, 20;", f"sub.s32 a, a, {lane};"]
        for word in range(words):
            place = word // 4 * 128 + word % 4
            code += [f"setp.eq.s32 p, a, {place};", f"@p xor.b32 ${word}, ${word}, b;"]
    return "{ .reg .pred p; .reg .b32 a, b;\n" + "\n".join(code) + "\nnone_${:uid}:\n }"


@triton.constexpr_function
def _operands(words: int) -> str:
    """Of `_escaping`: words, and of each the same word, the group's two of escapes, and the place of the lane."""
    return ",".join(["=&r"] * words + ["r"] * 4 * words)


@triton.jit
def _with_escapes(high, first, second, DIM: tl.constexpr, ASSEMBLED: tl.constexpr):
    """High bytes with both escapes of each group in their places; see `_with_escape`."""
    if not ASSEMBLED:
        return _with_escape(_with_escape(high, first, DIM), second, DIM)
    WORDS: tl.constexpr = DIM // 16
    lane = tl.reshape(tl.arange(0, 32) * 4, [1, 1, 1, 8, 4, 1]).to(tl.uint32)
    first, second = tl.reshape(first, [2, 1, 4, 1, 1, 1]), tl.reshape(second, [2, 1, 4, 1, 1, 1])
    return tl.inline_asm_elementwise(
        _escaping(WORDS), _operands(WORDS), [high, first, second, lane],
        dtype=tl.uint32, is_pure=True, pack=WORDS,
    )  # fmt: skip


@triton.jit
def _high_of(tile, bases, spare, unit_bytes, DIM: tl.constexpr, ASSEMBLED: tl.constexpr):
    """High bytes of a tile in the order of its low bytes, four a word: [2, DIM / 64, 4, 8, 4, 4].

    tile: uint32; bases: in a shape that broadcasts to that of the result.
    """
    nibbles = tl.load(tile + 16 * DIM + tl.arange(0, 8 * DIM))
    high = _spread(nibbles, DIM) + bases
    words = tile + 24 * DIM + DIM // 4
    group = 2 * tl.arange(0, 8)
    head, first, second = tl.load(words), tl.load(words + group), tl.load(words + group + 1)
    if head & _SPECIAL_TILE:  # words are loaded ahead, and looked at where there are escapes
        if head & _RAW:
            unit = tl.load(words + 1).to(tl.int64) * unit_bytes
            raw = tl.load((spare + unit).to(tl.pointer_type(tl.uint32)) + tl.arange(0, 16 * DIM))
            high = tl.reshape(raw, [2, DIM // 64, 4, 8, 4, 4])
        else:
            high = _with_escapes(high, first, second, DIM, ASSEMBLED)
    return high


@triton.jit
def open_keys(tile, spare, unit_bytes, DIM: tl.constexpr, ASSEMBLED: tl.constexpr):
    """The keys of a tile: bfloat16 [DIM, 64]. tile: where it begins; spare: spare units, of unit_bytes."""
    tile = tile.to(tl.pointer_type(tl.uint32))
    low = tl.reshape(tl.load(tile + tl.arange(0, 16 * DIM)), [2, DIM // 64, 4, 8, 4, 4])
    step, t = tl.arange(0, DIM // 16)[:, None], tl.arange(0, 4)[None, :]
    bases = tl.load(tile + 24 * DIM + t * (DIM // 16) + step)
    bases = tl.permute(tl.reshape(bases, [1, DIM // 64, 1, 1, 4, 4]), (0, 1, 2, 3, 5, 4))
    high = _high_of(tile, bases, spare, unit_bytes, DIM, ASSEMBLED)
    values = _values_of(low, high, ASSEMBLED)  # repeat, chunk, warp, column, t, step, half, inner
    return tl.reshape(tl.permute(values, (1, 5, 6, 4, 7, 0, 2, 3)), [DIM, 64])


@triton.jit
def open_values(tile, spare, unit_bytes, DIM: tl.constexpr, ASSEMBLED: tl.constexpr):
    """The values of a tile: bfloat16 [64, DIM]; see open_keys."""
    tile = tile.to(tl.pointer_type(tl.uint32))
    low = tl.reshape(tl.load(tile + tl.arange(0, 16 * DIM)), [2, DIM // 64, 4, 8, 4, 4])
    # A lane's bases lie in one word, or in half of one.
    column = tl.arange(0, 32)
    repeat = tl.reshape(tl.arange(0, DIM // 32), [2, DIM // 64, 1, 1, 1, 1]).to(tl.uint32)
    if DIM == 128:
        of_lane = tl.load(tile + 24 * DIM + column)
    else:
        of_lane = tl.load((tile + 24 * DIM).to(tl.pointer_type(tl.uint16)) + column).to(tl.uint32)
    of_lane = tl.reshape(of_lane, [1, 1, 4, 8, 1, 1])
    bases = ((of_lane >> 8 * repeat) & 0xFF) * 0x01010101
    high = _high_of(tile, bases, spare, unit_bytes, DIM, ASSEMBLED)
    values = _values_of(low, high, ASSEMBLED)  # repeat [2, DIM / 64], warp, column, t, step, half, inner
    return tl.reshape(tl.permute(values, (5, 6, 4, 7, 0, 1, 2, 3)), [64, DIM])


@triton.jit
def open_pages(
    closed,
    spare,
    pool,
    sources,
    targets,
    layer_bytes,
    pool_layer,
    unit_bytes,
    KV_HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIM: tl.constexpr,
    BEGIN: tl.constexpr,
    BOTH_TILES: tl.constexpr,
    KEYS: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):
    """Grid: (pages, KV_HEADS * BLOCKS, layers). Plain pages of `pool`: [BLOCKS * 64, KV_HEADS, DIM].

    layer_bytes: of closed pages of a layer; pool_layer: elements of a layer in `pool`; BEGIN: where a tile begins in a
    pair.
    """
    number, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, block = number // BLOCKS, number % BLOCKS
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    tile = closed + layer * layer_bytes + (source * KV_HEADS * BLOCKS + number) * BOTH_TILES + BEGIN
    tile = tl.multiple_of(tile, 64)
    if KEYS:
        values = tl.trans(open_keys(tile, spare, unit_bytes, DIM, ASSEMBLED))
    else:
        values = open_values(tile, spare, unit_bytes, DIM, ASSEMBLED)
    token, channel = tl.arange(0, 64)[:, None], tl.arange(0, DIM)[None, :]
    row = ((target * BLOCKS + block) * 64 + token) * KV_HEADS + head
    tl.store(pool + layer * pool_layer + row * DIM + channel, values)
