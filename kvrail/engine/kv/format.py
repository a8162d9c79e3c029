"""What a page of the KV cache is made of: the contract that a form of pages meets.

A form keeps a page as named tensors. The pool allocates them, attention takes one layer of them, transfers take them as
a codec's block. `kvrail.engine.kv.formats` has the forms that there are, and `kvrail.engine.attention.op`
which attention computes over them.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvrail.values.layout import KVLayout


@dataclass(frozen=True, slots=True)
class PageTensor:
    """One named tensor of a page of one layer. fill: its elements before they are written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float = 0.0

    @property
    def bytes(self) -> int:
        """Bytes of the tensor in one page of one layer."""
        return math.prod(self.shape) * self.dtype.itemsize


def zeroed(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A tensor of zeros for pages. A CPU's memory is taken where it is first written: to clear 2 GiB takes seconds."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or not size:
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # a twentieth of the time to write all of it for the first time
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


class KVFormat(Protocol):
    """A form of pages at rest. What crosses a wire is the same for all forms. Those of CODE_BITS lose bits.

    A form may keep full pages closed, in fewer bytes, and those that still change open: a sequence's last page, drafts,
    coarse stages. Its tensors are those of open pages, and its cache has more (`kvrail.engine.kv.closing_cache`).
    """

    @property
    def name(self) -> str:
        """What KVLayout.page_format calls it."""
        ...

    def tensors(self, layout: KVLayout) -> dict[str, PageTensor]:
        """The tensors of a page of one layer, by name."""
        ...

    def page_bytes(self, layout: KVLayout) -> int:
        """Bytes of memory that one page takes over all layers."""
        ...

    def layer(self, tensors: Sequence[torch.Tensor], index: int) -> Any:
        """What this form's attention takes of layer `index`, views. tensors: the pool's, in order."""
        ...
