"""What attention layers call; on CUDA a custom operator: torch.compile sees one opaque node that writes the pages."""

import torch

from kvrail.engine.attention.meta import StepMeta, decode
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.kv.cache import LayerPages


@torch.library.custom_op("kvrail::paged_attention", mutates_args=("keys", "values", "key_scales", "value_scales"))
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    layer: torch.Tensor,
    data: torch.Tensor,
    plan: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Store the new tokens' keys and values in the pages of `layer`, then attend each sequence to its pages.

    query: [1, heads, tokens, key_dim]; key, value: [1, kv_heads, tokens, dim]; keys, values and scales: the pools of
    PagedCache; data, plan: see attention.meta; sinks: [heads]; window 0 and softcap 0 are off.
    Returns [1, tokens, heads, value_dim].
    """
    options = ScoreOptions(scale, window, softcap, sinks)
    return attend_pages(
        query, key, value, layer_pages(keys, values, key_scales, value_scales, layer), decode(data, plan), options
    )


@attend.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
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
    pages: LayerPages,
    meta: StepMeta,
    options: ScoreOptions,
) -> torch.Tensor:
    """The same of one layer's pages, without what the operator itself costs: on a CPU, where nothing is compiled."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    if query.is_cuda:
        from kvrail.engine.attention import cuda  # needs triton, which a CPU worker does not

        return cuda.paged_attention(q, k, v, pages, meta, options)[None]
    from kvrail.engine.attention import cpu  # compiles kernels, which a CUDA worker does not need

    return cpu.paged_attention(q, k, v, pages, meta, options)[None]


def layer_pages(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    layer: torch.Tensor,
) -> LayerPages:
    """Views of one layer's part of the pools."""
    index = int(layer[0])
    return LayerPages(
        keys[index],
        values[index],
        None if key_scales is None else key_scales[index],
        None if value_scales is None else value_scales[index],
    )
