"""Triton kernel: one new token a sequence is stored in its page, then attends to its pages.

Split-KV flash decoding (Dao et al., "Flash-Decoding for long-context inference", 2023): several programs share a long
sequence (`attention.shares` says which), and the last one to finish joins their results. Their number changes no bit of
the result: the first one folds its parts of `attention.order`, the others leave theirs one by one, and the join folds
them as a single program would. The query heads of one KV head are computed together, so that KV is read once. Launch
shapes depend on tensor shapes alone, never on lengths, so a captured launch serves any lengths. There is one launch: at
decode's sizes another would cost as much as a small kernel.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.attention.shares import SHARE_FIELDS
from kvrail.engine.attention.triton.axes_kernel import along, dealt_numbers, sums_of
from kvrail.engine.attention.triton.closed_kernel import add_closed_blocks, open_stages_of
from kvrail.engine.attention.triton.decode_block_kernel import add_open_blocks
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
from kvrail.engine.attention.triton.page_kernels import store_rows, unit_stride
from kvrail.engine.attention.triton.pair_kernel import whole
from kvrail.engine.kv.formats import LayerPages

_FEW_ROWS = 4


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Launch parameters: warps and pipeline stages a program, programs that run at once on a processor, registers.

    registers: of a thread; None: the compiler decides. columns: queries are columns of products, see `axes_kernel`.
    """

    warps: int = 4
    stages: int = 3
    programs: int = 4
    registers: int | None = None
    columns: bool = False


def tuning_for(shape: HeadShape, rows: int, code_bits: int | None = None) -> DecodeTuning:
    """Parameters for `rows` sequences with heads of `shape`; chosen on an H200 for heads of 128 (decision 0043).

    code_bits: of closed pages, see LayerPages.closed_tiles; None: all pages are plain.
    """
    few, plain = rows <= _FEW_ROWS, code_bits is None
    if block_of(shape) < 64:
        return DecodeTuning(stages=2)
    if plain and not severed(shape):
        return DecodeTuning(stages=5, programs=2)
    if plain or code_bits == 8:
        return DecodeTuning(stages=5, programs=3, registers=168, columns=True)
    if code_bits == 0:
        return DecodeTuning(stages=5, programs=2, columns=True) if few else DecodeTuning(registers=128, columns=True)
    return DecodeTuning(stages=5, registers=168 if few else 128, columns=True)


def tuning_over(layer: LayerPages, dtype: torch.dtype, rows: int) -> DecodeTuning:
    """Parameters for `rows` sequences over such pages, if a model computes in `dtype`."""
    return tuning_for(_shape_of(layer, dtype), rows, None if layer.closed is None else layer.closed.code_bits)


def _shape_of(layer: LayerPages, dtype: torch.dtype) -> HeadShape:
    return HeadShape(layer.keys.shape[3], layer.values.shape[3], dtype.itemsize, layer.keys.element_size())


@triton.jit
def _store_token(
    key,
    value,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    token,
    kv_head,
    row,
    key_stride_row,
    value_stride_row,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Store one head of a row's new token; key, value: where that head of the first row lies."""
    slot = tl.load(table + token // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + token % PAGE_SIZE
    slot = slot * KV_HEADS + kv_head
    store_rows(key, keys, key_scales, slot, row, 0, key_stride_row, 1, 1, KEY_DIM, KEY_DIM_PADDED, LIMIT)
    store_rows(value, values, value_scales, slot, row, 0, value_stride_row, 1, 1, VALUE_DIM, VALUE_DIM_PADDED, LIMIT)
    tl.debug_barrier()  # the token is read again below


@triton.jit
def _store_zeros(out, row, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Zeros in a row of `out` that has SIZE elements. PADDED: a power of two, at least SIZE."""
    at = tl.arange(0, PADDED)
    tl.store(out + row * SIZE + at, tl.zeros([PADDED], out.dtype.element_ty), at < SIZE)


@triton.jit
def _join_if_last(
    counter,
    left,
    out,
    parts,
    sinks,
    row,
    kv_head,
    begin,
    count,
    part_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_JOINED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    SINKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Count the parts that this program left; join all `count` where these were the last ones. begin: see `join`."""
    tl.debug_barrier()  # all threads' stores come before the count that announces them
    if tl.atomic_add(counter, left, sem="acq_rel") + left == count:
        tl.store(counter, 0)  # for the next layer
        join(
            out, parts, sinks, row, kv_head, begin, count, part_stride,
            KV_HEADS, GROUP, GROUP_JOINED, VALUE_DIM, VALUE_DIM_PADDED, SINKS, AT_ONCE,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["table_stride", "part_stride", "unit_bytes"],
    do_not_specialize_on_alignment=["page_tables", "kv_lens", "shares", "counters", "closed_tokens"],
)
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
    shares,
    closed_pages,
    spare,
    unit_bytes,
    closed_tokens,
    counters,
    sinks,
    out,
    part_out,
    part_top,
    part_total,
    query_stride_row,
    query_stride_head,
    key_stride_row,
    key_stride_head,
    value_stride_row,
    value_stride_head,
    table_stride,
    part_stride,
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
    FIELDS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    LIMIT: tl.constexpr,
    SEVERED: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BOTH_TILES: tl.constexpr,
    CODE_BITS: tl.constexpr,
    LEAD: tl.constexpr,
    ASSEMBLED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Grid: (KV_HEADS, shares). KEY_TILE, BOTH_TILES: bytes of closed pages' tiles, or 0.

    Programs that share a sequence leave float32: part_out [sequences, heads, part_stride, VALUE_DIM], and part_top,
    part_total [sequences, heads, part_stride]; the first one leaves the sum of its parts in place of the last of them.
    CODE_BITS: see closed_scores_of. LEAD: tokens in open pages before the closed ones; 0: none, and no code for them.
    KEYS: see axes_kernel.
    """
    kv_head, share = tl.program_id(0), shares + tl.program_id(1) * FIELDS
    row, number, programs = tl.load(share).to(tl.int64), tl.load(share + 1), tl.load(share + 2)
    if row < 0:
        return
    kv_len = tl.load(kv_lens + row)
    if kv_len == 0:
        _store_zeros(out, row * KV_HEADS + kv_head, GROUP * VALUE_DIM, GROUP_PADDED * VALUE_DIM_PADDED)
        return
    first = tl.maximum(kv_len - WINDOW, 0) // BLOCK * BLOCK if WINDOW > 0 else 0
    begin, end = share_of(first, kv_len, number, programs, 2 * BLOCK)
    if (begin >= end) & (number > 0):
        return
    table, alone, folds = page_tables + row * table_stride, end - begin == kv_len - first, number == 0
    if end == kv_len:  # the new token is in this program's share
        _store_token(
            key + kv_head * key_stride_head, value + kv_head * value_stride_head, keys, values, key_scales,
            value_scales, table, kv_len - 1, kv_head, row, key_stride_row, value_stride_row,
            KV_HEADS, KEY_DIM, KEY_DIM_PADDED, VALUE_DIM, VALUE_DIM_PADDED, PAGE_SIZE, LIMIT,
        )  # fmt: skip

    group, key_dim = tl.arange(0, GROUP_PADDED), tl.arange(0, KEY_DIM_PADDED)
    live, head = group < GROUP, kv_head * GROUP + group
    at = query + row * query_stride_row + along(head, 1 - KEYS) * query_stride_head + along(key_dim, KEYS)
    q = tl.load(at, mask=along(live, 1 - KEYS) & along(key_dim < KEY_DIM, KEYS), other=0.0)
    position = tl.full([1], kv_len - 1, tl.int32)
    pools, closed_pool = (keys, values, key_scales, value_scales), (closed_pages, spare, unit_bytes)
    parts = (part_out, part_top, part_total, (row * KV_HEADS * GROUP + head) * part_stride - part_of(first))
    channels = dealt_numbers(VALUE_DIM_PADDED, BOTH_TILES > 0 and not KEYS)
    before = none_before(GROUP_PADDED, VALUE_DIM_PADDED, sums_of(KEYS), KEYS)
    q, scale, part = begun(q, keys, scale, KEY_DIM, VALUE_DIM, VALUE_DIM_PADDED, SEVERED, KEYS)
    closed = tl.maximum(begin, tl.minimum(LEAD, end)) if LEAD > 0 else begin
    if LEAD > 0:
        before, part = add_open_blocks(
            q, pools, table, kv_head, begin, closed, end, position, kv_len, scale, softcap, parts, folds, live, before,
            part, channels, KV_HEADS, KEY_DIM, KEY_DIM_PADDED, VALUE_DIM, PAGE_SIZE, BLOCK, WINDOW, SOFTCAP, LIMIT > 0,
            SEVERED, open_stages_of(CODE_BITS), KEYS,
        )  # fmt: skip
    opened = tl.maximum(closed, tl.minimum(tl.load(closed_tokens + row), end)) if BOTH_TILES else closed
    if BOTH_TILES:
        before, part = add_closed_blocks(
            q, closed_pool, table, kv_head, closed, opened, end, position, kv_len, scale, softcap, parts, folds, live,
            before, part, channels, KV_HEADS, KEY_DIM, VALUE_DIM, PAGE_SIZE, BLOCK, WINDOW, SOFTCAP, KEY_TILE,
            BOTH_TILES, CODE_BITS, ASSEMBLED, KEYS,
        )  # fmt: skip
    before, part = add_open_blocks(
        q, pools, table, kv_head, opened, end, end, position, kv_len, scale, softcap, parts, folds, live, before, part,
        channels, KV_HEADS, KEY_DIM, KEY_DIM_PADDED, VALUE_DIM, PAGE_SIZE, BLOCK, WINDOW, SOFTCAP,
        LIMIT > 0, SEVERED, open_stages_of(CODE_BITS) if BOTH_TILES else None, KEYS,
    )  # fmt: skip
    part = whole(part, KEYS)
    if folds:
        part = fold(before, part, KEYS)
    if alone:
        result = output_of(part, sinks, head, live, SINKS, KEYS).to(out.dtype.element_ty)
        where = along(row * KV_HEADS * GROUP + head, 1 - KEYS) * VALUE_DIM + along(channels, KEYS)
        tl.store(out + where, result, along(live, 1 - KEYS) & along(channels < VALUE_DIM, KEYS))
    else:
        leave(parts, part_of(end - 1), part, live, channels, VALUE_DIM, KEYS)
        _, folded = share_of(first, kv_len, 0, programs, 2 * BLOCK)
        _join_if_last(
            counters + row * KV_HEADS + kv_head, part_of(end - 1) - part_of(begin) + 1, out,
            (part_out, part_top, part_total), sinks, row, kv_head, part_of(folded - 1) - part_of(first),
            part_of(kv_len - 1) - part_of(first) + 1, part_stride, KV_HEADS, GROUP, GROUP_JOINED, VALUE_DIM,
            VALUE_DIM_PADDED, SINKS, AT_ONCE,
        )  # fmt: skip


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerPages,
    page_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    shares: torch.Tensor,
    counters: torch.Tensor,
    out: torch.Tensor,
    options: ScoreOptions,
    tuning: DecodeTuning | None = None,
    closed_tokens: torch.Tensor | None = None,
) -> None:
    """Store each sequence's one new token and attend it to the sequence's pages.

    query: [sequences, heads, key_dim]; key, value: [sequences, kv_heads, dim]; page_tables: int32 [sequences, width];
    kv_lens: int32 [sequences], the new token included; 0: nothing is stored, and the output is zeros. shares: see
    StepMeta. counters: int32 [sequences * kv_heads], zeros, and zeros again afterwards. out: [sequences, heads,
    value_dim], contiguous. tuning: launch parameters, by default those of `tuning_for`. closed_tokens: int32
    [sequences], see StepMeta; None where all pages are plain.
    """
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    rows, heads, key_dim = query.shape
    page_size, kv_heads, value_dim = layer.page_size, layer.kv_heads, out.shape[2]
    shape = _shape_of(layer, query.dtype)
    tuning = tuning or tuning_over(layer, query.dtype, rows)
    parts = parts_of(page_tables.shape[1] * page_size)
    part_out = torch.empty(rows, heads, parts, value_dim, device=query.device)
    part_top, part_total = torch.empty(2, rows, heads, parts, device=query.device)
    _decode_kernel[(kv_heads, len(shares))](
        query,
        key,
        value,
        *layer.arguments,
        page_tables,
        kv_lens,
        shares,
        *layer.closed_arguments,
        closed_tokens,
        counters,
        options.sinks,
        out,
        part_out,
        part_top,
        part_total,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        page_tables.stride(0),
        parts,
        options.scale,
        options.softcap,
        **_dims(kv_heads, heads // kv_heads, key_dim, value_dim, tuning.columns),
        PAGE_SIZE=page_size,
        BLOCK=block_of(shape),
        FIELDS=SHARE_FIELDS,
        **score_constants(options),
        LIMIT=layer.limit,
        SEVERED=severed(shape) and isinstance(_decode_kernel, triton.JITFunction),
        **layer.closed_tiles,
        ASSEMBLED=isinstance(_decode_kernel, triton.JITFunction),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        maxnreg=tuning.registers,
        enable_fp_fusion=False,
    )


def _dims(kv_heads: int, group: int, key_dim: int, value_dim: int, columns: bool) -> dict[str, int]:
    """The kernel's constants for a model's head shape; columns: see DecodeTuning."""
    joined = int(triton.next_power_of_2(group))
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "GROUP_PADDED": max(8 if columns else 16, joined),
        "GROUP_JOINED": joined,
        "KEY_DIM": key_dim,
        "KEY_DIM_PADDED": padded(key_dim),
        "VALUE_DIM": value_dim,
        "VALUE_DIM_PADDED": padded(value_dim),
        "AT_ONCE": joined_at_once(group, value_dim),
        "KEYS": 0 if columns else 1,
    }
