"""Triton kernel: causal attention of packed sequences whose queries are their last tokens, over their pages.

Flash attention (Dao, "FlashAttention-2", 2023). Which queries a program computes is read from a list of blocks that
the host makes, so that a launch's shape depends on tensor shapes alone and a captured one serves any lengths. Keys and
values are read where they lie, in pages: nothing is gathered before.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvrail.engine.attention.decode_kernel import padded, tanh
from kvrail.engine.attention.meta import BLOCK_FIELDS
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.attention.page_kernels import unit_stride
from kvrail.engine.cache import LayerPages

_LOG2E = tl.constexpr(1.4426950408889634)
_FIELDS = tl.constexpr(BLOCK_FIELDS)


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Launch parameters: queries a program, tokens a loop iteration, warps and pipeline stages."""

    queries: int
    block: int
    warps: int
    stages: int


def tuning_for(dim: int, element_bytes: int) -> PrefillTuning:
    """Parameters for heads of `dim` (a power of two) and operands of `element_bytes` an element."""
    if element_bytes > 2:
        return PrefillTuning(queries=16, block=32 if dim <= 256 else 16, warps=4, stages=2)
    if dim <= 128:
        return PrefillTuning(queries=64, block=64, warps=4, stages=3)
    return PrefillTuning(queries=64, block=32, warps=4, stages=2)


def tuning_of(key_dim: int, value_dim: int, element_bytes: int) -> PrefillTuning:
    """The same for heads of any widths."""
    return tuning_for(padded(max(key_dim, value_dim)), element_bytes)


@triton.jit
def _step(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    kv_head,
    acc,
    top,
    total,
    block,
    position,
    end,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One block of tokens. MASKED: some query does not see some token of it; else all see all."""
    offset = tl.arange(0, BLOCK)
    token = block + offset
    key_dim = tl.arange(0, KEY_DIM_PADDED)
    value_dim = tl.arange(0, VALUE_DIM_PADDED)
    key_mask = (key_dim < KEY_DIM)[:, None]
    value_mask = (value_dim < VALUE_DIM)[None, :]
    if MASKED:
        key_mask &= (token < end)[None, :]
        value_mask &= (token < end)[:, None]
    if PAGE_SIZE % BLOCK == 0:  # the whole block lies in one page: one look-up, and short offsets within it
        page = tl.load(table + block // PAGE_SIZE).to(tl.int64)
        base = (page * PAGE_SIZE + block % PAGE_SIZE) * KV_HEADS + kv_head
        rows = offset * KV_HEADS
    else:
        page = tl.load(table + token // PAGE_SIZE, mask=token < end, other=0).to(tl.int64)
        base = kv_head
        rows = (page * PAGE_SIZE + token % PAGE_SIZE) * KV_HEADS
    key = keys + base * KEY_DIM + rows[None, :] * KEY_DIM + key_dim[:, None]
    value = values + base * VALUE_DIM + rows[:, None] * VALUE_DIM + value_dim[None, :]
    if MASKED or KEY_DIM < KEY_DIM_PADDED:  # noqa: SIM108 compiled apart, a branch of constants costs nothing
        k = tl.load(key, mask=key_mask, other=0.0)
    else:
        k = tl.load(key)
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
    if SCALED:
        scores *= tl.load(key_scales + base + rows, mask=token < end, other=0.0)[None, :]
    if SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    scores *= _LOG2E
    if MASKED:
        seen = (token[None, :] <= position[:, None]) & (token < end)[None, :]
        if WINDOW > 0:
            seen &= token[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weights, axis=1)
    if SCALED:
        weights *= tl.load(value_scales + base + rows, mask=token < end, other=0.0)[None, :]
    if MASKED or VALUE_DIM < VALUE_DIM_PADDED:  # noqa: SIM108
        v = tl.load(value, mask=value_mask, other=0.0)
    else:
        v = tl.load(value)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    return acc, higher, total


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
    top = tl.full([QUERIES], -1.0e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, VALUE_DIM_PADDED], tl.float32)
    if WINDOW > 0:  # a window begins somewhere in the middle of blocks: all of them are masked
        masked_from = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK * BLOCK
    else:
        masked_from = tl.minimum(lowest + 1, end) // BLOCK * BLOCK
        for block in range(0, masked_from, BLOCK):
            acc, top, total = _step(
                q, keys, values, key_scales, value_scales, table, kv_head, acc, top, total, block, position, end,
                scale, softcap, KV_HEADS, KEY_DIM, KEY_DIM_PADDED, VALUE_DIM, VALUE_DIM_PADDED, PAGE_SIZE, BLOCK,
                WINDOW, SOFTCAP, SCALED, False,
            )  # fmt: skip
    for block in range(masked_from, end, BLOCK):
        acc, top, total = _step(
            q, keys, values, key_scales, value_scales, table, kv_head, acc, top, total, block, position, end,
            scale, softcap, KV_HEADS, KEY_DIM, KEY_DIM_PADDED, VALUE_DIM, VALUE_DIM_PADDED, PAGE_SIZE, BLOCK,
            WINDOW, SOFTCAP, SCALED, True,
        )  # fmt: skip
    if SINKS:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * _LOG2E - top)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
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
    block are left alone. tuning: launch parameters, by default those of `tuning_of`.
    """
    query = unit_stride(query)
    heads, key_dim = query.shape[1:]
    page_size, kv_heads, value_dim = layer.values.shape[1:]
    tuning = tuning or tuning_of(key_dim, value_dim, query.element_size())
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
        BLOCK=tuning.block,
        WINDOW=options.window,
        SOFTCAP=options.softcap != 0,
        SINKS=options.sinks is not None,
        SCALED=layer.key_scales is not None,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
