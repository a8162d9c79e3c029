"""What `ClosedPages` does on a CPU."""

from collections.abc import Iterator
from typing import Any

import torch

from kvrail.engine.kv.lossless.cpu_kernels import close_tiles, give_back_units, open_tiles
from kvrail.engine.kv.lossless.form import Tile
from kvrail.engine.kv.lossless.pages import ClosedPages, orders, pair_bytes


def close(
    closed: ClosedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """See `ClosedPages.close`."""
    failed = 0
    for layer in range(len(keys)):
        for pool, place in _kinds(closed, keys, values):
            failed += close_tiles(
                _bits(pool[layer]), sources.numpy(), _flat(closed.pages[layer]), targets.numpy(), *place,
                closed.free.numpy(),
            )  # fmt: skip
    return torch.tensor([failed], dtype=torch.int32)


def open(
    closed: ClosedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `ClosedPages.open`."""
    for layer in range(len(keys)):
        for pool, place in _kinds(closed, keys, values):
            open_tiles(_flat(closed.pages[layer]), sources.numpy(), _bits(pool[layer]), targets.numpy(), *place)


def give_back(closed: ClosedPages, pages: torch.Tensor) -> None:
    """See `ClosedPages.give_back`."""
    layout = closed.layout
    for layer in closed.pages:
        give_back_units(
            _flat(layer), pages.numpy(), layer.shape[1] * layer.shape[2], layer.shape[3], layout.key_dim,
            layout.value_dim, Tile(layout.key_dim).bytes, closed.free.numpy(),
        )  # fmt: skip


def _kinds(
    closed: ClosedPages, keys: torch.Tensor, values: torch.Tensor
) -> Iterator[tuple[torch.Tensor, tuple[Any, ...]]]:
    """The plain pool of keys, then that of values, each with what kernels take to find its tiles."""
    layout = closed.layout
    for pool, dim, begin in ((keys, layout.key_dim, 0), (values, layout.value_dim, Tile(layout.key_dim).bytes)):
        shape = (layout.page_size, layout.num_kv_heads, dim, begin, pair_bytes(layout))
        yield pool, (*shape, *orders(dim, not begin), _flat(closed.spare), closed.spare.shape[1])


def _bits(pool: torch.Tensor) -> Any:
    return pool.view(torch.int16).view(-1).numpy().view("uint16")


def _flat(data: torch.Tensor) -> Any:
    return data.view(-1).numpy()
