"""Triton kernel: one new token a sequence is stored in its page, then attends to its pages.

Split-KV flash decoding (Dao et al., "Flash-Decoding for long-context inference", 2023): several programs share a long
sequence, each keeps a running softmax over its part, and the one that finishes last joins the parts. The query heads
of one KV head are computed together, so that KV is read once. Launch shapes depend on tensor shapes alone, never on
lengths, so a captured launch serves any lengths. All is one launch: at decode's sizes a launch costs as much as a small
kernel.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.attention.page_kernels import store_rows, unit_stride
from kvrail.engine.cache import LayerPages

_LOG2E = tl.constexpr(1.4426950408889634)
_MAX_SPLITS = 64
_JOIN_ELEMENTS = 4096
"""Partial results that the joining program holds at once."""


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Launch parameters: tokens a loop iteration, warps and pipeline stages a program, programs wanted a processor.

    one_page: look a block's page up once, where it lies in one, instead of once a token.
    """

    block: int
    warps: int
    stages: int
    programs: int = 2
    one_page: bool = True


def tuning_for(dim: int, element_bytes: int) -> DecodeTuning:
    """Parameters for heads of `dim` (a power of two) in pages of `element_bytes` an element."""
    if dim <= 128 and element_bytes <= 2:
        return DecodeTuning(block=64, warps=4, stages=3)
    return DecodeTuning(block=32, warps=4, stages=2)


def splits_for(rows: int, kv_heads: int, programs: int, block: int) -> tuple[int, int]:
    """(most parts of a sequence, fewest tokens of a part) for about `programs` programs in all.

    Lengths have no say: each number of parts is a kernel of its own, and all of them are compiled before requests come.
    Where the batch alone fills the chip, only long sequences are split: a second part of a short one is overhead
    (measured on an H200: 125 instead of 136 µs for 64 sequences of 2,048 tokens).
    """
    wanted = min(int(triton.next_power_of_2(-(-programs // (rows * kv_heads)))), _MAX_SPLITS)
    return max(wanted, 4), {1: 4096, 2: 1024}.get(wanted, 2 * block)


@triton.jit
def tanh(x):
    """Tl has none; saturates without overflow, since exp(inf) only meets a division."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _join(
    out,
    part_out,
    part_lse,
    sinks,
    row,
    kv_head,
    used,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Weigh the first `used` parts of one KV head's query heads by their sums."""
    group = tl.arange(0, GROUP_PADDED)
    head = kv_head * GROUP + group
    place = (row * KV_HEADS * GROUP + head) * SPLITS
    split = tl.arange(0, SPLITS)
    mask = (group < GROUP)[:, None] & (split < used)[None, :]
    lse = tl.load(part_lse + place[:, None] + split[None, :], mask=mask, other=-1.0e30)
    top = tl.max(lse, axis=1)
    if SINKS:
        sink = tl.load(sinks + head, mask=group < GROUP, other=0.0).to(tl.float32) * _LOG2E
        top = tl.maximum(top, sink)
    total = tl.sum(tl.where(mask, tl.exp2(lse - top[:, None]), 0.0), axis=1)
    if SINKS:
        total += tl.exp2(sink - top)
    value_dim = tl.arange(0, VALUE_DIM_PADDED)
    acc = tl.zeros([GROUP_PADDED, VALUE_DIM_PADDED], tl.float32)
    live = (group < GROUP)[:, None] & (value_dim < VALUE_DIM)[None, :]
    for begin in range(0, used, AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):  # unrolled, so that the loads of several parts are under way together
            part = begin + ahead + group * 0
            there = (group < GROUP) & (part < used)
            weight = tl.exp2(tl.load(part_lse + place + part, mask=there, other=-1.0e30) - top)
            where = (place + part)[:, None] * VALUE_DIM + value_dim[None, :]
            rows = tl.load(part_out + where, mask=live & there[:, None], other=0.0)
            acc += rows * weight[:, None]
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    where = (row * KV_HEADS * GROUP + head)[:, None] * VALUE_DIM + value_dim[None, :]
    tl.store(out + where, result.to(out.dtype.element_ty), live)


@triton.jit
def _finish(
    out,
    part_out,
    part_lse,
    counters,
    sinks,
    acc,
    top,
    total,
    row,
    kv_head,
    split,
    used,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    GROUP_JOINED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Write the output of a sequence that one program had alone; else leave a part, and join them if it is the last."""
    group = tl.arange(0, GROUP_PADDED)
    head = kv_head * GROUP + group
    value_dim = tl.arange(0, VALUE_DIM_PADDED)
    mask = (group < GROUP)[:, None] & (value_dim < VALUE_DIM)[None, :]
    place = row * KV_HEADS * GROUP + head
    if used <= 1:
        if SINKS:
            total += tl.exp2(tl.load(sinks + head, mask=group < GROUP, other=0.0).to(tl.float32) * _LOG2E - top)
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + place[:, None] * VALUE_DIM + value_dim[None, :], result.to(out.dtype.element_ty), mask)
    else:
        place = place * SPLITS + split
        tl.store(part_out + place[:, None] * VALUE_DIM + value_dim[None, :], acc / total[:, None], mask)
        tl.store(part_lse + place, top + tl.log2(total), group < GROUP)
        tl.debug_barrier()  # all threads' stores come before the count that announces them
        counter = counters + row * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            tl.store(counter, 0)  # for the next layer
            _join(
                out, part_out, part_lse, sinks, row, kv_head, used,
                KV_HEADS, GROUP, GROUP_JOINED, VALUE_DIM, VALUE_DIM_PADDED, SPLITS, SINKS, AT_ONCE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["page_tables", "kv_lens", "counters"])
def _decode_kernel(
    query,
    key,
    value,
    keys,
    values,
    key_scales,
    value_scales,
    page_tables,
    kv_lens,
    counters,
    sinks,
    out,
    part_out,
    part_lse,
    query_stride_row,
    query_stride_head,
    key_stride_row,
    key_stride_head,
    value_stride_row,
    value_stride_head,
    table_stride,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    GROUP_JOINED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Grid: (KV_HEADS, SPLITS, sequences). Parts: float32 [sequences, heads, SPLITS(, VALUE_DIM)], lse in log2."""
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_len = tl.load(kv_lens + row)
    first = tl.maximum(kv_len - WINDOW, 0) if WINDOW > 0 else 0
    aligned = first // BLOCK * BLOCK
    part = tl.maximum(tl.cdiv(tl.cdiv(kv_len - aligned, SPLITS), BLOCK) * BLOCK, SHORTEST)
    begin = aligned + split * part
    end = tl.minimum(begin + part, kv_len)
    if (begin >= kv_len) & (split > 0):
        return
    table = page_tables + row * table_stride
    if (end == kv_len) & (kv_len > 0):  # the new token is in this part
        slot = tl.load(table + (kv_len - 1) // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + (kv_len - 1) % PAGE_SIZE
        slot = slot * KV_HEADS + kv_head
        new_key, new_value = key + kv_head * key_stride_head, value + kv_head * value_stride_head
        store_rows(new_key, keys, key_scales, slot, row, 0, key_stride_row, 1, 1, KEY_DIM, KEY_DIM_PADDED, LIMIT)
        store_rows(
            new_value, values, value_scales, slot, row, 0, value_stride_row, 1, 1, VALUE_DIM, VALUE_DIM_PADDED, LIMIT
        )
        tl.debug_barrier()  # the loop below reads it again

    group = tl.arange(0, GROUP_PADDED)
    head = kv_head * GROUP + group
    key_dim = tl.arange(0, KEY_DIM_PADDED)
    value_dim = tl.arange(0, VALUE_DIM_PADDED)
    q = tl.load(
        query + row * query_stride_row + head[:, None] * query_stride_head + key_dim[None, :],
        mask=(group < GROUP)[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    )
    top = tl.full([GROUP_PADDED], -1.0e30, tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, VALUE_DIM_PADDED], tl.float32)
    for block in range(begin, end, BLOCK):
        token = block + tl.arange(0, BLOCK)
        live = (token < end) & (token >= first)
        if ONE_PAGE:  # the whole block lies in one page
            page = tl.load(table + block // PAGE_SIZE).to(tl.int64)
        else:
            page = tl.load(table + token // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        slot = (page * PAGE_SIZE + token % PAGE_SIZE) * KV_HEADS + kv_head
        k = tl.load(
            keys + slot[None, :] * KEY_DIM + key_dim[:, None],
            mask=live[None, :] & (key_dim < KEY_DIM)[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if LIMIT > 0:
            scores *= tl.load(key_scales + slot, mask=live, other=0.0)[None, :]
        if SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        scores = tl.where(live[None, :], scores * _LOG2E, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        if LIMIT > 0:
            weights *= tl.load(value_scales + slot, mask=live, other=0.0)[None, :]
        v = tl.load(
            values + slot[:, None] * VALUE_DIM + value_dim[None, :],
            mask=live[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
        top = higher

    used = tl.cdiv(kv_len - aligned, part)
    _finish(
        out, part_out, part_lse, counters, sinks, acc, top, total, row, kv_head, split, used,
        KV_HEADS, GROUP, GROUP_PADDED, GROUP_JOINED, VALUE_DIM, VALUE_DIM_PADDED, SPLITS, SINKS, AT_ONCE,
    )  # fmt: skip


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerPages,
    page_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    counters: torch.Tensor,
    out: torch.Tensor,
    options: ScoreOptions,
    processors: int,
    tuning: DecodeTuning | None = None,
) -> None:
    """Store each sequence's one new token and attend it to the sequence's pages.

    query: [sequences, heads, key_dim]; key, value: [sequences, kv_heads, dim]; page_tables: int32 [sequences, width];
    kv_lens: int32 [sequences], the new token included; 0: nothing is stored, and the output is zeros. counters: int32
    [sequences * kv_heads], zeros, and zeros again afterwards. out: [sequences, heads, value_dim], contiguous.
    processors: multiprocessors of the device. tuning: launch parameters, by default those of `tuning_for`.
    """
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    rows, heads, key_dim = query.shape
    page_size, kv_heads = layer.keys.shape[1:3]
    value_dim = out.shape[2]
    tuning = tuning or tuning_for(padded(max(key_dim, value_dim)), layer.keys.element_size())
    splits, shortest = splits_for(rows, kv_heads, tuning.programs * processors, tuning.block)
    part_out = torch.empty(rows, heads, splits, value_dim, device=query.device)
    part_lse = torch.empty(rows, heads, splits, device=query.device)
    _decode_kernel[(kv_heads, splits, rows)](
        query,
        key,
        value,
        *(layer.keys, layer.values, layer.key_scales, layer.value_scales),
        page_tables,
        kv_lens,
        counters,
        options.sinks,
        out,
        part_out,
        part_lse,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        page_tables.stride(0),
        options.scale,
        options.softcap,
        **_dims(kv_heads, heads // kv_heads, key_dim, value_dim),
        PAGE_SIZE=page_size,
        BLOCK=tuning.block,
        ONE_PAGE=tuning.one_page and page_size % tuning.block == 0,
        SPLITS=splits,
        SHORTEST=shortest,
        WINDOW=options.window,
        SOFTCAP=options.softcap != 0,
        SINKS=options.sinks is not None,
        LIMIT=0.0 if layer.key_scales is None else torch.finfo(layer.keys.dtype).max,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )


def padded(dim: int) -> int:
    """A size that tl.dot takes."""
    return max(16, int(triton.next_power_of_2(dim)))


def _dims(kv_heads: int, group: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """The kernel's constants of a model's head shape."""
    joined = int(triton.next_power_of_2(group))
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "GROUP_PADDED": max(16, joined),
        "GROUP_JOINED": joined,
        "KEY_DIM": key_dim,
        "KEY_DIM_PADDED": padded(key_dim),
        "VALUE_DIM": value_dim,
        "VALUE_DIM_PADDED": padded(value_dim),
        "AT_ONCE": max(1, min(8, _JOIN_ELEMENTS // (joined * padded(value_dim)))),
    }
