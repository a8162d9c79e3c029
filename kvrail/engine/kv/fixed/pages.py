"""A pool of closed pages of fixed width, on one device: see `form` for what a page is made of."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrail.engine.kv.fixed.form import Tile, code_places, row_places
from kvrail.engine.kv.lossless.form import TOKENS, supports
from kvrail.errors import ConfigError
from kvrail.values.layout import KVLayout


@dataclass(frozen=True, slots=True)
class FixedLayer:
    """One layer's closed pages; views, not copies.

    pages: uint8 [pages, kv_heads, blocks of 64 tokens, bytes of a tile of keys and one of values]. lead: tokens at a
    sequence's beginning that lie in open pages though closed ones follow.
    """

    pages: torch.Tensor
    key_dim: int
    value_dim: int
    code_bits: int
    lead: int

    @property
    def arguments(self) -> tuple[torch.Tensor, None, int]:
        """What kernels take: pages, and no spare units."""
        return self.pages, None, 0

    @property
    def tiles(self) -> tuple[int, int]:
        """Bytes of a tile of keys, and of both tiles."""
        return Tile(self.key_dim, True, self.code_bits).bytes, self.pages.shape[3]

    @property
    def orders(self) -> tuple[npt.NDArray[np.int32], ...]:
        """What kernels for CPUs take: places of codes and of rows, of keys, then of values."""
        return (*orders(self.key_dim, True, self.code_bits), *orders(self.value_dim, False, self.code_bits))


class FixedPages:
    """Closed pages of all layers.

    pages: uint8 [layers, num_pages, kv_heads, blocks, bytes of both tiles].
    """

    def __init__(self, layout: KVLayout, num_pages: int, bits: int, device: torch.device | str) -> None:
        """bits: of a value, see WIDTHS. Raises ConfigError where pages of `layout` have no such form."""
        if why := unsupported(layout):
            raise ConfigError(why)
        self.layout, self.bits = layout, bits
        blocks = layout.page_size // TOKENS
        shape = (layout.num_layers, num_pages, layout.num_kv_heads, blocks, sum(tile.bytes for tile in self.tiles))
        self.pages = torch.zeros(shape, dtype=torch.uint8, device=device)

    @property
    def tiles(self) -> tuple[Any, Any]:
        """The form of a tile of keys, and of one of values: each a Tile here."""
        return tiles(self.layout, self.bits)

    def layer(self, index: int) -> FixedLayer:
        """Views of layer `index`."""
        layout = self.layout
        return FixedLayer(self.pages[index], layout.key_dim, layout.value_dim, self.bits, layout.page_size)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What attention reads of the pool, by name."""
        return {"closed": self.pages}

    def close(
        self, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Close full plain pages `sources` of all layers into pages `targets`.

        keys, values: bfloat16 [layers, plain pages, page_size, kv_heads, dim]; sources, targets: int64 [n], on the
        device. Returns how many tiles of each page were refused, int64 [n] on the device. A page with one of those must
        stay open: opened, it gives NaN.
        """
        self._kernels().close(self, keys, values, sources, targets)
        key, value = self.tiles
        at, mark = value.mark
        return refused_tiles(self.pages, (key.mark, (key.bytes + at, mark)), targets)

    def open(self, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Open closed pages `sources` of all layers into plain pages `targets` of `keys` and `values`: see `close`."""
        self._kernels().open(self, keys, values, sources, targets)

    def _kernels(self) -> Any:
        """The module of the device's kernels."""
        if self.pages.is_cuda:
            from kvrail.engine.kv.fixed import cuda  # needs triton, which a CPU worker does not

            return cuda
        from kvrail.engine.kv.fixed import cpu  # compiles kernels, which a CUDA worker does not need

        return cpu


def refused_tiles(pages: torch.Tensor, marks: Sequence[tuple[int, int]], targets: torch.Tensor) -> torch.Tensor:
    """How many tiles of each page of `targets` were refused: see `FixedPages.close`.

    pages: uint8 [layers, num_pages, kv_heads, blocks, bytes]; marks: of keys and of values, where 16 bits say so, and
    by which number. Reads these pages alone, by numbers that are on the device: an index that is a list would wait for
    all work before it.
    """
    words = pages.view(torch.int16)
    found = [words[..., at // 2].index_select(1, targets).eq(mark) for at, mark in marks]
    return torch.stack(found).sum((0, 1, 3, 4))


def tiles(layout: KVLayout, bits: int) -> tuple[Tile, Tile]:
    """The form of a tile of keys, and of one of values."""
    return Tile(layout.key_dim, True, bits), Tile(layout.value_dim, False, bits)


def unsupported(layout: KVLayout) -> str:
    """Why pages of `layout` have no closed form of fixed width; empty where they have one."""
    for name, dim in (("keys", layout.key_dim), ("values", layout.value_dim)):
        if not supports(dim, layout.dtype):
            return (
                f"{name} of {dim} {layout.dtype} a head have no int8, int4 or rot3 form: it is for bfloat16, multiples"
                " of 64"
            )
    if layout.page_size % TOKENS:
        return f"page_size {layout.page_size}: int8, int4 and rot3 pages hold multiples of {TOKENS} tokens"
    return ""


def page_bytes(layout: KVLayout, bits: int) -> int:
    """Bytes of a closed page over all layers."""
    pairs = layout.num_layers * layout.num_kv_heads * (layout.page_size // TOKENS)
    return pairs * sum(tile.bytes for tile in tiles(layout, bits))


@functools.cache
def orders(dim: int, keys: bool, bits: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """`form.code_places` and `form.row_places` as kernels for CPUs take them."""
    tile = Tile(dim, keys, bits)
    return code_places(tile).astype(np.int32), row_places(tile).astype(np.int32)
