"""The forms of pages that there are: elements as they are computed, eight-bit ones with scales, and closed pages."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrail.engine.kv.closed.forms import FORMS, page_bytes
from kvrail.engine.kv.closed.pages import ClosedLayer
from kvrail.engine.kv.format import KVFormat, PageTensor
from kvrail.values.layout import KVLayout


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's part of a pool of plain or scaled pages; views, not copies.

    keys: [pages, page_size, kv_heads, key_dim]; values: [pages, page_size, kv_heads, value_dim]; scales, where the
    element type has eight bits: float32 [pages, page_size, kv_heads], else None; element = stored * scale. closed:
    pages in a closed form, where there are some beside these.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    closed: ClosedLayer | None = None

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.keys.shape[1]

    @property
    def kv_heads(self) -> int:
        """KV heads of a token."""
        return self.keys.shape[2]

    @property
    def scaled(self) -> bool:
        """Whether elements carry scales."""
        return self.key_scales is not None

    @property
    def limit(self) -> float:
        """The largest value of a scaled element; 0 where elements are stored as they are."""
        return torch.finfo(self.keys.dtype).max if self.scaled else 0.0

    @property
    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        """What kernels take: keys, values, key scales, value scales."""
        return self.keys, self.values, self.key_scales, self.value_scales

    @property
    def closed_arguments(self) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
        """What kernels take of closed pages: pages, spare units or tables of codes, bytes of a unit."""
        return (None, None, 0) if self.closed is None else self.closed.arguments

    @property
    def closed_tiles(self) -> dict[str, int]:
        """Kernels' constants: bytes of a closed page's tile of keys, and of both tiles; 0 where no page is closed.

        CODE_BITS: bits of a value of fixed width, 0 in lossless pages, CODED in kvcomp and ROTATED in rot3 pages; LEAD:
        open tokens before the closed ones.
        """
        closed = self.closed
        sizes = (0, 0, 0, 0) if closed is None else (*closed.tiles, closed.code_bits, closed.lead)
        return dict(zip(("KEY_TILE", "BOTH_TILES", "CODE_BITS", "LEAD"), sizes, strict=True))

    @property
    def pairs(self) -> tuple[tuple[torch.Tensor, torch.Tensor | None], ...]:
        """Keys with their scales, then values with theirs."""
        return (self.keys, self.key_scales), (self.values, self.value_scales)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that there are, in order."""
        return [tensor for tensor in self.arguments if tensor is not None]


class PlainFormat:
    """Keys and values in an element type of 16 or 32 bits."""

    name = "plain"

    def tensors(self, layout: KVLayout) -> dict[str, PageTensor]:
        """Keys and values."""
        dtype, slots = getattr(torch, layout.dtype), (layout.page_size, layout.num_kv_heads)
        return {
            "keys": PageTensor((*slots, layout.key_dim), dtype),
            "values": PageTensor((*slots, layout.value_dim), dtype),
        }

    def page_bytes(self, layout: KVLayout) -> int:
        """Bytes of memory that one page takes over all layers."""
        return layout.num_layers * sum(tensor.bytes for tensor in self.tensors(layout).values())

    def layer(self, tensors: Sequence[torch.Tensor], index: int) -> LayerPages:
        """Views of layer `index`."""
        keys, values, *scales = (tensor[index] for tensor in tensors)
        key_scales, value_scales = scales or (None, None)
        return LayerPages(keys, values, key_scales, value_scales)


class ScaledFormat(PlainFormat):
    """Keys and values of eight bits, and one scale a token and head for each."""

    name = "scaled"

    def tensors(self, layout: KVLayout) -> dict[str, PageTensor]:
        """Keys, values and the scales of both."""
        scales = PageTensor((layout.page_size, layout.num_kv_heads), torch.float32, fill=1.0)
        return super().tensors(layout) | {"key_scales": scales, "value_scales": scales}


class ClosedFormat(PlainFormat):
    """Plain pages, fewer than there are pages, and closed ones beside them: see `kvrail.engine.kv.closing_cache`."""

    def __init__(self, name: str, bits: int) -> None:
        self.name, self._bits = name, bits

    def page_bytes(self, layout: KVLayout) -> int:
        """Bytes of a closed page over all layers, without spare units."""
        return page_bytes(layout, self._bits)

    def layer(self, tensors: Sequence[torch.Tensor], index: int) -> LayerPages:
        """Views of layer `index`. tensors: keys, values, closed pages, and what their layers share."""
        keys, values, closed, *shared = tensors
        dims = keys.shape[-1], values.shape[-1]
        layer = ClosedLayer(closed[index], shared[0] if shared else None, *dims, self._bits)
        return LayerPages(keys[index], values[index], closed=layer)


FORMATS: dict[str, KVFormat] = {
    form.name: form for form in (PlainFormat(), ScaledFormat(), *(ClosedFormat(*each) for each in FORMS.items()))
}
"""By name."""


def format_of(layout: KVLayout) -> KVFormat:
    """The form of a layout's pages."""
    return FORMATS[layout.page_format or ("scaled" if layout.scaled else "plain")]
