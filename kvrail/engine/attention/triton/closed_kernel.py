"""Attention over a block of a closed page: the values of a plain page, in the same order of sums."""

import triton
import triton.language as tl

from kvrail.engine.attention.triton.order_kernel import apart, seen_scores, weights_of
from kvrail.engine.kv.lossless.form import TOKENS
from kvrail.engine.kv.lossless.open_kernel import open_keys, open_values

CLOSED_BLOCK = tl.constexpr(TOKENS)


@triton.jit
def add_closed_block(
    q,
    tile,
    spare,
    unit_bytes,
    acc,
    top,
    total,
    block,
    position,
    end,
    scale,
    softcap,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):
    """Add a block of a closed page to its part: what scores_of and add_block do of a plain page's.

    q: [rows, KEY_DIM]; tile: uint8, where the block's keys begin, KEY_BYTES before its values.
    """
    k = open_keys(tile, spare, unit_bytes, KEY_DIM, ASSEMBLED)
    scores = tl.dot(q, apart(k.to(q.dtype), ASSEMBLED), input_precision="ieee")
    token = block + tl.arange(0, CLOSED_BLOCK)
    scores = seen_scores(scores, token, position, end, scale, softcap, WINDOW, SOFTCAP, MASKED)
    weights, shrink, top, total = weights_of(scores, top, total, softcap if SOFTCAP else scale, q.dtype, CLOSED_BLOCK)
    v = open_values(tile + KEY_BYTES, spare, unit_bytes, VALUE_DIM, ASSEMBLED)
    acc = tl.dot(weights.to(q.dtype), apart(v.to(q.dtype), ASSEMBLED), acc * shrink[:, None], input_precision="ieee")
    return acc, top, total
