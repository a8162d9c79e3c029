"""What `RotatedPages` does on CUDA: launches on the current stream, whose shapes depend on no page's content."""

from typing import Any

import torch
import triton

from kvrail.engine.kv.fixed import cuda as fixed
from kvrail.engine.kv.rotated.close_kernel import close_pages
from kvrail.engine.kv.rotated.open_kernel import open_pages
from kvrail.engine.kv.rotated.pages import RotatedPages


def close(
    closed: RotatedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `FixedPages.close`."""
    fixed.close(closed, keys, values, sources, targets)
    if len(sources):
        close_pages[fixed.grid_of(closed, sources)](
            values.view(torch.int16),
            closed.pages,
            sources,
            targets,
            values[0].numel(),
            closed.pages[0].numel(),
            **_sizes(closed),
            enable_fp_fusion=False,
        )


def open(
    closed: RotatedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `FixedPages.open`."""
    fixed.open(closed, keys, values, sources, targets)
    if len(sources):
        open_pages[fixed.grid_of(closed, sources)](
            closed.pages,
            values,
            sources,
            targets,
            closed.pages[0].numel(),
            values[0].numel(),
            **_sizes(closed),
            ASSEMBLED=isinstance(open_pages, triton.JITFunction),
        )


def _sizes(closed: RotatedPages) -> dict[str, Any]:
    """Constants of both kernels."""
    (_, _, heads, blocks, both), (key, value) = closed.pages.shape, closed.tiles
    return {"KV_HEADS": heads, "BLOCKS": blocks, "DIM": value.dim, "BEGIN": key.bytes, "BOTH_TILES": both}
