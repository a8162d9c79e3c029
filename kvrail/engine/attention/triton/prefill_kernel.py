"""Triton kernel: causal attention of packed sequences whose queries are their last tokens, over their pages.

Flash attention (Dao, "FlashAttention-2", 2023), in the order of `attention.order`. The host makes a list of blocks of
queries, and a program reads its block there. So a launch's shape depends on tensor shapes alone, and a captured launch
serves any lengths. Keys and values are read in their pages; nothing is gathered first.

Few tokens make few programs, and each would read everything that its queries see: most of a chip's 132 processors would
idle while a short question is computed behind a long prompt. So in a step of up to FEW tokens a program takes fewer
queries, of several heads that share keys, and several programs share the tokens that these see, as in the decode
kernel. A second launch joins their results. The split changes no bit.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvrail.engine.attention.meta import BLOCK_FIELDS
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.attention.triton.axes_kernel import sums_of
from kvrail.engine.attention.triton.order import (
    HeadShape,
    block_of,
    joined_at_once,
    padded,
    parts_of,
    score_constants,
    severed,
)
from kvrail.engine.attention.triton.order_kernel import (
    begun,
    fold,
    join,
    leave,
    none_before,
    output_of,
    part_of,
    share_of,
)
from kvrail.engine.attention.triton.page_kernels import unit_stride
from kvrail.engine.attention.triton.pair_kernel import whole
from kvrail.engine.attention.triton.prefill_block_kernel import closed_blocks, open_blocks
from kvrail.engine.kv.formats import LayerPages

_FIELDS = tl.constexpr(BLOCK_FIELDS)


FEW = 64
"""Up to this many tokens in a step, programs share the tokens that queries see. The parts that they leave take memory:
142 MB for 64 tokens with 64 heads of 128 behind 40,960 tokens."""
_PROGRAMS = 4
"""Programs wanted on each processor in that case. On an H200, 16 tokens with 64 heads of 128 behind 32,768 tokens take
118 us a layer; with two heads a program 176 us, with one 229, without sharing 835."""
_MAX_SPLITS = 16
_SHORTEST = 256
"""The fewest tokens of a program's share: one part."""
_STAGES, _FEW_STAGES = 5, 3
"""Pipeline stages over plain pages of 16 bits, in large steps and in those of up to FEW tokens. With fewer each turn of
the loop waits for its reads: a chunk of 2,048 tokens behind 6,016 takes 663 us a layer on an H200 with two stages and
587 with five (decision 0044)."""
_SHARED_BYTES = 228 << 10
"""Shared memory of a multiprocessor in which two programs of _STAGES run at once."""


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Launch parameters: queries a program, heads whose queries it takes, warps, pipeline stages; programs a block."""

    queries: int
    warps: int
    stages: int
    heads: int = 1
    splits: int = 1


def queries_for(shape: HeadShape, tokens: int) -> int:
    """The most queries of a block in a step of `tokens` tokens."""
    return 16 if shape.compute_bytes > 2 or tokens <= FEW else 64


def tuning_for(
    shape: HeadShape, tokens: int, heads: int, kv_heads: int, processors: int, *, ahead: bool = False
) -> PrefillTuning:
    """Parameters for a step of `tokens` tokens with heads of `shape` on a device with `processors` multiprocessors.

    ahead: whether the pages are plain and the device has room to read far ahead.
    """
    wide = shape.compute_bytes > 2
    queries, together, splits, stages = queries_for(shape, tokens), 1, 1, 2
    if tokens <= FEW:
        while not wide and together < 4 and heads // kv_heads % (2 * together) == 0:
            together *= 2
        wanted = _PROGRAMS * processors // (-(-tokens // queries) * heads // together)
        splits = min(1 << max(wanted, 1).bit_length() - 1, _MAX_SPLITS)
    if ahead and shape.page_bytes == shape.compute_bytes == 2 and shape.dim <= 128:
        stages = _FEW_STAGES if tokens <= FEW else _STAGES
    return PrefillTuning(queries, 4, stages, together, splits)


@functools.cache
def _reads_ahead(device: torch.device) -> bool:
    """Whether two programs with the most stages run on one multiprocessor at once."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor >= _SHARED_BYTES


@triton.jit
def _fields(blocks):
    """The fields of the program's block, see StepMeta.blocks."""
    fields = blocks + tl.program_id(0) * _FIELDS
    return tl.load(fields).to(tl.int64), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)


@triton.jit
def _seen(lowest, count, sequence, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """The tokens that a block's queries see: (first, end), first at a block's begin; none for padding."""
    end = tl.where(sequence >= 0, lowest + count, 0)  # no query sees a token behind the last query
    first = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK * BLOCK if WINDOW > 0 else 0
    return first, end


@triton.jit(
    do_not_specialize=["table_stride", "part_stride", "unit_bytes"],
    do_not_specialize_on_alignment=["page_tables", "closed_tokens", "blocks"],
)
def _prefill_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    closed_pages,
    spare,
    unit_bytes,
    page_tables,
    closed_tokens,
    blocks,
    sinks,
    out,
    part_out,
    part_top,
    part_total,
    query_stride_token,
    query_stride_head,
    table_stride,
    part_stride,
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
    TOGETHER: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    SEVERED: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BOTH_TILES: tl.constexpr,
    CODE_BITS: tl.constexpr,
    LEAD: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):
    """Grid: (blocks, HEADS / TOGETHER, SPLITS). A block's fields: see StepMeta.blocks.

    A program has QUERIES queries of each of TOGETHER heads. Programs that share a block leave float32: part_out
    [tokens, HEADS, part_stride, VALUE_DIM], and part_top, part_total [tokens, HEADS, part_stride]. KEY_TILE,
    BOTH_TILES: bytes of closed pages' tiles, or 0; CODE_BITS: see closed_scores_of; LEAD: see the decode kernel.
    """
    ROWS: tl.constexpr = QUERIES * TOGETHER
    SHARED: tl.constexpr = SPLITS > 1
    first_head = tl.program_id(1) * TOGETHER
    kv_head = first_head // (HEADS // KV_HEADS)
    first_token, count, lowest, sequence = _fields(blocks)
    if count == 0:
        return
    first, end = _seen(lowest, count, sequence, BLOCK, WINDOW)
    begin, stop = first, end
    if SHARED:
        begin, stop = share_of(first, end, tl.program_id(2), SPLITS, SHORTEST)
        if begin >= stop:
            return
    table = page_tables + tl.maximum(sequence, 0).to(tl.int64) * table_stride
    row = tl.arange(0, ROWS)
    local, heads = row % QUERIES, first_head + row // QUERIES
    position = lowest + local
    packed = first_token + local
    live = local < count
    key_dim = tl.arange(0, KEY_DIM_PADDED)
    value_dim = tl.arange(0, VALUE_DIM_PADDED)
    q = tl.load(
        query + (packed * query_stride_token + heads * query_stride_head)[:, None] + key_dim[None, :],
        mask=live[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    )
    pools, closed_pool = (keys, values, key_scales, value_scales), (closed_pages, spare, unit_bytes)
    parts = (part_out, part_top, part_total, (packed * HEADS + heads) * part_stride - part_of(first))
    before = none_before(ROWS, VALUE_DIM_PADDED, sums_of(1), 1)
    q, scale, part = begun(q, keys, scale, KEY_DIM, VALUE_DIM, VALUE_DIM_PADDED, SEVERED, 1)
    closed = begin
    if LEAD > 0:
        closed = tl.maximum(begin, tl.minimum(LEAD, stop))
        before, part = open_blocks(
            q, pools, table, kv_head, begin, closed, position, end, scale, softcap, begin, parts, live, before, part,
            value_dim, KV_HEADS, KEY_DIM, KEY_DIM_PADDED, VALUE_DIM, PAGE_SIZE, BLOCK, WINDOW, SOFTCAP,
            SCALED, SEVERED, SHARED, True,
        )  # fmt: skip
    opened = closed
    if BOTH_TILES:  # whole pages before the queries' own tokens
        opened = tl.maximum(closed, tl.minimum(tl.load(closed_tokens + tl.maximum(sequence, 0)), stop))
        before, part = closed_blocks(
            q, closed_pool, table, kv_head, closed, opened, position, end, scale, softcap, begin, parts, live, before,
            part, value_dim, KV_HEADS, KEY_DIM, VALUE_DIM, PAGE_SIZE, BLOCK, WINDOW, SOFTCAP, SHARED, KEY_TILE,
            BOTH_TILES, CODE_BITS, ASSEMBLED,
        )  # fmt: skip
    if WINDOW > 0:  # a window begins inside a block: all blocks are masked
        masked_from = opened
    else:
        masked_from = tl.minimum(lowest + 1, end) // BLOCK * BLOCK
        before, part = open_blocks(
            q, pools, table, kv_head, opened, tl.minimum(masked_from, stop), position, end, scale, softcap, begin,
            parts, live, before, part, value_dim, KV_HEADS, KEY_DIM, KEY_DIM_PADDED, VALUE_DIM, PAGE_SIZE,
            BLOCK, WINDOW, SOFTCAP, SCALED, SEVERED, SHARED, False,
        )  # fmt: skip
    before, part = open_blocks(
        q, pools, table, kv_head, tl.maximum(opened, masked_from), stop, position, end, scale, softcap, begin,
        parts, live, before, part, value_dim, KV_HEADS, KEY_DIM, KEY_DIM_PADDED, VALUE_DIM, PAGE_SIZE,
        BLOCK, WINDOW, SOFTCAP, SCALED, SEVERED, SHARED, True,
    )  # fmt: skip
    if SHARED:
        leave(parts, part_of(stop - 1), whole(part, 1), live, value_dim, VALUE_DIM, 1)
    else:
        result = output_of(fold(before, whole(part, 1), 1), sinks, heads, live, SINKS, 1)
        row_out = out + ((packed * HEADS + heads) * VALUE_DIM)[:, None] + value_dim[None, :]
        tl.store(row_out, result.to(out.dtype.element_ty), live[:, None] & (value_dim < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=["part_stride"], do_not_specialize_on_alignment=["blocks"])
def _join_kernel(
    blocks,
    sinks,
    out,
    part_out,
    part_top,
    part_total,
    part_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Grid: (blocks, queries of a block, KV_HEADS). Fold the parts that programs of `_prefill_kernel` left."""
    first_token, count, lowest, sequence = _fields(blocks)
    query = tl.program_id(1)
    if query >= count:
        return
    first, end = _seen(lowest, count, sequence, BLOCK, WINDOW)
    parts = tl.where(end > first, part_of(end - 1) - part_of(first) + 1, 0)  # padding has none and gets zeros
    join(
        out, (part_out, part_top, part_total), sinks, first_token + query, tl.program_id(2), 0, parts, part_stride,
        KV_HEADS, GROUP, GROUP_PADDED, VALUE_DIM, VALUE_DIM_PADDED, SINKS, AT_ONCE,
    )  # fmt: skip


def prefill_attention(
    query: torch.Tensor,
    layer: LayerPages,
    page_tables: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    options: ScoreOptions,
    processors: int,
    tuning: PrefillTuning | None = None,
    closed_tokens: torch.Tensor | None = None,
) -> None:
    """Attend the queries of `blocks` to their sequences' tokens up to themselves, which the pages hold.

    query: [tokens, heads, key_dim]; page_tables: int32 [sequences, width]; blocks: int32 [blocks, 4], of at most
    `tuning.queries` queries each, see StepMeta.blocks; out: [tokens, heads, value_dim], contiguous; rows outside all
    blocks are not written. processors: multiprocessors of the device. tuning: launch parameters, by default those of
    `tuning_for`. closed_tokens: int32 [sequences], see StepMeta; None where all pages are plain.
    """
    tokens, heads, key_dim = (query := unit_stride(query)).shape
    page_size, kv_heads, value_dim = layer.values.shape[1:]
    shape = HeadShape(key_dim, value_dim, query.element_size(), layer.keys.element_size())
    ahead = layer.closed is None and _reads_ahead(query.device)
    tuning = tuning or tuning_for(shape, tokens, heads, kv_heads, processors, ahead=ahead)
    parts = parts_of(page_tables.shape[1] * page_size) if tuning.splits > 1 else 0
    left = [torch.empty(tokens, heads, parts, *last, device=query.device) for last in ((value_dim,), (), ())]
    shared: dict[str, int] = {
        "KV_HEADS": kv_heads,
        "VALUE_DIM": value_dim,
        "VALUE_DIM_PADDED": padded(value_dim),
        "BLOCK": block_of(shape),
    }
    _prefill_kernel[(len(blocks), heads // tuning.heads, tuning.splits)](
        query,
        *layer.arguments,
        *layer.closed_arguments,
        page_tables,
        closed_tokens,
        blocks,
        options.sinks,
        out,
        *left,
        *query.stride()[:2],
        page_tables.stride(0),
        parts,
        options.scale,
        options.softcap,
        HEADS=heads,
        KEY_DIM=key_dim,
        KEY_DIM_PADDED=padded(key_dim),
        PAGE_SIZE=page_size,
        QUERIES=tuning.queries,
        TOGETHER=tuning.heads,
        SPLITS=tuning.splits,
        SHORTEST=_SHORTEST,
        SCALED=layer.scaled,
        SEVERED=severed(shape) and isinstance(_prefill_kernel, triton.JITFunction),
        **score_constants(options),
        **layer.closed_tiles,
        ASSEMBLED=isinstance(_prefill_kernel, triton.JITFunction),
        **shared,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        enable_fp_fusion=False,
    )
    if tuning.splits > 1:
        _join((len(blocks), tuning.queries, kv_heads), blocks, options, out, left, shared)


def _join(
    grid: tuple[int, int, int],
    blocks: torch.Tensor,
    options: ScoreOptions,
    out: torch.Tensor,
    left: list[torch.Tensor],
    shared: dict[str, int],
) -> None:
    """Launch `_join_kernel`. left: part_out, part_top and part_total; shared: constants of both kernels."""
    heads, value_dim = out.shape[1:]
    group = heads // shared["KV_HEADS"]
    _join_kernel[grid](
        blocks,
        options.sinks,
        out,
        *left,
        left[0].shape[2],
        GROUP=group,
        GROUP_PADDED=int(triton.next_power_of_2(group)),
        AT_ONCE=joined_at_once(group, value_dim),
        WINDOW=options.window,
        SINKS=options.sinks is not None,
        **shared,
        enable_fp_fusion=False,
    )
