"""A pool of closed pages in KVComp's form, on one device: see `form` for what a page is made of."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrail.engine.kv.fixed.form import NO_SCALE
from kvrail.engine.kv.fixed.pages import refused_tiles
from kvrail.engine.kv.kvcomp.form import CODED, Pair, reading_tables, stream_places, writing_tables
from kvrail.engine.kv.lossless.form import TOKENS, base_places, supports
from kvrail.errors import ConfigError
from kvrail.values.layout import KVLayout


@dataclass(frozen=True, slots=True)
class CodedLayer:
    """One layer's closed pages; views, not copies.

    pages: uint8 [pages, kv_heads, blocks of 64 tokens, bytes of a pair]; tables: `form.reading_tables`, shared by all
    layers. lead: tokens at a sequence's beginning that lie in open pages though closed ones follow.
    """

    pages: torch.Tensor
    tables: torch.Tensor
    key_dim: int
    value_dim: int
    lead: int

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """What kernels take: pages, tables, and no spare units."""
        return self.pages, self.tables, 0

    @property
    def tiles(self) -> tuple[int, int]:
        """Bytes of the keys' part, and of a pair."""
        return Pair(self.key_dim, self.value_dim).parts[0].bytes, self.pages.shape[3]

    @property
    def code_bits(self) -> int:
        """CODED: of values whose codes have different lengths."""
        return CODED

    @property
    def orders(self) -> tuple[npt.NDArray[np.int32], ...]:
        """What kernels for CPUs take: places of symbols and of rows, of keys, then of values."""
        return (*orders(self.key_dim, True), *orders(self.value_dim, False))


class CodedPages:
    """Closed pages of all layers.

    pages: uint8 [layers, num_pages, kv_heads, blocks, bytes of a pair]; tables: `form.reading_tables`; codes:
    `form.writing_tables`.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device | str) -> None:
        """Raises ConfigError where pages of `layout` have no such form."""
        if why := unsupported(layout):
            raise ConfigError(why)
        self.layout, self.pair = layout, Pair(layout.key_dim, layout.value_dim)
        shape = (layout.num_layers, num_pages, layout.num_kv_heads, layout.page_size // TOKENS, self.pair.bytes)
        self.pages = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.tables = torch.from_numpy(reading_tables().copy()).to(device)
        self.codes = torch.from_numpy(writing_tables().view(np.int16).copy()).to(device)

    def layer(self, index: int) -> CodedLayer:
        """Views of layer `index`."""
        layout = self.layout
        return CodedLayer(self.pages[index], self.tables, layout.key_dim, layout.value_dim, layout.page_size)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What attention reads of the pool, by name."""
        return {"closed": self.pages, "tables": self.tables}

    def close(
        self, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Close full plain pages `sources` of all layers into pages `targets`: see `FixedPages.close`."""
        self._kernels().close(self, keys, values, sources, targets)
        return refused_tiles(self.pages, [(0, NO_SCALE), (self.pair.parts[0].bytes, NO_SCALE)], targets)

    def open(self, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Open closed pages `sources` of all layers into plain pages `targets` of `keys` and `values`: see `close`."""
        self._kernels().open(self, keys, values, sources, targets)

    def _kernels(self) -> Any:
        """The module of the device's kernels."""
        if self.pages.is_cuda:
            from kvrail.engine.kv.kvcomp import cuda  # needs triton, which a CPU worker does not

            return cuda
        from kvrail.engine.kv.kvcomp import cpu  # compiles kernels, which a CUDA worker does not need

        return cpu


def unsupported(layout: KVLayout) -> str:
    """Why pages of `layout` have no KVComp form; empty where they have one."""
    for name, dim in (("keys", layout.key_dim), ("values", layout.value_dim)):
        if not supports(dim, layout.dtype):
            return f"{name} of {dim} {layout.dtype} a head have no kvcomp form: it is for bfloat16, multiples of 64"
    if layout.page_size % TOKENS:
        return f"page_size {layout.page_size}: kvcomp pages hold multiples of {TOKENS} tokens"
    return ""


def page_bytes(layout: KVLayout) -> int:
    """Bytes of a closed page over all layers."""
    pairs = layout.num_layers * layout.num_kv_heads * (layout.page_size // TOKENS)
    return pairs * Pair(layout.key_dim, layout.value_dim).bytes


def table_bytes(layout: KVLayout) -> int:
    """Bytes of the tables that attention reads."""
    return reading_tables().nbytes


@functools.cache
def orders(dim: int, keys: bool) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """`form.stream_places`, flat, and the row of each scale, as kernels for CPUs take them."""
    rows = base_places(dim if keys else TOKENS, keys=True)
    return np.ascontiguousarray(stream_places(dim, keys).reshape(-1), np.int32), rows.astype(np.int32)
