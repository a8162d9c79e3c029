"""What `FixedPages` does on CUDA: launches on the current stream, whose shapes depend on no page's content."""

from typing import Any

import torch
import triton

from kvrail.engine.kv.fixed.close_kernel import close_pages
from kvrail.engine.kv.fixed.form import Tile
from kvrail.engine.kv.fixed.open_kernel import open_pages
from kvrail.engine.kv.fixed.pages import FixedPages


def close(
    closed: FixedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `FixedPages.close`."""
    for pool, constants in _pools(closed, keys, values, sources):
        close_pages[grid_of(closed, sources)](
            pool.view(torch.int16),
            closed.pages,
            sources,
            targets,
            pool[0].numel(),
            closed.pages[0].numel(),
            **constants,
            enable_fp_fusion=False,
        )


def open(
    closed: FixedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `FixedPages.open`."""
    for pool, constants in _pools(closed, keys, values, sources):
        open_pages[grid_of(closed, sources)](
            closed.pages,
            pool,
            sources,
            targets,
            closed.pages[0].numel(),
            pool[0].numel(),
            **constants,
            ASSEMBLED=isinstance(open_pages, triton.JITFunction),
        )


def grid_of(closed: FixedPages, pages: torch.Tensor) -> tuple[int, int, int]:
    """A program for each head and block of these pages of each layer."""
    layers, _, heads, blocks, _ = closed.pages.shape
    return len(pages), heads * blocks, layers


def _pools(
    closed: FixedPages, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor
) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Pools to launch a kernel for, with its constants. Nothing where there are no pages, or tiles of another form."""
    (_, _, heads, blocks, both), key = closed.pages.shape, closed.tiles[0]
    same = {"KV_HEADS": heads, "BLOCKS": blocks, "BOTH_TILES": both}
    return [
        (pool, {**same, "DIM": tile.dim, "KEYS": tile.keys, "BITS": tile.bits, "BEGIN": 0 if tile.keys else key.bytes})
        for pool, tile in zip((keys, values), closed.tiles, strict=True)
        if len(pages) and isinstance(tile, Tile)
    ]
