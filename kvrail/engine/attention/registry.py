"""Our attention in transformers' registry: models that look up their attention function there run paged."""

from typing import Any

import torch
from transformers import AttentionInterface

from kvrail.engine.attention.step import AttentionStep
from kvrail.errors import UnsupportedModelError

NAME = "kvrail_paged"

_HARMLESS = frozenset(
    {
        "dropout",
        "is_causal",
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
"""Keyword arguments of attention calls that have no effect here: dropout is off, every model is causal (probed)."""


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers.

    No mask function is registered with it, so transformers builds no mask.
    """
    AttentionInterface.register(NAME, _attention_forward)


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    kvrail_step: AttentionStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What the registry calls. query: [1, heads, tokens, dim]; returns ([1, tokens, heads, dim], None)."""
    if kvrail_step is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not pass keyword arguments on to its attention")
    unknown = [name for name, given in kwargs.items() if given is not None and name not in _HARMLESS]
    if unknown or attention_mask is not None:
        what = ", ".join(unknown) or "a mask of its own"
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {what} to attention, which paged attention ignores"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = kvrail_step.attend(module, query, key, value, scale, sliding_window or 0, softcap or 0.0, s_aux)
    return out, None
