"""What `ClosedPages` does on CUDA: launches on the current stream, whose shapes depend on no page's content."""

from collections.abc import Iterator
from typing import Any

import torch
import triton

from kvrail.engine.kv.closed.forms import Tile
from kvrail.engine.kv.closed.pages import ClosedPages, LosslessPages
from kvrail.engine.kv.fixed import close_kernel as fixed_closing
from kvrail.engine.kv.fixed import open_kernel as fixed_opening
from kvrail.engine.kv.fixed.form import Tile as FixedTile
from kvrail.engine.kv.kvcomp import close_kernel as coded_closing
from kvrail.engine.kv.kvcomp import open_kernel as coded_opening
from kvrail.engine.kv.kvcomp.form import CODED, Pair, Part
from kvrail.engine.kv.lossless import close_kernel as lossless_closing
from kvrail.engine.kv.lossless import open_kernel as lossless_opening
from kvrail.engine.kv.lossless.form import Tile as LosslessTile
from kvrail.engine.kv.rotated import close_kernel as rotated_closing
from kvrail.engine.kv.rotated import open_kernel as rotated_opening
from kvrail.engine.kv.rotated.form import Tile as RotatedTile

_ASSEMBLED = isinstance(lossless_opening.open_pages, triton.JITFunction)
_CLOSE: dict[type[Tile], Any] = {
    LosslessTile: lossless_closing.close_pages,
    FixedTile: fixed_closing.close_pages,
    RotatedTile: rotated_closing.close_pages,
}
_OPEN: dict[type[Tile], Any] = {
    LosslessTile: lossless_opening.open_pages,
    FixedTile: fixed_opening.open_pages,
    RotatedTile: rotated_opening.open_pages,
    Part: coded_opening.open_pages,
}


def close(
    closed: ClosedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `ClosedPages.close`; raw tiles have no spare unit yet."""
    if closed.bits == CODED:
        return _close_pairs(closed, keys, values, sources, targets)
    for pool, tile, constants in _tiles(closed, keys, values):
        options = {"enable_fp_fusion": False} if closed.bits else {"ASSEMBLED": _ASSEMBLED}
        layers = (pool[0].numel(), closed.pages[0].numel())
        given = (pool.view(torch.int16), closed.pages, sources, targets, *layers)
        _launch(_CLOSE[type(tile)], closed, sources, *given, **constants, **options)


def keep_raw(
    closed: LosslessPages,
    keys: torch.Tensor,
    values: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    units: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Store raw tiles' high bytes. units: those of tiles of keys and of values, see `LosslessPages._take_units`."""
    for (pool, _, constants), taken in zip(_tiles(closed, keys, values), units, strict=True):
        sizes = (pool[0].numel(), closed.pages[0].numel(), closed.shared.shape[1])
        given = (pool.view(torch.int16), closed.pages, closed.shared, taken, sources, targets, *sizes)
        _launch(lossless_closing.keep_raw, closed, sources, *given, **constants, ASSEMBLED=_ASSEMBLED)


def open(
    closed: ClosedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `ClosedPages.open`."""
    shared = () if closed.shared is None else (closed.shared,)
    for pool, tile, constants in _tiles(closed, keys, values):
        unit = (closed.shared.shape[1],) if isinstance(closed, LosslessPages) else ()
        layers = (closed.pages[0].numel(), pool[0].numel())
        given = (closed.pages, *shared, pool, sources, targets, *layers, *unit)
        _launch(_OPEN[type(tile)], closed, sources, *given, **constants, ASSEMBLED=_ASSEMBLED)


def _close_pairs(
    closed: Any, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """Close CODED pages, whose keys' codes depend on their values'."""
    pair = Pair(keys.shape[4], values.shape[4])
    layers = (keys[0].numel(), values[0].numel(), closed.pages[0].numel())
    plain = (keys.view(torch.int16), values.view(torch.int16))
    _launch(
        coded_closing.close_pages, closed, sources, *plain, closed.pages, closed.codes, sources, targets, *layers,
        KEY_DIM=pair.key_dim, VALUE_DIM=pair.value_dim, KEY_PART=pair.parts[0].bytes, STREAMS=pair.streams,
        ROOM=pair.room, enable_fp_fusion=False,
    )  # fmt: skip


def _launch(kernel: Any, closed: ClosedPages, pages: torch.Tensor, *given: object, **constants: int) -> None:
    """Launch a program for each head and block of these pages of each layer; nothing where there are no pages."""
    layers, _, heads, blocks, both = closed.pages.shape
    if len(pages):
        grid = (len(pages), heads * blocks, layers)
        kernel[grid](*given, KV_HEADS=heads, BLOCKS=blocks, BOTH_TILES=both, **constants)


def _tiles(
    closed: ClosedPages, keys: torch.Tensor, values: torch.Tensor
) -> Iterator[tuple[torch.Tensor, Tile, dict[str, int]]]:
    """Yield the pool of keys, the form of its tiles and its kernels' constants; and the same of values."""
    begin = 0
    for pool, tile in zip((keys, values), closed.tiles, strict=True):
        constants = {"DIM": tile.dim, "BEGIN": begin}
        if not isinstance(tile, RotatedTile):
            constants["KEYS"] = not begin
        if isinstance(tile, FixedTile):
            constants["BITS"] = tile.bits
        yield pool, tile, constants
        begin += tile.bytes
