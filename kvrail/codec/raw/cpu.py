"""Whole pages between a pool and one buffer in host memory."""

import itertools
import math

import torch

from kvrail.codec.base import CodecError, PagedBlock
from kvrail.codec.core.arrays import Bytes


def gather(pages: PagedBlock, buffer: torch.Tensor) -> None:
    """Copy pages to `buffer`, uint8 [raw bytes]. Raises CodecError where a pool's tensor is not contiguous."""
    pools, index = [_as_bytes(pool) for pool in pages.layer_pools()], pages.page_index()
    shapes = [(pool.shape[0], index.numel(), *pool.shape[2:]) for pool in pools]
    parts = buffer.split_with_sizes([math.prod(shape) for shape in shapes])
    for pool, shape, part in zip(pools, shapes, parts, strict=True):
        torch.index_select(pool, 1, index, out=part.view(shape))


def scatter(source: Bytes, out: PagedBlock) -> None:
    """Copy a payload to pages. Raises CodecError where a pool's tensor is not contiguous."""
    offset = 0
    for pool in [_as_bytes(pool) for pool in out.layer_pools()]:
        page_bytes = math.prod(pool.shape[2:])
        for layer, page in itertools.product(range(pool.shape[0]), out.page_ids):
            pool[layer, page].numpy().reshape(-1)[:] = source[offset : offset + page_bytes]
            offset += page_bytes


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a pool's tensor as uint8, its last dimension widened; raises CodecError where it is not contiguous."""
    if not tensor.is_contiguous():
        raise CodecError(f"a pool's tensor of shape {tuple(tensor.shape)} is not contiguous; make it so first")
    return (tensor if tensor.dim() == 5 else tensor.unsqueeze(-1)).view(torch.uint8)
