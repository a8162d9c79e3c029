"""What `ClosedPages` does on a CPU."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from kvrail.codec.core.cpu_compile import compile_now
from kvrail.engine.kv.closed.forms import Tile, orders
from kvrail.engine.kv.closed.pages import ClosedPages, LosslessPages
from kvrail.engine.kv.fixed import cpu_kernels as fixed
from kvrail.engine.kv.fixed.form import Tile as FixedTile
from kvrail.engine.kv.kvcomp import cpu_kernels as coded
from kvrail.engine.kv.kvcomp.form import CODED, KEYS, VALUES, Pair, Part, share
from kvrail.engine.kv.lossless import cpu_kernels as lossless
from kvrail.engine.kv.lossless.form import Tile as LosslessTile
from kvrail.engine.kv.rotated import cpu_kernels as rotated
from kvrail.engine.kv.rotated.form import Tile as RotatedTile

_KERNELS: dict[type[Tile], Any] = {LosslessTile: lossless, FixedTile: fixed, RotatedTile: rotated, Part: coded}
_SHARES = np.array([share(code) for code in (*KEYS, *VALUES)], np.float32)
_TOPS = np.array([code.top for code in (*KEYS, *VALUES)], np.float32)


def prepare(closed: ClosedPages) -> None:
    """Compile what closes and opens such pages, before a request waits for it."""
    for tile in closed.tiles:
        compile_now(_KERNELS[type(tile)])


def close(
    closed: ClosedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `ClosedPages.close`; raw tiles have no spare unit yet."""
    if closed.bits == CODED:
        return _close_pairs(closed, keys, values, sources, targets)
    for pool, tile, place in _tiles(closed, keys, values):
        kind = (tile.keys, tile.bits) if isinstance(tile, FixedTile) else ()
        for plain, pages in zip(pool, closed.pages, strict=True):
            _KERNELS[type(tile)].close_tiles(
                _bits(plain), sources.numpy(), _flat(pages), targets.numpy(), *place, *kind
            )


def keep_raw(
    closed: LosslessPages,
    keys: torch.Tensor,
    values: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    units: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Store raw tiles' high bytes. units: those of tiles of keys and of values, see `LosslessPages._take_units`."""
    spare = (_flat(closed.shared), closed.shared.shape[1])
    for (pool, _, place), taken in zip(_tiles(closed, keys, values), units, strict=True):
        for plain, pages, numbers in zip(pool, closed.pages, taken, strict=True):
            moved = (_bits(plain), sources.numpy(), _flat(pages), targets.numpy())
            lossless.keep_raw_tiles(*moved, *place, *spare, _flat(numbers))


def open(
    closed: ClosedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `ClosedPages.open`."""
    for pool, tile, place in _tiles(closed, keys, values):
        kind: tuple[Any, ...] = ()
        if isinstance(tile, FixedTile):
            kind = (tile.keys, tile.bits)
        elif closed.shared is not None:
            shared = _flat(closed.shared)
            kind = (tile.keys, shared) if isinstance(tile, Part) else (shared, closed.shared.shape[1])
        for plain, pages in zip(pool, closed.pages, strict=True):
            _KERNELS[type(tile)].open_tiles(_flat(pages), sources.numpy(), _bits(plain), targets.numpy(), *place, *kind)


def _close_pairs(
    closed: Any, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """Close CODED pages, whose keys' codes depend on their values'."""
    layout, (key, value), pair = closed.layout, closed.tiles, Pair(keys.shape[4], values.shape[4])
    sizes = (layout.page_size, layout.num_kv_heads, pair.key_dim, pair.value_dim, *orders(key, True))
    codes = (*orders(value, False), _SHARES, _TOPS, closed.codes.view(-1).numpy().view(np.uint16))
    for *plain, pages in zip(keys, values, closed.pages, strict=True):
        ids = (sources.numpy(), _flat(pages), targets.numpy())
        coded.close_pairs(*map(_bits, plain), *ids, *sizes, *codes, pair.bytes, pair.room)


def _tiles(
    closed: ClosedPages, keys: torch.Tensor, values: torch.Tensor
) -> Iterator[tuple[torch.Tensor, Tile, tuple[Any, ...]]]:
    """Yield the pool of keys, the form of its tiles and where kernels find them; and the same of values."""
    layout, begin = closed.layout, 0
    for pool, tile in zip((keys, values), closed.tiles, strict=True):
        sizes = (layout.page_size, layout.num_kv_heads, tile.dim, begin, closed.pages.shape[-1])
        yield pool, tile, (*sizes, *orders(tile, not begin))
        begin += tile.bytes


def _bits(plain: torch.Tensor) -> Any:
    return plain.view(torch.int16).view(-1).numpy().view(np.uint16)


def _flat(data: torch.Tensor) -> Any:
    return data.view(-1).numpy()
