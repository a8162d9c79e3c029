"""The product as an operation of torch's, which compiled and captured models can hold."""

import torch

from kvrail.codec.papers.tbe.format import TbeWeight


@torch.library.custom_op("kvrail::tbe_product", mutates_args=())
def tbe_product(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    base: torch.Tensor,
    bitmaps: torch.Tensor,
    sign_mantissas: torch.Tensor,
    full_values: torch.Tensor,
    offsets: torch.Tensor,
    rows: int,
    columns: int,
) -> torch.Tensor:
    """x, bfloat16 [..., columns], times the transpose of the compressed weight, plus the bias: [..., rows]."""
    from kvrail.codec.papers.tbe.gpu import multiply

    weight = TbeWeight(rows, columns, base, bitmaps, sign_mantissas, full_values, offsets)
    return multiply(x.reshape(-1, columns).contiguous(), weight, bias).view(*x.shape[:-1], rows)


@tbe_product.register_fake
def _(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    base: torch.Tensor,
    bitmaps: torch.Tensor,
    sign_mantissas: torch.Tensor,
    full_values: torch.Tensor,
    offsets: torch.Tensor,
    rows: int,
    columns: int,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rows))
