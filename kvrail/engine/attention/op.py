"""What attention layers call. On CUDA it is a custom operator: to torch.compile one opaque node that writes pages."""

import torch

from kvrail.engine.attention.meta import StepMeta, decode
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.kv.formats import FORMATS


@torch.library.custom_op("kvrail::paged_attention", mutates_args=("pages",))
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: list[torch.Tensor],
    page_format: str,
    layer: torch.Tensor,
    data: torch.Tensor,
    plan: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Store the new tokens' keys and values in the pages of `layer`, then attend each sequence to its pages.

    query: [1, heads, tokens, key_dim]; key, value: [1, kv_heads, tokens, dim]; pages: the tensors of PagedCache, in
    order; page_format: their form's name; data, plan: see attention.meta; sinks: [heads]; window 0 and softcap 0 are
    off. Returns [1, tokens, heads, value_dim].
    """
    options = ScoreOptions(scale, window, softcap, sinks)
    return attend_pages(query, key, value, pages, page_format, layer, decode(data, plan), options)


@attend.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: list[torch.Tensor],
    page_format: str,
    layer: torch.Tensor,
    data: torch.Tensor,
    plan: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def attend_pages(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: list[torch.Tensor],
    page_format: str,
    layer: torch.Tensor,
    meta: StepMeta,
    options: ScoreOptions,
) -> torch.Tensor:
    """The operator's computation without its own cost, for CPUs, where nothing is compiled."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    layer_pages = FORMATS[page_format].layer(pages, int(layer[0]))
    if query.is_cuda:
        from kvrail.engine.attention.cuda import paged_attention  # needs triton, which a CPU worker does not
    else:
        from kvrail.engine.attention.cpu import paged_attention  # compiles kernels, which a CUDA worker does not need
    return paged_attention(q, k, v, layer_pages, meta, options)[None]
