"""What one forward pass gives to every attention layer, through the model's keyword arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvrail.engine.attention.meta import StepMeta
from kvrail.engine.attention.op import attend, attend_pages
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.kv.cache import PagedCache


class AttentionStep(Protocol):
    """The keyword argument `kvrail_step`: it computes the attention of each layer."""

    @property
    def on_layer(self) -> Callable[[int], None] | None:
        """Called on the host with each layer's number, once its work has been enqueued."""
        ...

    @property
    def on_body(self) -> Callable[[Any], None] | None:
        """Called with what the model gives to its head, once that has been enqueued."""
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

    pages: all tensors of PagedCache, in order; page_format: their form's name. data, plan: on CUDA, see attention.meta.
    meta: on a CPU, what takes their place.
    """

    pages: list[torch.Tensor]
    page_format: str
    data: torch.Tensor
    plan: torch.Tensor
    on_layer: Callable[[int], None] | None = None
    meta: StepMeta | None = None
    on_body: Callable[[Any], None] | None = None

    @classmethod
    def over(
        cls,
        cache: PagedCache,
        data: torch.Tensor,
        plan: torch.Tensor,
        on_layer: Callable[[int], None] | None = None,
        meta: StepMeta | None = None,
        on_body: Callable[[Any], None] | None = None,
    ) -> "PagedStep":
        """A step over the pages of `cache`."""
        return cls(list(cache.tensors.values()), cache.format.name, data, plan, on_layer, meta, on_body)

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
        pages, layer = (self.pages, self.page_format), layer_index(module)
        if self.meta is not None:
            options = ScoreOptions(scale, window, softcap, sinks)
            return attend_pages(query, key, value, *pages, layer, self.meta, options)
        out: torch.Tensor = attend(
            query,
            key,
            value,
            *pages,
            layer,
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
