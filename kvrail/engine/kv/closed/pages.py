"""Pools of closed pages on one device: see `form` of each form for what a page is made of."""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrail.engine.kv.closed import forms
from kvrail.engine.kv.format import zeroed
from kvrail.engine.kv.kvcomp.form import CODED, reading_tables, writing_tables
from kvrail.engine.kv.lossless.form import GROUPS, RAW, SLOTS, TOKENS, Tile
from kvrail.errors import ConfigError
from kvrail.values.layout import KVLayout


@dataclass(frozen=True, slots=True)
class ClosedLayer:
    """One layer's closed pages; views, not copies.

    pages: uint8 [pages, kv_heads, blocks of 64 tokens, bytes of a tile of keys and one of values]; shared: what all
    layers share: spare units of lossless pages, uint8 [units, bytes], or tables of codes; None where there is nothing.
    code_bits: see `forms.FORMS`.
    """

    pages: torch.Tensor
    shared: torch.Tensor | None
    key_dim: int
    value_dim: int
    code_bits: int

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """What kernels take: pages, spare units or tables of codes, bytes of a unit."""
        units = 0 if self.code_bits or self.shared is None else self.shared.shape[1]
        return self.pages, self.shared, units

    @property
    def tiles(self) -> tuple[int, int]:
        """Bytes of a tile of keys, and of both tiles."""
        return forms.tiles(self.key_dim, self.value_dim, self.code_bits)[0].bytes, self.pages.shape[3]

    @property
    def lead(self) -> int:
        """Tokens at a sequence's beginning that lie in open pages though closed ones follow: a page in lossy forms."""
        return self.pages.shape[2] * TOKENS if self.code_bits else 0

    @property
    def orders(self) -> tuple[npt.NDArray[np.int32], ...]:
        """What kernels for CPUs take: see `forms.orders`, of keys, then of values."""
        key, value = forms.tiles(self.key_dim, self.value_dim, self.code_bits)
        return (*forms.orders(key, True), *forms.orders(value, False))


class ClosedPages(ABC):
    """Closed pages of all layers.

    pages: uint8 [layers, num_pages, kv_heads, blocks, bytes of both tiles]; shared: see ClosedLayer.
    """

    shared: torch.Tensor | None = None

    def __init__(self, layout: KVLayout, num_pages: int, bits: int, device: torch.device | str) -> None:
        """bits: see `forms.FORMS`. Raises ConfigError where pages of `layout` have no such form."""
        if why := forms.unsupported(layout, bits):
            raise ConfigError(why)
        self.layout, self.bits = layout, bits
        self.tiles: tuple[Any, Any] = forms.tiles(layout.key_dim, layout.value_dim, bits)
        pair = forms.pair_bytes(layout.key_dim, layout.value_dim, bits)
        shape = (layout.num_layers, num_pages, layout.num_kv_heads, layout.page_size // TOKENS, pair)
        self.pages = zeroed(shape, torch.uint8, device)
        if not self.pages.is_cuda:
            self._kernels().prepare(self)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What attention reads of the pool, by name."""
        return {"closed": self.pages} if self.shared is None else {"closed": self.pages, "shared": self.shared}

    def layer(self, index: int) -> ClosedLayer:
        """Views of layer `index`."""
        return ClosedLayer(self.pages[index], self.shared, self.layout.key_dim, self.layout.value_dim, self.bits)

    @abstractmethod
    def close(
        self, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Close full plain pages `sources` of all layers into pages `targets`.

        keys, values: bfloat16 [layers, plain pages, page_size, kv_heads, dim]; sources, targets: int64 [n], on the
        device. Returns how many tiles of each page could not be closed, int64 [n] on the device. A page with one of
        those must stay open: a lossless one cannot be opened, a lossy one gives NaN.
        """

    def open(self, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Open closed pages `sources` of all layers into plain pages `targets` of `keys` and `values`: see `close`."""
        self._kernels().open(self, keys, values, sources, targets)

    def _kernels(self) -> Any:
        """The module of the device's kernels."""
        if self.pages.is_cuda:
            from kvrail.engine.kv.closed import cuda  # needs triton, which a CPU worker does not

            return cuda
        from kvrail.engine.kv.closed import cpu  # needs numba, which a CUDA worker does not

        return cpu


class LosslessPages(ClosedPages):
    """Pages that keep every bit, and the spare units that their raw tiles take.

    shared: uint8 [units, 64 * the wider dim]; free: int32 [units + 2], how many units are free, then their numbers,
    then room for what is dropped.
    """

    shared: torch.Tensor

    def __init__(self, layout: KVLayout, num_pages: int, num_units: int, device: torch.device | str) -> None:
        super().__init__(layout, num_pages, 0, device)
        unit = TOKENS * max(layout.key_dim, layout.value_dim)
        self.shared = zeroed((max(num_units, 1), unit), torch.uint8, device)
        self.free = torch.arange(-1, num_units + 1, dtype=torch.int32, device=device)
        self.free[0] = num_units

    def of_layers(self, layers: range) -> "LosslessPages":
        """The same pages of some layers, to be opened."""
        part = copy.copy(self)
        part.pages = self.pages[layers.start : layers.stop]
        return part

    def close(
        self, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """See ClosedPages. The spare units of `targets` return first; a tile fails that is raw and finds none."""
        self.give_back(targets)
        kernels = self._kernels()
        kernels.close(self, keys, values, sources, targets)
        *units, failed = self._take_units(targets)
        kernels.keep_raw(self, keys, values, sources, targets, units)
        return failed

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


class LossyPages(ClosedPages):
    """Pages whose closing loses bits. shared, codes: of CODED ones `form.reading_tables` and `form.writing_tables`."""

    def __init__(self, layout: KVLayout, num_pages: int, bits: int, device: torch.device | str) -> None:
        super().__init__(layout, num_pages, bits, device)
        if bits == CODED:
            self.shared = torch.from_numpy(reading_tables().copy()).to(device)
            self.codes = torch.from_numpy(writing_tables().view(np.int16).copy()).to(device)

    def close(
        self, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """See ClosedPages. A tile fails that its form refuses.

        Reads these pages alone, by numbers that are on the device: an index that is a list would wait for all work
        before it.
        """
        self._kernels().close(self, keys, values, sources, targets)
        key, value = self.tiles
        words, (first, mark), (second, other) = self.pages.view(torch.int16), key.mark, value.mark
        marks = ((first, mark), (key.bytes + second, other))
        found = [words[..., at // 2].index_select(1, targets).eq(number) for at, number in marks]
        return torch.stack(found).sum((0, 1, 3, 4))
