"""Paged attention on CUDA: which kernel computes which part of a packed step."""

import functools

import torch

from kvrail.engine.attention.decode_kernel import decode_attention
from kvrail.engine.attention.meta import StepMeta
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.attention.page_kernels import gather_tokens, write_pages
from kvrail.engine.attention.prefill_kernel import prefill_attention
from kvrail.engine.cache import LayerPages


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerPages,
    meta: StepMeta,
    options: ScoreOptions,
) -> torch.Tensor:
    """Store the new tokens, then attend each sequence to its own pages.

    query, key, value: [tokens, heads, dim], sequences one after the other, those with one new token first. Returns
    [tokens, heads, value_dim].
    """
    decodes, tokens = meta.decodes, len(query)
    out = query.new_empty(tokens, query.shape[1], value.shape[2])
    if decodes:
        decode_attention(
            query[:decodes],
            key[:decodes],
            value[:decodes],
            layer,
            meta.page_tables[:decodes],
            meta.kv_lens[:decodes],
            meta.counters,
            out[:decodes],
            options,
            _processors(query.device),
        )
    if decodes < tokens:
        q, k, v = query[decodes:], key[decodes:], value[decodes:]
        write_pages(layer, k, v, meta.slots[decodes:])
        if len(meta.gather_slots):
            k, v = gather_tokens(layer, meta.gather_slots, query.dtype)
        longest = max(new for new, _ in meta.plan)
        prefill_attention(q, k, v, meta.cu_queries, meta.cu_tokens, longest, out[decodes:], options)
    return out


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
