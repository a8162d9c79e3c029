"""The product as an operation of torch's, which compiled and captured models can hold."""

import torch

from kvrail.codec.compact.format import CompactWeight


@torch.library.custom_op("kvrail::compact_product", mutates_args=())
def compact_product(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    shifts: torch.Tensor,
    scales: torch.Tensor,
    rows: int,
    columns: int,
) -> torch.Tensor:
    """x, bfloat16 [..., columns], times the transpose of the compact weight, plus the bias: [..., rows]."""
    from kvrail.codec.compact.gpu import multiply

    weight = CompactWeight(rows, columns, blocks, index, counts, shifts, scales)
    return multiply(x.reshape(-1, columns).contiguous(), weight, bias).view(*x.shape[:-1], rows)


@compact_product.register_fake
def _(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    shifts: torch.Tensor,
    scales: torch.Tensor,
    rows: int,
    columns: int,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rows))
