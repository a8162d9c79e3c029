"""Triton kernel that stores packed tokens' keys and values in pages."""

import torch
import triton
import triton.language as tl

from kvrail.engine.kv.formats import LayerPages


@triton.jit
def store_rows(
    source,
    pool,
    scales,
    slot,
    token,
    stride_head,
    stride_token,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """One token's rows of HEADS heads, in slot `slot` of HEADS rows.

    LIMIT: the largest value of a scaled type; 0 where elements are stored as they are.
    """
    head = tl.arange(0, HEADS_PADDED)[:, None]
    dim = tl.arange(0, DIM_PADDED)[None, :]
    mask = (head < HEADS) & (dim < DIM)
    rows = tl.load(source + token * stride_token + head * stride_head + dim, mask=mask, other=0.0)
    if LIMIT > 0:
        rows = rows.to(tl.float32)
        amax = tl.max(tl.abs(rows), axis=1)
        scale = tl.where(amax > 0, amax * (1.0 / LIMIT), 1.0)
        wide = tl.broadcast_to(scale[:, None], [HEADS_PADDED, DIM_PADDED])
        rows = tl.clamp(tl.div_rn(rows, wide), -LIMIT, LIMIT)
        heads = tl.arange(0, HEADS_PADDED)
        tl.store(scales + slot * HEADS + heads, scale, mask=heads < HEADS)
    tl.store(pool + slot * HEADS * DIM + head * DIM + dim, rows.to(pool.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_kernel(
    key,
    value,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    key_stride_head,
    key_stride_token,
    value_stride_head,
    value_stride_token,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Grid: (tokens, 2): keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    if tl.program_id(1) == 0:
        store_rows(
            key, keys, key_scales, slot, token, key_stride_head, key_stride_token,
            HEADS, HEADS_PADDED, KEY_DIM, KEY_DIM_PADDED, LIMIT,
        )  # fmt: skip
    else:
        store_rows(
            value, values, value_scales, slot, token, value_stride_head, value_stride_token,
            HEADS, HEADS_PADDED, VALUE_DIM, VALUE_DIM_PADDED, LIMIT,
        )  # fmt: skip


def write_pages(layer: LayerPages, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Store new tokens as reference.write_pages does, but skip slots of -1.

    key, value: [tokens, kv_heads, dim].
    """
    tokens, heads, key_dim = key.shape
    value_dim = value.shape[2]
    if tokens == 0:
        return
    key, value = unit_stride(key), unit_stride(value)
    _write_kernel[(tokens, 2)](
        key,
        value,
        *layer.arguments,
        slots,
        key.stride(1),
        key.stride(0),
        value.stride(1),
        value.stride(0),
        HEADS=heads,
        HEADS_PADDED=triton.next_power_of_2(heads),
        KEY_DIM=key_dim,
        KEY_DIM_PADDED=triton.next_power_of_2(key_dim),
        VALUE_DIM=value_dim,
        VALUE_DIM_PADDED=triton.next_power_of_2(value_dim),
        LIMIT=layer.limit,
    )


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a contiguous last axis."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
