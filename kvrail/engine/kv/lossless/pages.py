"""A pool of closed pages, on one device: see `form` for what a page is made of."""

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvrail.engine.kv.lossless.form import TOKENS, Tile, base_places, places, supports
from kvrail.errors import ConfigError
from kvrail.values.layout import KVLayout


@dataclass(frozen=True, slots=True)
class ClosedLayer:
    """One layer's closed pages; views, not copies.

    pages: uint8 [pages, kv_heads, blocks of 64 tokens, bytes of a tile of keys and one of values]; spare: uint8
    [units, bytes of a unit], shared by all layers.
    """

    pages: torch.Tensor
    spare: torch.Tensor
    key_dim: int
    value_dim: int

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """What kernels take: pages, spare units, bytes of a unit."""
        return self.pages, self.spare, self.spare.shape[1]

    @property
    def tiles(self) -> tuple[int, int]:
        """Bytes of a tile of keys, and of both tiles."""
        return Tile(self.key_dim).bytes, self.pages.shape[3]


class ClosedPages:
    """Closed pages of all layers, and the spare units that their raw tiles take.

    pages: uint8 [layers, num_pages, kv_heads, blocks, bytes of both tiles]; spare: uint8 [units, 64 * the wider dim];
    free: int32 [1 + units], how many units are free, then their numbers.
    """

    def __init__(self, layout: KVLayout, num_pages: int, num_units: int, device: torch.device | str) -> None:
        """Raises ConfigError where pages of `layout` have no closed form."""
        if why := unsupported(layout):
            raise ConfigError(why)
        self.layout = layout
        blocks = layout.page_size // TOKENS
        shape = (layout.num_layers, num_pages, layout.num_kv_heads, blocks, pair_bytes(layout))
        self.pages = torch.zeros(shape, dtype=torch.uint8, device=device)
        unit = TOKENS * max(layout.key_dim, layout.value_dim)
        self.spare = torch.zeros(max(num_units, 1), unit, dtype=torch.uint8, device=device)
        self.free = torch.arange(-1, num_units, dtype=torch.int32, device=device)
        self.free[0] = num_units

    def layer(self, index: int) -> ClosedLayer:
        """Views of layer `index`."""
        return ClosedLayer(self.pages[index], self.spare, self.layout.key_dim, self.layout.value_dim)

    def close(
        self, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Close full plain pages `sources` of all layers into pages `targets`, whose spare units return first.

        keys, values: bfloat16 [layers, plain pages, page_size, kv_heads, dim]; sources, targets: int64 [n]. Returns
        int32 [1] on the device: how many tiles found no spare unit. Pages that hold one of those cannot be opened.
        """
        self.give_back(targets)
        if self.pages.is_cuda:
            from kvrail.engine.kv.lossless import cuda  # needs triton, which a CPU worker does not

            return cuda.close(self, keys, values, sources, targets)
        from kvrail.engine.kv.lossless import cpu  # compiles kernels, which a CUDA worker does not need

        return cpu.close(self, keys, values, sources, targets)

    def open(self, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Open closed pages `sources` of all layers into plain pages `targets` of `keys` and `values`: see `close`."""
        if self.pages.is_cuda:
            from kvrail.engine.kv.lossless import cuda

            cuda.open(self, keys, values, sources, targets)
            return
        from kvrail.engine.kv.lossless import cpu

        cpu.open(self, keys, values, sources, targets)

    def give_back(self, pages: torch.Tensor) -> None:
        """Have the spare units of these pages be free again. pages: int64 [n]; none of them is opened any more."""
        if self.pages.is_cuda:
            from kvrail.engine.kv.lossless import cuda

            cuda.give_back(self, pages)
            return
        from kvrail.engine.kv.lossless import cpu

        cpu.give_back(self, pages)


def unsupported(layout: KVLayout) -> str:
    """Why pages of `layout` have no closed form; empty where they have one."""
    for name, dim in (("keys", layout.key_dim), ("values", layout.value_dim)):
        if not supports(dim, layout.dtype):
            return f"{name} of {dim} {layout.dtype} a head have no lossless form: it is for bfloat16, multiples of 64"
    if layout.page_size % TOKENS:
        return f"page_size {layout.page_size}: lossless pages hold multiples of {TOKENS} tokens"
    return ""


def pair_bytes(layout: KVLayout) -> int:
    """Bytes of a tile of keys and one of values."""
    return Tile(layout.key_dim).bytes + Tile(layout.value_dim).bytes


def page_bytes(layout: KVLayout) -> int:
    """Bytes of a closed page over all layers, without spare units."""
    return layout.num_layers * layout.num_kv_heads * (layout.page_size // TOKENS) * pair_bytes(layout)


@functools.cache
def orders(dim: int, keys: bool) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """`form.places` and `form.base_places` as kernels take them."""
    return places(dim, keys).astype(np.int32), base_places(dim, keys).astype(np.int32)
