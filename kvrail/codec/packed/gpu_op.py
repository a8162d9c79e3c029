"""The product as an operation of torch's, which compiled and captured models can hold."""

import torch

from kvrail.codec.packed.format import PackedWeight


@torch.library.custom_op("kvrail::packed_product", mutates_args=())
def packed_product(
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
    """x, bfloat16 [..., columns], times the transpose of the packed weight, plus the bias: [..., rows]."""
    from kvrail.codec.packed.gpu import multiply

    weight = PackedWeight(rows, columns, blocks, index, counts, shifts, scales)
    return multiply(x.reshape(-1, columns).contiguous(), weight, bias).view(*x.shape[:-1], rows)


@packed_product.register_fake
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
