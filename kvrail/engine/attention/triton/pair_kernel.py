"""Pages of eight bits as operands of products: two channels are read as one number, so that no value changes threads.

What a thread has of a tile of pairs is two of them in a register. That becomes a register of both even channels and one
of both odd ones, as tensor cores take them. So queries and weighted values are (even channels, odd channels), and even
channels are multiplied first.
"""

import triton
import triton.language as tl

from kvrail.engine.attention.triton.axes_kernel import along, product, sized

_FIRST = tl.constexpr(2.0**56)
"""What queries are made larger by before products, and weighted values after them; the rest: see rest_of."""


@triton.constexpr_function
def rest_of(dtype: tl.dtype) -> float:
    """What `widened` values of `dtype` are too small by, over _FIRST. In two steps every sum suits float32."""
    return 2.0 ** (64 if dtype == tl.float8e4nv else 56)


@triton.constexpr_function
def _widening(odd: bool, e4: bool) -> str:
    """PTX: a byte goes to its place with its sign before it, and what is not its own is cut off."""
    bytes_ = "0xB391" if odd else "0xA280"
    shift, mask = (4, 0x87F087F0) if e4 else (5, 0x8FE08FE0)
    return f"prmt.b32 $0, $1, 0, {bytes_}; shl.b32 $0, $0, {shift}; and.b32 $0, $0, {mask};"


@triton.jit
def widened(pairs, dtype: tl.constexpr, ODD: tl.constexpr):
    """The even or the ODD ones of pairs of `dtype` in bfloat16, whose exponents keep the bias of `dtype`.

    Three instructions for two values; one that converts takes longer than its byte takes from memory. What no page
    holds, infinities and NaN, becomes finite.
    """
    code: tl.constexpr = _widening(ODD, dtype == tl.float8e4nv)
    return tl.inline_asm_elementwise(code, "=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _load(pool, base, rows, pair, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Pairs of rows behind row `base`, also of those behind the last token; rows, pair: as they broadcast."""
    where = (pool + base * DIM).to(tl.pointer_type(tl.uint16)) + rows * (DIM // 2) + pair
    return tl.load(where, mask=pair < DIM // 2, other=0) if DIM < DIM_PADDED else tl.load(where)


@triton.jit
def halves_of(q, KEYS: tl.constexpr):
    """Queries for pair_scores."""
    if KEYS:
        pairs = tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2])
    else:
        pairs = tl.permute(tl.reshape(q, [q.shape[0] // 2, 2, q.shape[1]]), (0, 2, 1))
    even, odd = tl.split(pairs)
    return even * _FIRST, odd * _FIRST


@triton.jit
def pair_scores(q, keys, base, rows, DIM: tl.constexpr, KEYS: tl.constexpr):
    """Products of queries and keys / rest_of their type."""
    HALF: tl.constexpr = q[0].shape[KEYS]
    KIND: tl.constexpr = keys.dtype.element_ty
    k = _load(keys, base, along(rows, KEYS), along(tl.arange(0, HALF), 1 - KEYS), DIM, 2 * HALF)
    return product(q[1], widened(k, KIND, True), product(q[0], widened(k, KIND, False), None, KEYS), KEYS)


@triton.jit
def add_pairs(weights, values, base, rows, acc, shrink, DIM: tl.constexpr, KEYS: tl.constexpr):
    """Weighted values / _FIRST: `acc`, which shrinks, and those of a block. weights: times rest_of the values' type."""
    HALF: tl.constexpr = acc[0].shape[KEYS]
    KIND: tl.constexpr = values.dtype.element_ty
    v = _load(values, base, along(rows, 1 - KEYS), along(tl.arange(0, HALF), KEYS), DIM, 2 * HALF)
    shrink = along(shrink, 1 - KEYS)
    even = product(weights, widened(v, KIND, False), acc[0] * shrink, KEYS)
    return even, product(weights, widened(v, KIND, True), acc[1] * shrink, KEYS)


@triton.jit
def whole(part, KEYS: tl.constexpr):
    """A part with weighted values of all channels in one tensor, whether they are pairs or not."""
    acc, top, total = part
    if isinstance(acc, tl.tuple):
        HALF: tl.constexpr = acc[0].shape[KEYS]
        QUERIES: tl.constexpr = acc[0].shape[1 - KEYS]
        both = tl.join(acc[0], acc[1]) if KEYS else tl.permute(tl.join(acc[0], acc[1]), (0, 2, 1))
        acc = tl.reshape(both, sized(QUERIES, 2 * HALF, KEYS)) * _FIRST
    return acc, top, total
