"""What `RotatedPages` does on a CPU."""

from collections.abc import Iterator
from typing import Any

import torch

from kvrail.engine.kv.fixed import cpu as fixed
from kvrail.engine.kv.rotated.cpu_kernels import close_tiles, open_tiles
from kvrail.engine.kv.rotated.pages import RotatedPages, code_order


def close(
    closed: RotatedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `FixedPages.close`."""
    fixed.close(closed, keys, values, sources, targets)
    for plain, pages, place in _values(closed, values):
        close_tiles(plain, sources.numpy(), pages, targets.numpy(), *place)


def open(
    closed: RotatedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `FixedPages.open`."""
    fixed.open(closed, keys, values, sources, targets)
    for plain, pages, place in _values(closed, values):
        open_tiles(pages, sources.numpy(), plain, targets.numpy(), *place)


def _values(closed: RotatedPages, values: torch.Tensor) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    """Yield each layer's plain pool of values, its closed pages and where their tiles lie."""
    (key, value), layout = closed.tiles, closed.layout
    place = (layout.page_size, layout.num_kv_heads, value.dim, key.bytes, closed.pages.shape[-1], code_order(value.dim))
    for plain, pages in zip(values, closed.pages, strict=True):
        yield plain.view(torch.int16).view(-1).numpy().view("uint16"), pages.view(-1).numpy(), place
