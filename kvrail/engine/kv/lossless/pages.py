"""A pool of closed pages, on one device: see `form` for what a page is made of."""

import copy
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrail.engine.kv.lossless.form import GROUPS, RAW, SLOTS, TOKENS, Tile, base_places, places, supports
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

    @property
    def code_bits(self) -> int:
        """0: of values that are not codes of a fixed width."""
        return 0

    @property
    def lead(self) -> int:
        """0: closed pages come before all others."""
        return 0

    @property
    def orders(self) -> tuple[npt.NDArray[np.int32], ...]:
        """What kernels for CPUs take: places of values and of bases, of keys, then of values."""
        return (*orders(self.key_dim, keys=True), *orders(self.value_dim, keys=False))


class ClosedPages:
    """Closed pages of all layers, and the spare units that their raw tiles take.

    pages: uint8 [layers, num_pages, kv_heads, blocks, bytes of both tiles]; spare: uint8 [units, 64 * the wider dim];
    free: int32 [units + 2], how many units are free, then their numbers, then room for what is dropped.
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
        self.free = torch.arange(-1, num_units + 1, dtype=torch.int32, device=device)
        self.free[0] = num_units

    def layer(self, index: int) -> ClosedLayer:
        """Views of layer `index`."""
        return ClosedLayer(self.pages[index], self.spare, self.layout.key_dim, self.layout.value_dim)

    def of_layers(self, layers: range) -> "ClosedPages":
        """The same pages of some layers, to be opened."""
        part = copy.copy(self)
        part.pages = self.pages[layers.start : layers.stop]
        return part

    def close(
        self, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Close full plain pages `sources` of all layers into pages `targets`, whose spare units return first.

        keys, values: bfloat16 [layers, plain pages, page_size, kv_heads, dim]; sources, targets: int64 [n], on the
        device. Returns how many tiles of each page found no spare unit, int64 [n] on the device. A page with one of
        those cannot be opened.
        """
        self.give_back(targets)
        kernels = self._kernels()
        kernels.close(self, keys, values, sources, targets)
        *units, failed = self._take_units(targets)
        kernels.keep_raw(self, keys, values, sources, targets, units)
        return failed

    def open(self, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Open closed pages `sources` of all layers into plain pages `targets` of `keys` and `values`: see `close`."""
        self._kernels().open(self, keys, values, sources, targets)

    def give_back(self, pages: torch.Tensor) -> None:
        """Have the spare units of these pages be free again. pages: int64 [n]; none of them is opened any more."""
        words = [each.index_select(1, pages) for each in self._words(2)]
        units = torch.stack([each[..., 1] for each in words])
        held = torch.stack([each[..., 0] & RAW for each in words]).ne(0) & units.ne(-1)
        place = self.free[0] + held.flatten().cumsum(0)
        last = len(self.free) - 1
        self.free.index_copy_(0, torch.where(held.flatten(), place, last), units.flatten())
        self.free[:1] += held.sum().int()
        for each in self._words(GROUPS * SLOTS):
            each.index_fill_(1, pages, 0)

    def _take_units(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Spare units for raw tiles of keys and of values, -1: not raw, or none was left; how many of a page got none.

        Units: int32 [layers, pages, kv_heads, blocks].
        """
        raw = torch.stack([each[..., 0].index_select(1, pages) & RAW for each in self._words(2)]).ne(0)
        place = self.free[0] - raw.flatten().cumsum(0).view_as(raw) + 1
        got = raw & (place > 0)
        units = torch.where(got, self.free[place.clamp(min=0)], -1)
        self.free[:1] -= got.sum().int()
        return units[0].contiguous(), units[1].contiguous(), (raw & ~got).sum((0, 1, 3, 4))

    def _words(self, count: int) -> list[torch.Tensor]:
        """The first words of escapes of tiles of keys, then of values: int32 [layers, pages, heads, blocks, count]."""
        key, value = Tile(self.layout.key_dim), Tile(self.layout.value_dim)
        words = self.pages.view(torch.int32)
        return [words[..., at // 4 : at // 4 + count] for at in (key.escapes, key.bytes + value.escapes)]

    def _kernels(self) -> Any:
        """The module of the device's kernels."""
        if self.pages.is_cuda:
            from kvrail.engine.kv.lossless import cuda  # needs triton, which a CPU worker does not

            return cuda
        from kvrail.engine.kv.lossless import cpu  # compiles kernels, which a CUDA worker does not need

        return cpu


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
