"""An engine's pools of KV pages: one tensor over all layers, or one for each layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrail.codec.base import Block
from kvrail.values.layout import DTYPE_BYTES, KVLayout


@dataclass(frozen=True, slots=True)
class KVPools:
    """Where pages lie: one block over all layers, or one block of one layer for each. Nothing is ever copied."""

    blocks: tuple[Block, ...]

    @classmethod
    def whole(
        cls,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
    ) -> "KVPools":
        """One pool over all layers.

        keys: [layers, pages, page_size, kv_heads, key_dim]; values: [..., value_dim]; scales of eight-bit elements:
        float32 [layers, pages, page_size, kv_heads].
        """
        return cls((Block(keys, values, key_scales, value_scales),))

    @classmethod
    def by_layer(cls, layers: Sequence[torch.Tensor | tuple[torch.Tensor, ...]]) -> "KVPools":
        """A pool for each layer, in order: each one tensor of keys and values together, or a tuple of them apart.

        Together: [2, pages, page_size, kv_heads, dim], keys first. Apart: keys, values and, for eight-bit elements,
        the scales of each, as in `whole` without the first dimension.
        """
        for number, layer in enumerate(layers):
            if len(layer) not in (2, 4):
                raise ValueError(
                    f"layer {number} has {len(layer)} parts; give keys and values: a tensor [2, pages, ...] or a tuple"
                )
        return cls(tuple(Block(*(part.unsqueeze(0) for part in layer)) for layer in layers))

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.blocks[0].keys.device

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.blocks[0].keys.shape[1]

    @property
    def frame_layers(self) -> int:
        """Most layers that one frame may have here; 0: any number."""
        return 1 if len(self.blocks) > 1 else 0

    def check(self, layout: KVLayout) -> None:
        """Raise ValueError unless these are pools of `layout` that codecs take where they lie."""
        if layout.dtype not in DTYPE_BYTES:
            raise ValueError(f"the layout's dtype {layout.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        num_layers = sum(block.keys.shape[0] for block in self.blocks)
        if num_layers != layout.num_layers:
            raise ValueError(f"the pools have {num_layers} layers, the layout {layout.num_layers}")
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"the pools lie on {self.device}; only the CPU and CUDA devices are supported")
        for number, block in enumerate(self.blocks):
            lead = (block.keys.shape[0], self.num_pages, layout.page_size, layout.num_kv_heads)
            wanted: list[tuple[str, tuple[int, ...]]]
            wanted = [(layout.dtype, (*lead, dim)) for dim in (layout.key_dim, layout.value_dim)]
            wanted += [("float32", lead)] * (2 if layout.scaled else 0)
            tensors = block.tensors()
            found = [(str(each.dtype).removeprefix("torch."), tuple(each.shape)) for each in tensors]
            if found != wanted:
                raise ValueError(f"pool {number} is {found}; the layout wants {wanted}")
            for tensor in tensors:
                if tensor.device != self.device:
                    raise ValueError(f"pool {number} lies on {tensor.device}, the first on {self.device}")
                _check_strides(number, tensor)


def _check_strides(number: int, tensor: torch.Tensor) -> None:
    if tensor.device.type == "cpu" and not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of pool {number} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()});"
            " on a CPU keys and values may share a tensor only as [2, pages, ...]"
        )
    if tensor.numel() and not tensor[0, 0].is_contiguous():
        raise ValueError(f"a page of pool {number} is not contiguous (strides {tensor.stride()}); it must be")
