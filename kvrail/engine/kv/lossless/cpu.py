"""What `ClosedPages` does on a CPU."""

from collections.abc import Iterator
from typing import Any

import torch

from kvrail.engine.kv.lossless.cpu_kernels import close_tiles, keep_raw_tiles, open_tiles
from kvrail.engine.kv.lossless.form import Tile
from kvrail.engine.kv.lossless.pages import ClosedPages, orders, pair_bytes


def close(
    closed: ClosedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """Fill tiles; raw ones have no spare unit yet. See `ClosedPages.close`."""
    for layer in range(len(keys)):
        for pool, place in _kinds(closed, keys, values):
            close_tiles(_bits(pool[layer]), sources.numpy(), _flat(closed.pages[layer]), targets.numpy(), *place[:-2])


def keep_raw(
    closed: ClosedPages,
    keys: torch.Tensor,
    values: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    units: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Store raw tiles' high bytes. units: those of tiles of keys and of values, see `ClosedPages._take_units`."""
    for layer in range(len(keys)):
        for (pool, place), taken in zip(_kinds(closed, keys, values), units, strict=True):
            keep_raw_tiles(
                _bits(pool[layer]), sources.numpy(), _flat(closed.pages[layer]), targets.numpy(), *place,
                _flat(taken[layer]),
            )  # fmt: skip


def open(
    closed: ClosedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `ClosedPages.open`."""
    for layer in range(len(keys)):
        for pool, place in _kinds(closed, keys, values):
            open_tiles(_flat(closed.pages[layer]), sources.numpy(), _bits(pool[layer]), targets.numpy(), *place)


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
