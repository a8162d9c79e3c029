"""Paged attention on CUDA: which kernel computes which part of a packed step."""

import functools

import torch

from kvrail.engine.attention.meta import StepMeta
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.attention.triton.decode_kernel import decode_attention, tuning_over
from kvrail.engine.attention.triton.order import head_shape
from kvrail.engine.attention.triton.page_kernels import write_pages
from kvrail.engine.attention.triton.prefill_kernel import prefill_attention, queries_for
from kvrail.engine.kv.formats import LayerPages
from kvrail.values.layout import KVLayout


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
    [tokens, heads, value_dim]: zeros in rows that `meta` says are padding, undefined values in rows that it does not
    mention. What is launched depends on shapes alone.
    """
    rows = len(meta.kv_lens)
    out = query.new_empty(len(query), query.shape[1], value.shape[2])
    if rows:  # before the blocks: it writes zeros to rows of longer sequences, which the blocks overwrite
        decode_attention(
            query[:rows],
            key[:rows],
            value[:rows],
            layer,
            meta.page_tables[:rows],
            meta.kv_lens,
            meta.shares,
            meta.counters,
            out[:rows],
            options,
            closed_tokens=meta.closed_tokens,
        )
    if len(meta.blocks):
        write_pages(layer, key, value, meta.slots)
        prefill_attention(
            query,
            layer,
            meta.page_tables,
            meta.blocks,
            out,
            options,
            _processors(query.device),
            closed_tokens=meta.closed_tokens,
        )
    return out


def programs_at_once(layer: LayerPages, dtype: torch.dtype, rows: int) -> int:
    """Programs that compute `rows` sequences with one new token at once, over such pages, for a model in `dtype`."""
    return tuning_over(layer, dtype, rows).programs * _processors(layer.keys.device)


def queries_of_a_block(layout: KVLayout, dtype: torch.dtype, tokens: int) -> int:
    """The most queries of an entry of StepMeta.blocks in a step of `tokens`, for a model that computes in `dtype`."""
    return queries_for(head_shape(layout, dtype), tokens)


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
