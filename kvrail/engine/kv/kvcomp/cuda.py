"""What `CodedPages` does on CUDA: launches on the current stream, whose shapes depend on no page's content."""

from typing import Any

import torch
import triton

from kvrail.engine.kv.kvcomp.close_kernel import close_pages
from kvrail.engine.kv.kvcomp.open_kernel import open_pages
from kvrail.engine.kv.kvcomp.pages import CodedPages


def close(
    closed: CodedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `CodedPages.close`."""
    if not len(sources):
        return
    pair = closed.pair
    close_pages[_grid(closed, sources)](
        keys.view(torch.int16),
        values.view(torch.int16),
        closed.pages,
        closed.codes,
        sources,
        targets,
        keys[0].numel(),
        values[0].numel(),
        closed.pages[0].numel(),
        **_sizes(closed),
        KEY_DIM=pair.key_dim,
        VALUE_DIM=pair.value_dim,
        KEY_PART=pair.parts[0].bytes,
        STREAMS=pair.streams,
        ROOM=pair.room,
        enable_fp_fusion=False,
    )


def open(
    closed: CodedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `CodedPages.open`."""
    begin = 0
    for pool, part in zip((keys, values), closed.pair.parts, strict=True):
        if len(sources):
            open_pages[_grid(closed, sources)](
                closed.pages,
                closed.tables,
                pool,
                sources,
                targets,
                closed.pages[0].numel(),
                pool[0].numel(),
                **_sizes(closed),
                DIM=part.dim,
                BEGIN=begin,
                KEYS=part.keys,
                ASSEMBLED=isinstance(open_pages, triton.JITFunction),
            )
        begin += part.bytes


def _grid(closed: CodedPages, pages: torch.Tensor) -> tuple[int, int, int]:
    layers, _, heads, blocks, _ = closed.pages.shape
    return len(pages), heads * blocks, layers


def _sizes(closed: CodedPages) -> dict[str, Any]:
    """Constants of all kernels."""
    _, _, heads, blocks, both = closed.pages.shape
    return {"KV_HEADS": heads, "BLOCKS": blocks, "BOTH_TILES": both}
