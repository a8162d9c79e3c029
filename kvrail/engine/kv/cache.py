"""The page pool: KV of every layer, in pages of a fixed number of tokens."""

from collections.abc import Sequence
from typing import Any

import torch

from kvrail.engine.kv.format import PageTensor, zeroed
from kvrail.engine.kv.formats import format_of
from kvrail.engine.kv.slots import PageSlots
from kvrail.errors import ConfigError
from kvrail.values.layout import KVLayout

_DEFAULT_CPU_BYTES = 2 << 30
_DEFAULT_CUDA_FRACTION = 0.85
_LEFT_OF_CUDA = 0.1
"""Share of a GPU's memory for captured steps, buffers and libraries, beside weights and pages. They took 6.1 GiB before
the first request, with a model of 61 GiB on a GPU of 79."""


class PagedCache:
    """The pool of KV pages on one device.

    tensors: those of the layout's form, by name (`kvrail.engine.kv.formats`): each [layers, num_pages, *shape].
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device | str) -> None:
        if num_pages < 1:
            raise ConfigError(
                f"num_pages is {num_pages}: the engine needs at least 1; raise num_pages or kv_memory_gib"
            )
        self.layout = layout
        self.format = format_of(layout)
        self.num_pages = num_pages
        self.device = torch.device(device)
        self.tensors = {name: self._made(each) for name, each in self.format.tensors(layout).items()}

    @property
    def slots(self) -> PageSlots | None:
        """Where pages lie, where some are closed; None: each page has its own number in every tensor."""
        return None

    @property
    def open_pages(self) -> int:
        """The most pages that can be written: before requests come, the first ones."""
        return self.num_pages

    def where(self, pages: Sequence[int]) -> Sequence[int]:
        """Where pages lie in the tensors of pages that can be written; less than 0: they are closed."""
        return pages

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def layer(self, index: int) -> Any:
        """What the form's attention takes of layer `index`."""
        return self.format.layer(list(self.tensors.values()), index)

    def copy_page(self, src: int, dst: int) -> None:
        """Copy page `src` of all layers to page `dst`, on the current stream."""
        for tensor in self.tensors.values():
            tensor[:, dst].copy_(tensor[:, src])

    def as_block(self) -> list[torch.Tensor]:
        """All pages that can be written, as codecs read and write them: keys, values and, of eight bits, their scales.

        [layers, pages, page_size, kv_heads, dim] and, of scales, [layers, pages, page_size, kv_heads].
        """
        return list(self.tensors.values())

    def _made(self, tensor: PageTensor) -> torch.Tensor:
        """One of the pool's tensors, filled: a NaN in an unwritten slot would poison masked products (0 * NaN)."""
        shape = (self.layout.num_layers, self.open_pages, *tensor.shape)
        made = zeroed(shape, tensor.dtype, self.device)
        return made.fill_(tensor.fill) if tensor.fill else made


def memory_for_pages(device: torch.device | str, kv_memory_gib: float = 0.0) -> int:
    """Bytes of memory for pages: `kv_memory_gib` GiB.

    0: 2 GiB on a CPU; on CUDA 85 % of what is free, and a tenth of the GPU is left in any case.
    """
    device = torch.device(device)
    if kv_memory_gib:
        return int(kv_memory_gib * (1 << 30))
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return int(min(free * _DEFAULT_CUDA_FRACTION, free - total * _LEFT_OF_CUDA))
    return _DEFAULT_CPU_BYTES


def pages_that_fit(layout: KVLayout, device: torch.device | str, kv_memory_gib: float = 0.0) -> int:
    """Pages of `layout` that fit into `memory_for_pages`. Raises ConfigError where not even one page fits."""
    budget, page_bytes = memory_for_pages(device, kv_memory_gib), format_of(layout).page_bytes(layout)
    pages = budget // page_bytes
    if pages < 1:
        raise ConfigError(
            f"{budget / (1 << 30):.2f} GiB hold no page of {page_bytes} bytes; raise kv_memory_gib or lower page_size"
        )
    return pages
