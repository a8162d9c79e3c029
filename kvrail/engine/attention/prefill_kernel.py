"""Triton kernel: causal attention of packed sequences whose queries are their last tokens, over their pages.

Flash attention (Dao, "FlashAttention-2", 2023), in the order of `attention.order`. Which queries a program computes is
read from a list of blocks that the host makes, so that a launch's shape depends on tensor shapes alone and a captured
one serves any lengths. Keys and values are read where they lie, in pages: nothing is gathered before.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvrail.engine.attention.meta import BLOCK_FIELDS
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.attention.order import HeadShape, block_of, padded
from kvrail.engine.attention.order_kernel import (
    LOWEST,
    add_block,
    begins_part,
    fold,
    nothing,
    output_of,
    scores_of,
    slots_of,
    sums_of,
)
from kvrail.engine.attention.page_kernels import unit_stride
from kvrail.engine.cache import LayerPages

_FIELDS = tl.constexpr(BLOCK_FIELDS)


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Launch parameters: queries a program, warps and pipeline stages."""

    queries: int
    warps: int
    stages: int


def tuning_for(shape: HeadShape) -> PrefillTuning:
    """Parameters for heads of `shape`."""
    if shape.compute_bytes > 2:
        return PrefillTuning(queries=16, warps=4, stages=2)
    return PrefillTuning(queries=64, warps=4, stages=2)


@triton.jit
def _one_block(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    kv_head,
    block,
    position,
    end,
    scale,
    softcap,
    all_acc,
    all_top,
    all_total,
    acc,
    top,
    total,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add one block to its part, `acc`, `top` and `total`; where it begins one, that before is folded into `all_`."""
    base, rows = slots_of(table, block, kv_head, end, KV_HEADS, PAGE_SIZE, BLOCK)
    scores = scores_of(
        q, keys, key_scales, base, rows, block, position, end, scale, softcap,
        KEY_DIM, KEY_DIM_PADDED, BLOCK, WINDOW, SOFTCAP, SCALED, False, MASKED,
    )  # fmt: skip
    if begins_part(block):  # behind the product, which the one before it, still under way, is waited for with
        all_acc, all_top, all_total = fold(all_acc, all_top, all_total, acc, top, sums_of(total))
        acc, top, total = nothing(QUERIES, VALUE_DIM_PADDED)
    acc, top, total = add_block(
        scores, values, value_scales, base, rows, acc, top, total, block, end, scale, softcap, q.dtype,
        VALUE_DIM, VALUE_DIM_PADDED, BLOCK, SOFTCAP, SCALED, False, MASKED,
    )  # fmt: skip
    return all_acc, all_top, all_total, acc, top, total


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["page_tables", "blocks"])
def _prefill_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    page_tables,
    blocks,
    sinks,
    out,
    query_stride_token,
    query_stride_head,
    table_stride,
    scale,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Grid: (blocks, HEADS). A block's fields: see StepMeta.blocks."""
    fields = blocks + tl.program_id(0) * _FIELDS
    head = tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    first, count = tl.load(fields).to(tl.int64), tl.load(fields + 1)
    lowest, sequence = tl.load(fields + 2), tl.load(fields + 3)
    if count == 0:
        return
    end = tl.where(sequence >= 0, lowest + count, 0)  # the queries' own tokens are the last that any of them sees
    table = page_tables + tl.maximum(sequence, 0).to(tl.int64) * table_stride
    local = tl.arange(0, QUERIES)
    position = lowest + local
    packed = first + local
    key_dim = tl.arange(0, KEY_DIM_PADDED)
    value_dim = tl.arange(0, VALUE_DIM_PADDED)
    q = tl.load(
        query + packed[:, None] * query_stride_token + head * query_stride_head + key_dim[None, :],
        mask=(local < count)[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    )
    all_acc = tl.zeros([QUERIES, VALUE_DIM_PADDED], tl.float32)
    all_top = tl.full([QUERIES], LOWEST, tl.float32)
    all_total = tl.zeros([QUERIES], tl.float32)
    acc, top, total = nothing(QUERIES, VALUE_DIM_PADDED)
    if WINDOW > 0:  # a window begins somewhere in the middle of blocks: all of them are masked
        masked_from = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK * BLOCK
    else:
        masked_from = tl.minimum(lowest + 1, end) // BLOCK * BLOCK
        for block in range(0, masked_from, BLOCK):
            all_acc, all_top, all_total, acc, top, total = _one_block(
                q, keys, values, key_scales, value_scales, table, kv_head, block, position, end, scale, softcap,
                all_acc, all_top, all_total, acc, top, total,
                KV_HEADS, KEY_DIM, KEY_DIM_PADDED, VALUE_DIM, VALUE_DIM_PADDED, PAGE_SIZE, QUERIES, BLOCK,
                WINDOW, SOFTCAP, SCALED, False,
            )  # fmt: skip
    for block in range(masked_from, end, BLOCK):
        all_acc, all_top, all_total, acc, top, total = _one_block(
            q, keys, values, key_scales, value_scales, table, kv_head, block, position, end, scale, softcap,
            all_acc, all_top, all_total, acc, top, total,
            KV_HEADS, KEY_DIM, KEY_DIM_PADDED, VALUE_DIM, VALUE_DIM_PADDED, PAGE_SIZE, QUERIES, BLOCK,
            WINDOW, SOFTCAP, SCALED, True,
        )  # fmt: skip
    all_acc, all_top, all_total = fold(all_acc, all_top, all_total, acc, top, sums_of(total))
    heads = tl.full([QUERIES], 0, tl.int32) + head
    result = output_of(all_acc, all_top, all_total, sinks, heads, local < count, SINKS)
    tl.store(
        out + (packed[:, None] * HEADS + head) * VALUE_DIM + value_dim[None, :],
        result.to(out.dtype.element_ty),
        mask=(local < count)[:, None] & (value_dim < VALUE_DIM)[None, :],
    )


def prefill_attention(
    query: torch.Tensor,
    layer: LayerPages,
    page_tables: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    options: ScoreOptions,
    tuning: PrefillTuning | None = None,
) -> None:
    """Attend the queries of `blocks` to their sequences' tokens up to themselves; all of these are in the pages.

    query: [tokens, heads, key_dim]; page_tables: int32 [sequences, width]; blocks: int32 [blocks, 4], of at most
    `tuning.queries` queries each, see StepMeta.blocks; out: [tokens, heads, value_dim], contiguous: rows that are in no
    block are left alone. tuning: launch parameters, by default those of `tuning_for`.
    """
    query = unit_stride(query)
    heads, key_dim = query.shape[1:]
    page_size, kv_heads, value_dim = layer.values.shape[1:]
    shape = HeadShape(key_dim, value_dim, query.element_size(), layer.keys.element_size())
    tuning = tuning or tuning_for(shape)
    _prefill_kernel[(len(blocks), heads)](
        query,
        *(layer.keys, layer.values, layer.key_scales, layer.value_scales),
        page_tables,
        blocks,
        options.sinks,
        out,
        *query.stride()[:2],
        page_tables.stride(0),
        options.scale,
        options.softcap,
        HEADS=heads,
        KV_HEADS=kv_heads,
        KEY_DIM=key_dim,
        KEY_DIM_PADDED=padded(key_dim),
        VALUE_DIM=value_dim,
        VALUE_DIM_PADDED=padded(value_dim),
        PAGE_SIZE=page_size,
        QUERIES=tuning.queries,
        BLOCK=block_of(shape),
        WINDOW=options.window,
        SOFTCAP=options.softcap != 0,
        SINKS=options.sinks is not None,
        SCALED=layer.key_scales is not None,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        enable_fp_fusion=False,
    )
