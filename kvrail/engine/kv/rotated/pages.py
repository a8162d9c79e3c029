"""A pool of closed pages whose values are rotated, on one device: see `form`."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvrail.engine.kv.fixed import form as fixed
from kvrail.engine.kv.fixed.pages import FixedLayer, FixedPages, orders
from kvrail.engine.kv.lossless.form import TOKENS
from kvrail.engine.kv.rotated.form import KEY_BITS, Tile, code_places
from kvrail.values.layout import KVLayout


@dataclass(frozen=True, slots=True)
class RotatedLayer(FixedLayer):
    """One layer's closed pages; views, not copies."""

    @property
    def tiles(self) -> tuple[int, int]:
        """Bytes of a tile of keys, and of both tiles."""
        return tiles(self.key_dim, self.value_dim)[0].bytes, self.pages.shape[3]

    @property
    def orders(self) -> tuple[npt.NDArray[np.int32], ...]:
        """What kernels for CPUs take: places of codes and of rows, of keys, then of codes of values."""
        places = code_order(self.value_dim)
        return (*orders(self.key_dim, True, KEY_BITS), places, places)


class RotatedPages(FixedPages):
    """Closed pages of all layers: see FixedPages."""

    @property
    def tiles(self) -> tuple[fixed.Tile, Tile]:
        """The form of a tile of keys, and of one of values."""
        return tiles(self.layout.key_dim, self.layout.value_dim)

    def layer(self, index: int) -> RotatedLayer:
        """Views of layer `index`."""
        layout = self.layout
        return RotatedLayer(self.pages[index], layout.key_dim, layout.value_dim, self.bits, layout.page_size)

    def _kernels(self) -> Any:
        """The module of the device's kernels."""
        if self.pages.is_cuda:
            from kvrail.engine.kv.rotated import cuda  # needs triton, which a CPU worker does not

            return cuda
        from kvrail.engine.kv.rotated import cpu  # compiles kernels, which a CUDA worker does not need

        return cpu


def tiles(key_dim: int, value_dim: int) -> tuple[fixed.Tile, Tile]:
    """The form of a tile of keys, and of one of values."""
    return fixed.Tile(key_dim, True, KEY_BITS), Tile(value_dim)


def page_bytes(layout: KVLayout) -> int:
    """Bytes of a closed page over all layers."""
    pairs = layout.num_layers * layout.num_kv_heads * (layout.page_size // TOKENS)
    return pairs * sum(tile.bytes for tile in tiles(layout.key_dim, layout.value_dim))


@functools.cache
def code_order(dim: int) -> npt.NDArray[np.int32]:
    """`form.code_places` as kernels for CPUs take it."""
    return code_places(dim).astype(np.int32)
