"""Whole pages between a pool and one buffer on its CUDA device: one launch for keys and values, one for scales.

Against an index_select a tensor it is one launch less, and moves eight bytes at a time whatever the element type.
"""

import math
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kvrail.codec.base import PagedBlock
from kvrail.codec.core.gpu import check_rows
from kvrail.codec.raw.gpu_pages_kernel import move_pages_kernel

BLOCK_BYTES = 16 << 10
"""What a program moves of a page."""
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
    """The pool's tensors as uint8 [layers, pool pages, bytes of a page]; views that are made once for a pool.

    Raises CodecError where the rows of a page are not contiguous.
    """
    return [_view(pool, 1) for pool in pages.pools.tensors()]


_views: Any = WeakIdKeyDictionary()
"""Of pools, by the size of a word. Each of torch's calls gives the interpreter away and wants it back, which beside a
busy engine takes longer than the copy."""


def _view(pool: torch.Tensor, word: int) -> torch.Tensor:
    """A pool as words of `word` bytes [layers, pool pages, words of a page]."""
    views = _views.get(pool)
    if views is None:
        check_rows(pool)
        whole = (pool if pool.dim() > 4 else pool.unsqueeze(-1)).flatten(2).view(torch.uint8)
        views = _views[pool] = {1: whole}
    if word not in views:
        views[word] = views[1].view(_WORDS[word])
    view: torch.Tensor = views[word]
    return view


def _move(pages: PagedBlock, buffer: torch.Tensor, *, gathers: bool) -> None:
    pools = pages.pools.tensors()
    count = len(pages.layers) * len(pages.page_ids)
    sizes = [count * view.shape[2] for view in check_pools(pages)]
    table, start = pages.page_index(), 0
    for first in range(0, len(pools), 2):  # keys and values, then their scales
        _launch(pages, pools[first : first + 2], buffer, (start, start + sizes[first]), table, gathers)
        start += sum(sizes[first : first + 2])


def _launch(
    pages: PagedBlock,
    pools: list[torch.Tensor],
    buffer: torch.Tensor,
    starts: tuple[int, int],
    table: torch.Tensor,
    gathers: bool,
) -> None:
    """Two tensors and their parts of the buffer, in words as large as all addresses allow."""
    whole = [_view(pool, 1) for pool in pools]
    numbers = [number for view in whole for number in (view.data_ptr(), view.shape[2], *view.stride()[:2])]
    size = math.gcd(8, *numbers, buffer.data_ptr(), *starts, buffer.numel())
    views = [_view(pool, size) for pool in pools]
    words = [view.shape[2] for view in views]
    blocks = [min(BLOCK_BYTES // size, 1 << max(0, each - 1).bit_length()) for each in words]
    count = len(pages.layers) * len(pages.page_ids)
    counts = [count * -(-each // block) for each, block in zip(words, blocks, strict=True)]
    if not sum(counts):
        return
    move_pages_kernel[(sum(counts),)](
        *views, pages.layers.start, *(view.stride(0) for view in views), *(view.stride(1) for view in views),
        buffer.view(_WORDS[size]), starts[0] // size, starts[1] // size, table, len(pages.page_ids), counts[0],
        FIRST_WORDS=words[0], SECOND_WORDS=words[1], FIRST_BLOCK=blocks[0], SECOND_BLOCK=blocks[1],
        GATHER=gathers, num_warps=WARPS,
    )  # fmt: skip
