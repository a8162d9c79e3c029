"""What `ClosedPages` does on CUDA: launches on the current stream, whose shapes depend on no page's content."""

from typing import Any

import torch
import triton

from kvrail.engine.kv.lossless.close_kernel import close_pages
from kvrail.engine.kv.lossless.close_kernel import keep_raw as keep_raw_tiles
from kvrail.engine.kv.lossless.form import Tile
from kvrail.engine.kv.lossless.open_kernel import open_pages
from kvrail.engine.kv.lossless.pages import ClosedPages


def close(
    closed: ClosedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """Fill tiles; raw ones have no spare unit yet. See `ClosedPages.close`."""
    for pool, kind in _kinds(keys, values, sources):
        close_pages[_grid(closed, sources)](
            pool.view(torch.int16),
            closed.pages,
            sources,
            targets,
            pool[0].numel(),
            closed.pages[0].numel(),
            **_constants(closed, kind),
        )


def keep_raw(
    closed: ClosedPages,
    keys: torch.Tensor,
    values: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    units: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Store raw tiles' high bytes. units: those of tiles of keys and of values, see `ClosedPages._take_units`."""
    for (pool, kind), taken in zip(_kinds(keys, values, sources), units, strict=False):
        keep_raw_tiles[_grid(closed, sources)](
            pool.view(torch.int16),
            closed.pages,
            closed.spare,
            taken,
            sources,
            targets,
            pool[0].numel(),
            closed.pages[0].numel(),
            closed.spare.shape[1],
            **_constants(closed, kind),
        )


def open(
    closed: ClosedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `ClosedPages.open`."""
    for pool, kind in _kinds(keys, values, sources):
        open_pages[_grid(closed, sources)](
            closed.pages,
            closed.spare,
            pool,
            sources,
            targets,
            closed.pages[0].numel(),
            pool[0].numel(),
            closed.spare.shape[1],
            **_constants(closed, kind),
        )


def _grid(closed: ClosedPages, pages: torch.Tensor) -> tuple[int, int, int]:
    layers, _, heads, blocks, _ = closed.pages.shape
    return len(pages), heads * blocks, layers


def _kinds(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor) -> list[tuple[torch.Tensor, bool]]:
    """What to launch a kernel for: a pool, and whether it holds keys. Nothing where there are no pages."""
    return [(keys, True), (values, False)] if len(pages) else []


def _constants(closed: ClosedPages, keys: bool) -> dict[str, Any]:
    """Constants of the kernels for a page's tiles of keys, or of values."""
    layout, (_, _, heads, blocks, both) = closed.layout, closed.pages.shape
    return {
        "KV_HEADS": heads,
        "BLOCKS": blocks,
        "DIM": layout.key_dim if keys else layout.value_dim,
        "BEGIN": 0 if keys else Tile(layout.key_dim).bytes,
        "BOTH_TILES": both,
        "KEYS": keys,
        "ASSEMBLED": isinstance(open_pages, triton.JITFunction),
    }
