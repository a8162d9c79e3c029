"""What one forward pass hands to every attention layer, through the model's keyword arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvrail.engine.attention.meta import StepMeta
from kvrail.engine.attention.op import attend, attend_pages, layer_pages
from kvrail.engine.attention.options import ScoreOptions


class AttentionStep(Protocol):
    """The keyword argument `kvrail_step`: what an attention module's call is answered with."""

    @property
    def on_layer(self) -> Callable[[int], None] | None:
        """Called on the host with each layer's number, once its work has been enqueued."""
        ...

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of one layer. query: [1, heads, tokens, key_dim]; returns [1, tokens, heads, value_dim]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """One packed step over the page pool.

    keys, values, key_scales, value_scales: the whole pools of PagedCache. data, plan: on CUDA, see attention.meta.
    meta: on a CPU, what takes their place.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    data: torch.Tensor
    plan: torch.Tensor
    on_layer: Callable[[int], None] | None = None
    meta: StepMeta | None = None

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write the new KV into the pages of the module's layer and attend to them."""
        if self.meta is not None:
            pages = layer_pages(self.keys, self.values, self.key_scales, self.value_scales, layer_index(module))
            return attend_pages(query, key, value, pages, self.meta, ScoreOptions(scale, window, softcap, sinks))
        out: torch.Tensor = attend(
            query,
            key,
            value,
            self.keys,
            self.values,
            self.key_scales,
            self.value_scales,
            layer_index(module),
            self.data,
            self.plan,
            sinks,
            scale,
            window,
            softcap,
        )
        return out


def bind_layer(module: torch.nn.Module, index: int) -> None:
    """Tell an attention module which layer of the pool is its own.

    The number is a tensor, int64 [1] on the CPU: a plain int would make torch.compile specialise every layer.
    """
    module.kvrail_layer = torch.tensor([index], dtype=torch.int64)


def layer_index(module: torch.nn.Module) -> torch.Tensor:
    """What `bind_layer` stored."""
    index = module.kvrail_layer
    assert isinstance(index, torch.Tensor)
    return index
