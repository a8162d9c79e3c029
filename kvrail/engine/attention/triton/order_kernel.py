"""The steps of attention that all kernels compute with the same bits: see `attention.order`."""

import triton
import triton.language as tl

from kvrail.engine.attention.triton.axes_kernel import along, gathered, product, sized, sums_of
from kvrail.engine.attention.triton.order import FIRST, PARTS
from kvrail.engine.attention.triton.pair_kernel import add_pairs, halves_of, pair_scores, rest_of, whole

_LOG2E = tl.constexpr(1.4426950408889634)
_FIRST_OCTAVE = tl.constexpr(FIRST + PARTS)
_PER_OCTAVE = tl.constexpr(PARTS)
LOWEST = tl.constexpr(-1.0e30)
"""Stands for minus infinity, so that no difference is undefined."""


@triton.jit
def _octave(token):
    """Binary logarithm of `token`, from the exponent of a float; at least that of the first octave."""
    exponent = (tl.cast(token, tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.maximum(exponent, _FIRST_OCTAVE)


@triton.jit
def part_of(token):
    """Number of the part in which `token` lies."""
    octave = _octave(token)
    return (token >> (octave - _PER_OCTAVE)) + ((octave - _FIRST_OCTAVE) << _PER_OCTAVE)


@triton.jit
def part_begin(token):
    """The first token of a part at or behind `token`."""
    length = 1 << (_octave(token) - _PER_OCTAVE)
    return (token + length - 1) & -length


@triton.jit
def begins_part(block):
    """Whether a part begins with token `block`."""
    return (block & ((1 << (_octave(block) - _PER_OCTAVE)) - 1)) == 0


@triton.jit
def tanh(x):
    """The hyperbolic tangent, which tl lacks. It saturates without overflow: exp(inf) only meets a division."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def apart(x, SEVERED: tl.constexpr):
    """`x`; if SEVERED, through an operation that is opaque to the compiler.

    Where both operands come from registers and were loaded as narrower elements, the compiler hands a sum's terms to
    the tensor core's instructions in another order. Triton's interpreter has no assembler and needs none.
    """
    if SEVERED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def nothing(QUERIES: tl.constexpr, VALUE_DIM_PADDED: tl.constexpr, KEYS: tl.constexpr):
    """An empty part: (weighted values, highest score, sums of weights) of each query, each sum `sums_of` times."""
    acc = tl.zeros(sized(QUERIES, VALUE_DIM_PADDED, KEYS), tl.float32)
    top = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros(sized(QUERIES, sums_of(KEYS), KEYS), tl.float32)
    return acc, top, total


@triton.jit
def begun(
    q,
    keys,
    scale,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PAIRED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """What loops over blocks begin with: (queries, scale, an empty part); PAIRED: see `pair_kernel`, for bfloat16."""
    if PAIRED and q.dtype == tl.bfloat16 and q.shape[KEYS] > 16 and (KEY_DIM | VALUE_DIM) % 2 == 0:
        acc, top, total = nothing(q.shape[1 - KEYS], VALUE_PADDED // 2, KEYS)
        return halves_of(q, KEYS), scale * rest_of(keys.dtype.element_ty), ((acc, acc), top, total)
    else:
        return q, scale, nothing(q.shape[1 - KEYS], VALUE_PADDED, KEYS)


@triton.jit
def emptied(part):
    """An empty part in the place of `part`."""
    acc, top, total = part
    acc = (tl.zeros_like(acc[0]), tl.zeros_like(acc[1])) if isinstance(acc, tl.tuple) else tl.zeros_like(acc)
    return acc, tl.full(top.shape, LOWEST, tl.float32), tl.zeros_like(total)


@triton.jit
def slots_of(table, block, kv_head, end, KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of one head in the pages that hold a block's tokens: (where they begin, distances from there [BLOCK])."""
    offset = tl.arange(0, BLOCK)
    if PAGE_SIZE % BLOCK == 0:  # the whole block lies in one page: one look-up, and short offsets within it
        page = tl.load(table + block // PAGE_SIZE).to(tl.int64)
        base = (page * PAGE_SIZE + block % PAGE_SIZE) * KV_HEADS + kv_head
        rows = offset * KV_HEADS
    else:
        token = block + offset
        page = tl.load(table + token // PAGE_SIZE, mask=token < end, other=0).to(tl.int64)
        base = kv_head
        rows = (page * PAGE_SIZE + token % PAGE_SIZE) * KV_HEADS
    return base, rows


@triton.jit
def scores_of(
    q,
    keys,
    key_scales,
    base,
    rows,
    block,
    position,
    end,
    scale,
    softcap,
    KEY_DIM: tl.constexpr,
    KEY_DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    SEVERED: tl.constexpr,
    MASKED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Products of one block's keys, not scaled yet; minus infinity where a query does not see a token.

    q: of queries and KEY_DIM_PADDED; base, rows: see slots_of; position: the queries' own tokens, [queries], or [1]
    where all have one token; end: number of tokens. MASKED: some query does not see some token of the block.
    """
    token = block + tl.arange(0, BLOCK)
    if isinstance(q, tl.tuple):
        scores = pair_scores(q, keys, base, rows, KEY_DIM, KEYS)
    else:
        key_dim = tl.arange(0, KEY_DIM_PADDED)
        key = keys + base * KEY_DIM + along(rows, KEYS) * KEY_DIM + along(key_dim, 1 - KEYS)
        # A page's rows behind `end` are read, too; their scores are masked.
        mask = along(key_dim < KEY_DIM, 1 - KEYS)
        k = tl.load(key, mask=mask, other=0.0) if KEY_DIM < KEY_DIM_PADDED else tl.load(key)
        scores = product(q, apart(k.to(q.dtype), SEVERED), None, KEYS)
    if SCALED:
        scores *= along(tl.load(key_scales + base + rows), KEYS)
    return seen_scores(scores, token, position, end, scale, softcap, WINDOW, SOFTCAP, MASKED, KEYS)


@triton.jit
def seen_scores(
    scores,
    token,
    position,
    end,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Products of queries and keys with softcap, and minus infinity where a query does not see a token."""
    if SOFTCAP:
        scores = tanh(scores * scale / softcap)
    if MASKED:
        last = along(position, 1 - KEYS)
        seen = (along(token, KEYS) <= last) & along(token < end, KEYS)
        if WINDOW > 0:
            seen &= along(token, KEYS) > last - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def add_block(
    scores,
    values,
    value_scales,
    base,
    rows,
    part,
    block,
    end,
    scale,
    softcap,
    channels,
    dtype: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    SEVERED: tl.constexpr,
    MASKED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A part with one block's values, weighted by its scores.

    channels: of weighted values; dtype: the type of both factors, see scores_of.
    """
    acc, top, total = part
    token = block + tl.arange(0, BLOCK)
    mask = along(channels < VALUE_DIM, KEYS)
    if MASKED:
        mask &= along(token < end, 1 - KEYS)
    by = None
    if SCALED:
        by = tl.load(value_scales + base + rows)
        if MASKED:
            by = tl.where(token < end, by, 0.0)
        if isinstance(acc, tl.tuple):
            by *= rest_of(values.dtype.element_ty)
    factor = softcap if SOFTCAP else scale
    weights, shrink, higher, total = weights_of(scores, top, total, factor, dtype, BLOCK, KEYS, by=by)
    if isinstance(acc, tl.tuple):
        acc = add_pairs(weights, values, base, rows, acc, shrink, VALUE_DIM, KEYS)
    else:
        value = values + base * VALUE_DIM + along(rows, 1 - KEYS) * VALUE_DIM + along(channels, KEYS)
        v = tl.load(value, mask=mask, other=0.0) if MASKED or channels.shape[0] > VALUE_DIM else tl.load(value)
        acc = product(weights.to(dtype), apart(v.to(dtype), SEVERED), acc * along(shrink, 1 - KEYS), KEYS)
    return acc, higher, total


@triton.jit
def weights_of(
    scores,
    top,
    total,
    scale,
    dtype: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    CLOSED: tl.constexpr = False,
    TIMES: tl.constexpr = 1.0,
    by=None,
):
    """A block's weights: (TIMES weights, what the sums before shrink by, the highest score, sums of weights).

    CLOSED: scores are of `dealt` keys; TIMES: a power of two; by: [BLOCK], what weights are multiplied by where values
    have scales.
    """
    factor = scale * _LOG2E
    higher = tl.maximum(top, tl.max(scores, axis=KEYS) * factor)
    weights = tl.exp2(
        tl.fma(scores, tl.broadcast_to(factor, scores.shape), tl.broadcast_to(along(-higher, 1 - KEYS), scores.shape))
    )
    if TIMES != 1.0:
        weights *= TIMES
    shrink = tl.exp2(top - higher)
    if CLOSED:
        weights = gathered(weights, KEYS)
    scaled = weights
    if by is not None:  # before the product below, so that threads exchange both kinds of weights at once
        scaled = (weights * along(by, KEYS)).to(dtype)
    # In one step, Triton would round the constant to six decimals.
    ones = tl.full(sized(BLOCK, sums_of(KEYS), KEYS), 1.0 / TIMES, tl.float32).to(dtype)
    total = product(weights.to(dtype), ones, total * along(shrink, 1 - KEYS), KEYS)
    return scaled, shrink, higher, total


@triton.jit
def none_before(QUERIES: tl.constexpr, VALUE_DIM_PADDED: tl.constexpr, SUMS: tl.constexpr, KEYS: tl.constexpr):
    """What `fold` adds the first part to. SUMS: how often each sum is there."""
    acc = tl.zeros(sized(QUERIES, VALUE_DIM_PADDED, KEYS), tl.float32)
    return acc, tl.full([QUERIES], LOWEST, tl.float32), tl.zeros(sized(QUERIES, SUMS, KEYS), tl.float32)


@triton.jit
def fold(before, part, KEYS: tl.constexpr):
    """Add one more part to those before it."""
    acc, top, total = before
    part_acc, part_top, part_total = part
    higher = tl.maximum(top, part_top)
    old, new = tl.exp2(top - higher), tl.exp2(part_top - higher)
    old, new = along(old, 1 - KEYS), along(new, 1 - KEYS)
    return acc * old + part_acc * new, higher, total * old + part_total * new


@triton.jit
def output_of(folded, sinks, head, live, SINKS: tl.constexpr, KEYS: tl.constexpr):
    """Outputs of all parts folded; head: each query's; 0 where a query sees nothing, never -0."""
    acc, top, total = folded
    total = tl.max(total, axis=KEYS)  # they are all the same
    if SINKS:
        total += tl.exp2(tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * _LOG2E - top)
    return acc / along(tl.where(total > 0, total, 1.0), 1 - KEYS) + 0.0


@triton.jit
def share_of(first, end, number, programs, shortest):
    """The share (begin, end) of program `number` of `programs` in the tokens from `first` on; it may be empty.

    A share is whole parts, and at least `shortest` tokens; `first` is a multiple of a block.
    """
    span = tl.maximum(tl.cdiv(end - first, programs), shortest)
    begin = first if number == 0 else part_begin(first + number * span)
    return begin, tl.minimum(part_begin(first + (number + 1) * span), end)


@triton.jit
def leave(parts, number, part, live, channels, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr):
    """Store a part for `join`.

    parts: where (weighted values, highest scores, sums) and, of each query, part 0 lie; number: the part's.
    """
    part_out, part_top, part_total, place = parts
    acc, top, total = part
    at = place + number
    where = along(at, 1 - KEYS) * VALUE_DIM + along(channels, KEYS)
    tl.store(part_out + where, acc, along(live, 1 - KEYS) & along(channels < VALUE_DIM, KEYS))
    tl.store(part_top + at, top, live)
    tl.store(part_total + at, tl.max(total, axis=KEYS), live)


@triton.jit
def end_block(
    parts,
    block,
    end,
    folds,
    live,
    before,
    part,
    channels,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):
    """(`before`, `part`) behind `block`.

    Where a part ends there, but not the program's share, fold it into those before if `folds`, or leave it for `join`.
    """
    if begins_part(block + BLOCK) & (block + BLOCK < end):
        if folds:
            before = fold(before, whole(part, KEYS), KEYS)
        else:
            leave(parts, part_of(block), whole(part, KEYS), live, channels, VALUE_DIM, KEYS)
        part = emptied(part)
    return before, part


@triton.jit
def join(
    out,
    parts,
    sinks,
    row,
    kv_head,
    begin,
    count,
    stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    SINKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Fold the first `count` parts of one KV head's query heads, in order, from part `begin` on.

    That one is the sum of those before it too.
    """
    part_out, part_top, part_total = parts
    group = tl.arange(0, GROUP_PADDED)
    value_dim = tl.arange(0, VALUE_DIM_PADDED)
    head = kv_head * GROUP + group
    place = (row * KV_HEADS * GROUP + head) * stride
    live = (group < GROUP)[:, None] & (value_dim < VALUE_DIM)[None, :]
    before = none_before(GROUP_PADDED, VALUE_DIM_PADDED, 1, 1)
    for first in range(begin, count, AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):  # unrolled, so that the loads of several parts are under way together
            part = first + ahead + group * 0
            there = (group < GROUP) & (part < count)
            new_top = tl.load(part_top + place + part, mask=there, other=LOWEST)
            new_total = tl.load(part_total + place + part, mask=there, other=0.0)
            where = (place + part)[:, None] * VALUE_DIM + value_dim[None, :]
            new = tl.load(part_out + where, mask=live & there[:, None], other=0.0)
            before = fold(before, (new, new_top, along(new_total, 0)), 1)
    result = output_of(before, sinks, head, group < GROUP, SINKS, 1)
    where = (row * KV_HEADS * GROUP + head)[:, None] * VALUE_DIM + value_dim[None, :]
    tl.store(out + where, result.to(out.dtype.element_ty), live)
