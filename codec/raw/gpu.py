"""Whole pages between a pool and one buffer on its CUDA device: one launch for keys and values, one for scales.

Against an index_select a tensor it is one launch less, and moves eight bytes at a time whatever the element type.
"""

import math

import torch

from codec.base import CodecError, PagedBlock
from codec.raw.pages_kernel import move_pages_kernel

BLOCK_BYTES = 16 << 10
"""Of a page, what a program moves."""
WARPS = 4
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def gather(pages: PagedBlock, buffer: torch.Tensor) -> None:
    """Launch the copy of the pages' tensors, in payload order, to `buffer`, uint8 [raw bytes], on the current stream.

    Raises CodecError where the rows of a page are not contiguous.
    """
    _move(pages, buffer, gathers=True)


def scatter(buffer: torch.Tensor, out: PagedBlock) -> None:
    """Launch the reverse. Raises CodecError where the rows of a page are not contiguous."""
    _move(out, buffer, gathers=False)


def check_pools(pages: PagedBlock) -> list[torch.Tensor]:
    """The pool's tensors, cut to the layers chosen, as uint8 [layers, pool pages, bytes of a page]; views.

    Raises CodecError where the rows of a page are not contiguous.
    """
    pools = pages.layer_pools()
    for pool in pools:
        page = pool[:1, :1]
        if page.numel() and not page.is_contiguous():
            raise CodecError(
                f"a pool's tensor of shape {tuple(pool.shape)} has strides {pool.stride()}; "
                "make the rows of a page contiguous"
            )
    return [(pool if pool.dim() > 4 else pool.unsqueeze(-1)).flatten(2).view(torch.uint8) for pool in pools]


def _move(pages: PagedBlock, buffer: torch.Tensor, *, gathers: bool) -> None:
    pools, num_pages = check_pools(pages), len(pages.page_ids)
    sizes = [pool.shape[0] * num_pages * pool.shape[2] for pool in pools]
    parts, table = buffer.split_with_sizes(sizes), pages.page_index()
    for first in range(0, len(pools), 2):  # keys and values, then their scales
        _launch(pools[first : first + 2], list(parts[first : first + 2]), table, gathers)


def _launch(pools: list[torch.Tensor], parts: list[torch.Tensor], table: torch.Tensor, gathers: bool) -> None:
    """Two tensors and their parts of the buffer, in words as large as all addresses allow."""
    numbers = [number for pool in pools for number in (pool.data_ptr(), pool.shape[2], *pool.stride()[:2])]
    size = math.gcd(8, *numbers, *(part.data_ptr() for part in parts))
    views = [pool.view(_WORDS[size]) for pool in pools]
    words = [view.shape[2] for view in views]
    blocks = [min(BLOCK_BYTES // size, 1 << max(0, each - 1).bit_length()) for each in words]
    pages = pools[0].shape[0] * table.numel()
    counts = [pages * -(-each // block) for each, block in zip(words, blocks, strict=True)]
    if not sum(counts):
        return
    move_pages_kernel[(sum(counts),)](
        *views, *(view.stride(0) for view in views), *(view.stride(1) for view in views),
        *(part.view(_WORDS[size]) for part in parts), table, table.numel(), counts[0],
        FIRST_WORDS=words[0], SECOND_WORDS=words[1], FIRST_BLOCK=blocks[0], SECOND_BLOCK=blocks[1],
        GATHER=gathers, num_warps=WARPS,
    )  # fmt: skip
