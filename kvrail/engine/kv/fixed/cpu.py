"""What `FixedPages` does on a CPU."""

from collections.abc import Iterator
from typing import Any

import torch

from kvrail.engine.kv.fixed.cpu_kernels import close_tiles, open_tiles
from kvrail.engine.kv.fixed.form import Tile
from kvrail.engine.kv.fixed.pages import FixedPages, orders


def close(
    closed: FixedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `FixedPages.close`."""
    for plain, pages, place in _pools(closed, keys, values):
        close_tiles(plain, sources.numpy(), pages, targets.numpy(), *place)


def open(
    closed: FixedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `FixedPages.open`."""
    for plain, pages, place in _pools(closed, keys, values):
        open_tiles(pages, sources.numpy(), plain, targets.numpy(), *place)


def _pools(closed: FixedPages, keys: torch.Tensor, values: torch.Tensor) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    """Yield each layer's plain pool of keys, its closed pages and where their tiles lie; and the same for values.

    Tiles of another form are left out.
    """
    layout, begin = closed.layout, 0
    for pool, tile in zip((keys, values), closed.tiles, strict=True):
        if not isinstance(tile, Tile):
            continue
        place = (layout.page_size, layout.num_kv_heads, tile.dim, tile.keys, tile.bits, begin, closed.pages.shape[-1])
        for plain, pages in zip(pool, closed.pages, strict=True):
            bits = plain.view(torch.int16).view(-1).numpy().view("uint16")
            yield bits, pages.view(-1).numpy(), (*place, *orders(tile.dim, tile.keys, tile.bits))
        begin += tile.bytes
