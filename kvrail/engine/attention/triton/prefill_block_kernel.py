"""The prefill kernel's loops over blocks of keys, of open and of closed pages: each block joins its part."""

import triton
import triton.language as tl

from kvrail.engine.attention.triton.closed_kernel import (
    add_closed_block,
    closed_codes_of,
    closed_scores_of,
    pair_of,
    stages_of,
)
from kvrail.engine.attention.triton.order_kernel import (
    add_block,
    begins_part,
    emptied,
    fold,
    leave,
    part_of,
    scores_of,
    slots_of,
)
from kvrail.engine.attention.triton.pair_kernel import whole


@triton.jit
def _begin_part(
    parts,
    block,
    begin,
    live,
    before,
    part,
    channels,
    VALUE_DIM: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Where `block` begins a part, fold the part before it into those before, or leave it for `join` if SHARED.

    It stands after the scores' product, whose wait covers the part's last product, still under way.
    """
    if begins_part(block):
        if SHARED:
            if block > begin:
                leave(parts, part_of(block - 1), whole(part, 1), live, channels, VALUE_DIM, 1)
        else:
            before = fold(before, whole(part, 1), 1)
        part = emptied(part)
    return before, part


@triton.jit
def open_blocks(
    q,
    pools,
    table,
    kv_head,
    first,
    stop,
    position,
    end,
    scale,
    softcap,
    begin,
    parts,
    live,
    before,
    part,
    channels,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    SEVERED: tl.constexpr,
    SHARED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the blocks from `first` to `stop` to (`before`, `part`).

    pools: see LayerPages.arguments; parts: see `leave`; SHARED: all parts are left for `join`; begin: the program's
    first block.
    """
    keys, values, key_scales, value_scales = pools
    for block in range(first, stop, BLOCK):
        base, rows = slots_of(table, block, kv_head, end, KV_HEADS, PAGE_SIZE, BLOCK)
        scores = scores_of(
            q, keys, key_scales, base, rows, block, position, end, scale, softcap,
            KEY_DIM, KEY_DIM_PADDED, BLOCK, WINDOW, SOFTCAP, SCALED, SEVERED, MASKED, 1,
        )  # fmt: skip
        before, part = _begin_part(parts, block, begin, live, before, part, channels, VALUE_DIM, SHARED)
        part = add_block(
            scores, values, value_scales, base, rows, part, block, end, scale, softcap, channels,
            (q[0] if isinstance(q, tl.tuple) else q).dtype,
            VALUE_DIM, BLOCK, SOFTCAP, SCALED, SEVERED, MASKED, 1,
        )  # fmt: skip
    return before, part


@triton.jit
def closed_blocks(
    q,
    closed,
    table,
    kv_head,
    first,
    stop,
    position,
    end,
    scale,
    softcap,
    begin,
    parts,
    live,
    before,
    part,
    channels,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BOTH_TILES: tl.constexpr,
    CODE_BITS: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):
    """What open_blocks does, of blocks of closed pages. closed: see LayerPages.closed_arguments."""
    closed_pages, spare, unit_bytes = closed
    for block in tl.range(first, stop, BLOCK, num_stages=stages_of(CODE_BITS)):
        pair = pair_of(closed_pages, table, block, kv_head, KV_HEADS, PAGE_SIZE, BLOCK, BOTH_TILES)
        keys, values = closed_codes_of(pair, spare, KEY_DIM, VALUE_DIM, BLOCK, KEY_TILE, CODE_BITS, ASSEMBLED)
        scores = closed_scores_of(
            q, pair, keys, spare, unit_bytes, block, position, end, scale, softcap,
            KEY_DIM, BLOCK, WINDOW, SOFTCAP, WINDOW > 0, CODE_BITS, ASSEMBLED, 1,
        )  # fmt: skip
        before, part = _begin_part(parts, block, begin, live, before, part, channels, VALUE_DIM, SHARED)
        part = add_closed_block(
            scores, pair, values, spare, unit_bytes, part, scale, softcap, q.dtype,
            VALUE_DIM, BLOCK, KEY_TILE, CODE_BITS, SOFTCAP, ASSEMBLED, 1,
        )  # fmt: skip
    return before, part
