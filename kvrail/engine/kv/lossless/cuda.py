"""What `ClosedPages` does on CUDA: launches on the current stream, whose shapes depend on no page's content."""

from typing import Any

import torch
import triton

from kvrail.engine.kv.lossless.close_kernel import close_pages, give_back_units
from kvrail.engine.kv.lossless.form import Tile
from kvrail.engine.kv.lossless.open_kernel import open_pages
from kvrail.engine.kv.lossless.pages import ClosedPages


def close(
    closed: ClosedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """See `ClosedPages.close`."""
    failed = torch.zeros(1, dtype=torch.int32, device=closed.pages.device)
    for pool, kind in _kinds(keys, values, sources):
        close_pages[_grid(closed, sources)](
            pool.view(torch.int16),
            closed.pages,
            closed.spare,
            closed.free,
            failed,
            sources,
            targets,
            pool[0].numel(),
            closed.pages[0].numel(),
            closed.spare.shape[1],
            **_constants(closed, kind),
        )
    return failed


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
            ASSEMBLED=isinstance(open_pages, triton.JITFunction),
        )


def give_back(closed: ClosedPages, pages: torch.Tensor) -> None:
    """See `ClosedPages.give_back`."""
    key, value = Tile(closed.layout.key_dim), Tile(closed.layout.value_dim)
    layers, _, heads, blocks, both = closed.pages.shape
    if len(pages):
        give_back_units[(len(pages), heads * blocks, layers)](
            closed.pages,
            pages,
            closed.free,
            closed.pages[0].numel(),
            TILES=heads * blocks,
            KEY_ESCAPES=key.escapes,
            VALUE_ESCAPES=key.bytes + value.escapes,
            BOTH_TILES=both,
            num_warps=1,
        )


def _grid(closed: ClosedPages, pages: torch.Tensor) -> tuple[int, int, int]:
    layers, _, heads, blocks, _ = closed.pages.shape
    return len(pages), heads * blocks, layers


def _kinds(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor) -> list[tuple[torch.Tensor, bool]]:
    """What to launch a kernel for: a pool, and whether it holds keys. Nothing where there are no pages."""
    return [(keys, True), (values, False)] if len(pages) else []


def _constants(closed: ClosedPages, keys: bool) -> dict[str, Any]:
    """Of the kernels for a page's tiles of keys, or of values."""
    layout, (_, _, heads, blocks, both) = closed.layout, closed.pages.shape
    return {
        "KV_HEADS": heads,
        "BLOCKS": blocks,
        "DIM": layout.key_dim if keys else layout.value_dim,
        "BEGIN": 0 if keys else Tile(layout.key_dim).bytes,
        "BOTH_TILES": both,
        "KEYS": keys,
    }
