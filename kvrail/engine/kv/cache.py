"""The page pool: KV of every layer, in pages of a fixed number of tokens."""

from dataclasses import dataclass

import torch

from kvrail.errors import ConfigError
from kvrail.values.layout import KVLayout

_DEFAULT_CPU_BYTES = 2 << 30
_DEFAULT_CUDA_FRACTION = 0.85
_LEFT_OF_CUDA = 0.1
"""Of all memory of a GPU: what captured steps, buffers and libraries take beside weights and pages. With a model of
61 GiB on a GPU of 79 that was 6.1 GiB before the first request."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's part of the pool; views, not copies.

    keys: [pages, page_size, kv_heads, key_dim]; values: [pages, page_size, kv_heads, value_dim]; scales, where the
    element type has eight bits: float32 [pages, page_size, kv_heads], else None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None


class PagedCache:
    """Pools of KV pages on one device.

    keys: [layers, num_pages, page_size, kv_heads, key_dim]; values likewise with value_dim; for eight-bit element types
    key_scales and value_scales: float32 [layers, num_pages, page_size, kv_heads], one a token and head (element =
    stored * scale).
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device | str) -> None:
        if num_pages < 1:
            raise ConfigError(
                f"num_pages is {num_pages}: the engine needs at least 1; raise num_pages or kv_memory_gib"
            )
        self.layout = layout
        self.num_pages = num_pages
        self.device = torch.device(device)
        dtype = getattr(torch, layout.dtype)
        rows = (layout.num_layers, num_pages, layout.page_size, layout.num_kv_heads)
        # Zeros, not empty: a stray NaN in a slot nobody wrote would poison masked products (0 * NaN).
        self.keys = torch.zeros(*rows, layout.key_dim, dtype=dtype, device=self.device)
        self.values = torch.zeros(*rows, layout.value_dim, dtype=dtype, device=self.device)
        self.key_scales = torch.ones(rows, device=self.device) if layout.scaled else None
        self.value_scales = torch.ones(rows, device=self.device) if layout.scaled else None

    @property
    def bytes(self) -> int:
        """Bytes of all pools, scales included."""
        return sum(t.numel() * t.element_size() for t in self._pools())

    def layer(self, index: int) -> LayerPages:
        """Views of layer `index`."""
        key_scales = None if self.key_scales is None else self.key_scales[index]
        value_scales = None if self.value_scales is None else self.value_scales[index]
        return LayerPages(self.keys[index], self.values[index], key_scales, value_scales)

    def copy_page(self, src: int, dst: int) -> None:
        """Copy page `src` of all layers to page `dst`, on the current stream."""
        for pool in self._pools():
            pool[:, dst].copy_(pool[:, src])

    def _pools(self) -> list[torch.Tensor]:
        return [t for t in (self.keys, self.values, self.key_scales, self.value_scales) if t is not None]


def pages_that_fit(layout: KVLayout, device: torch.device | str, kv_memory_gib: float = 0.0) -> int:
    """Pages of `layout` that fit into `kv_memory_gib` GiB.

    0: 2 GiB on a CPU; on CUDA 85 % of what is free, and a tenth of the GPU is left in any case. Raises ConfigError
    where not even one page fits.
    """
    device = torch.device(device)
    if kv_memory_gib:
        budget = int(kv_memory_gib * (1 << 30))
    elif device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        budget = int(min(free * _DEFAULT_CUDA_FRACTION, free - total * _LEFT_OF_CUDA))
    else:
        budget = _DEFAULT_CPU_BYTES
    pages = budget // layout.page_bytes
    if pages < 1:
        raise ConfigError(
            f"{budget / (1 << 30):.2f} GiB hold no page of {layout.page_bytes} bytes; "
            "raise kv_memory_gib or lower page_size"
        )
    return pages
