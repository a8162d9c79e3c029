"""Triton kernel: causal attention of packed sequences whose queries are their last tokens.

Flash attention (Dao, "FlashAttention-2", 2023) over keys and values that lie one sequence after the other. On an H200
it takes 0.65 to 0.8 of the time of torch's variable-length flash kernel (heads of 128, bfloat16, 300 to 8,192 tokens).
cuDNN's is faster still on long prompts (0.7 of ours), but builds a plan for each length, 30 ms a thread and length.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvrail.engine.attention.decode_kernel import tanh
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.attention.page_kernels import unit_stride

_LOG2E = tl.constexpr(1.4426950408889634)


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


@triton.jit
def _step(
    q,
    key,
    value,
    acc,
    top,
    total,
    block,
    position,
    kv_len,
    key_stride_token,
    value_stride_token,
    scale,
    softcap,
    KEY_DIM: tl.constexpr,
    KEY_DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One block of tokens. MASKED: some query does not see some token of it; else all see all."""
    token = block + tl.arange(0, BLOCK)
    key_dim = tl.arange(0, KEY_DIM_PADDED)
    value_dim = tl.arange(0, VALUE_DIM_PADDED)
    key_mask = (key_dim < KEY_DIM)[:, None]
    value_mask = (value_dim < VALUE_DIM)[None, :]
    if MASKED:
        key_mask &= (token < kv_len)[None, :]
        value_mask &= (token < kv_len)[:, None]
    far = token.to(tl.int64)
    if MASKED or KEY_DIM < KEY_DIM_PADDED:
        k = tl.load(key + far[None, :] * key_stride_token + key_dim[:, None], mask=key_mask, other=0.0)
    else:
        k = tl.load(key + far[None, :] * key_stride_token + key_dim[:, None])
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    scores *= _LOG2E
    if MASKED:
        seen = (token[None, :] <= position[:, None]) & (token < kv_len)[None, :]
        if WINDOW > 0:
            seen &= token[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weights, axis=1)
    if MASKED or VALUE_DIM < VALUE_DIM_PADDED:
        v = tl.load(value + far[:, None] * value_stride_token + value_dim[None, :], mask=value_mask, other=0.0)
    else:
        v = tl.load(value + far[:, None] * value_stride_token + value_dim[None, :])
    acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, higher, total


@triton.jit(do_not_specialize_on_alignment=["cu_queries", "cu_tokens"])
def _prefill_kernel(
    query,
    key,
    value,
    cu_queries,
    cu_tokens,
    sinks,
    out,
    query_stride_token,
    query_stride_head,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    scale,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Grid: (blocks of queries, HEADS, sequences); the last queries, which see the most, come first."""
    head, row = tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_queries + row)
    count = tl.load(cu_queries + row + 1) - start
    low = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    if low >= count:
        return
    first_token = tl.load(cu_tokens + row)
    kv_len = tl.load(cu_tokens + row + 1) - first_token
    key += first_token.to(tl.int64) * key_stride_token + head // GROUP * key_stride_head
    value += first_token.to(tl.int64) * value_stride_token + head // GROUP * value_stride_head
    local = low + tl.arange(0, QUERIES)
    position = kv_len - count + local
    packed = (start + local).to(tl.int64)
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
    lowest = kv_len - count + low
    end = tl.minimum(lowest + QUERIES, kv_len)
    if WINDOW > 0:  # a window begins somewhere in the middle of blocks: all of them are masked
        masked_from = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK * BLOCK
    else:
        masked_from = (lowest + 1) // BLOCK * BLOCK
        for block in range(0, masked_from, BLOCK):
            acc, top, total = _step(
                q, key, value, acc, top, total, block, position, kv_len, key_stride_token, value_stride_token, scale,
                softcap, KEY_DIM, KEY_DIM_PADDED, VALUE_DIM, VALUE_DIM_PADDED, BLOCK, WINDOW, SOFTCAP, False,
            )  # fmt: skip
    for block in range(masked_from, end, BLOCK):
        acc, top, total = _step(
            q, key, value, acc, top, total, block, position, kv_len, key_stride_token, value_stride_token, scale,
            softcap, KEY_DIM, KEY_DIM_PADDED, VALUE_DIM, VALUE_DIM_PADDED, BLOCK, WINDOW, SOFTCAP, True,
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
    key: torch.Tensor,
    value: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_tokens: torch.Tensor,
    max_queries: int,
    out: torch.Tensor,
    options: ScoreOptions,
    tuning: PrefillTuning | None = None,
) -> None:
    """Attend each sequence's last tokens to all of its tokens.

    query: [queries, heads, key_dim]; key, value: [tokens, kv_heads, dim]; sequences one after the other, beginning at
    cu_queries and cu_tokens, int32 [sequences + 1]; max_queries: the most queries of one; out: [queries, heads,
    value_dim], contiguous. tuning: launch parameters, by default those of `tuning_for`.
    """
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    heads, key_dim = query.shape[1:]
    kv_heads, value_dim = value.shape[1:]
    key_padded, value_padded = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    tuning = tuning or tuning_for(max(key_padded, value_padded), query.element_size())
    _prefill_kernel[(triton.cdiv(max_queries, tuning.queries), heads, len(cu_queries) - 1)](
        query,
        key,
        value,
        cu_queries,
        cu_tokens,
        options.sinks,
        out,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        options.scale,
        options.softcap,
        HEADS=heads,
        GROUP=heads // kv_heads,
        KEY_DIM=key_dim,
        KEY_DIM_PADDED=key_padded,
        VALUE_DIM=value_dim,
        VALUE_DIM_PADDED=value_padded,
        QUERIES=tuning.queries,
        BLOCK=tuning.block,
        WINDOW=options.window,
        SOFTCAP=options.softcap != 0,
        SINKS=options.sinks is not None,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
