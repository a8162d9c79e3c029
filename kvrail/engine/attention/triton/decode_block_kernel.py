"""The decode kernel's loop over blocks of open pages; `closed_kernel` has that over closed ones."""

import triton
import triton.language as tl

from kvrail.engine.attention.triton.order_kernel import add_block, end_block, scores_of, slots_of


@triton.jit
def add_open_blocks(
    q,
    pools,
    table,
    kv_head,
    begin,
    stop,
    end,
    position,
    kv_len,
    scale,
    softcap,
    parts,
    folds,
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
    STAGES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Add the blocks from `begin` to `stop` of a share that ends at `end` to (`before`, `part`).

    pools: see LayerPages.arguments; parts: see `leave`; STAGES: of this loop; None: the kernel's.
    """
    keys, values, key_scales, value_scales = pools
    for block in tl.range(begin, stop, BLOCK, num_stages=STAGES):
        base, rows = slots_of(table, block, kv_head, kv_len, KV_HEADS, PAGE_SIZE, BLOCK)
        scores = scores_of(
            q, keys, key_scales, base, rows, block, position, kv_len, scale, softcap,
            KEY_DIM, KEY_DIM_PADDED, BLOCK, WINDOW, SOFTCAP, SCALED, SEVERED, True, KEYS,
        )  # fmt: skip
        part = add_block(
            scores, values, value_scales, base, rows, part, block, kv_len, scale, softcap, channels,
            (q[0] if isinstance(q, tl.tuple) else q).dtype,
            VALUE_DIM, BLOCK, SOFTCAP, SCALED, SEVERED, True, KEYS,
        )  # fmt: skip
        before, part = end_block(parts, block, end, folds, live, before, part, channels, VALUE_DIM, BLOCK, KEYS)
    return before, part
