"""Paged attention on a CPU: torch's own attention over gathered pages."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvrail.engine.attention import reference
from kvrail.engine.attention.meta import StepMeta
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.cache import LayerPages

_BUCKET_ELEMENTS = 1 << 19
"""Key elements of sequences that are attended together: 2 MiB in float32, about a core's cache. Larger groups were
slower: their memory is fresh, and touching it costs more than the arithmetic."""


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerPages,
    meta: StepMeta,
    options: ScoreOptions,
) -> torch.Tensor:
    """Store the new tokens, then attend each sequence to its own pages.

    query, key, value: [tokens, heads, dim], sequences one after the other, those with one new token first; the
    rest as in reference.paged_attention. Returns [tokens, heads, value_dim].
    """
    reference.write_pages(layer, key, value, meta.slots.long())
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    plan, page_tables, decodes = meta.plan, meta.page_tables, meta.decodes
    plain = options.softcap == 0 and options.sinks is None
    if plain and decodes:
        lengths = [total for _, total in plan[:decodes]]
        out[:decodes] = _decode(query[:decodes], layer, page_tables[:decodes], lengths, options)
    begin = decodes if plain else 0
    for row in range(begin, len(plan)):
        num_new, num_tokens = plan[row]
        k, v = _read(layer, page_tables[row], num_new, num_tokens, options.window, query.dtype)
        q = query[begin : begin + num_new]
        if plain:
            out[begin : begin + num_new] = _prefill(q, k, v, options)
        else:
            out[begin : begin + num_new] = reference.attend_eager(q, k, v, options)
        begin += num_new
    return out


def _read(
    layer: LayerPages, table: torch.Tensor, num_new: int, num_tokens: int, window: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that the last `num_new` tokens of a sequence can see."""
    page_size = layer.keys.shape[1]
    first = max(0, num_tokens - num_new - window + 1) if window else 0
    pages = table[first // page_size : -(-num_tokens // page_size)].long()
    k, v = reference.read_pages(layer, pages, dtype)
    skip = first % page_size
    return k[skip : skip + num_tokens - first], v[skip : skip + num_tokens - first]


def _prefill(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: ScoreOptions) -> torch.Tensor:
    """One sequence's last tokens. query: [queries, heads, dim]; key, value: [tokens, kv_heads, dim]."""
    queries, tokens = query.shape[0], key.shape[0]
    causal = queries == tokens and not options.window
    mask = None if causal else reference.causal_mask(queries, tokens, options.window)
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=options.scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _decode(
    query: torch.Tensor, layer: LayerPages, tables: torch.Tensor, lengths: list[int], options: ScoreOptions
) -> torch.Tensor:
    """One new token a sequence, sequences of similar length together. query: [sequences, heads, dim]."""
    page_size = layer.keys.shape[1]
    skipped = [max(0, n - options.window) // page_size if options.window else 0 for n in lengths]
    kept = [n - first * page_size for n, first in zip(lengths, skipped, strict=True)]
    out = query.new_empty(*query.shape[:2], layer.values.shape[-1])
    for rows in _buckets(kept, limit=_BUCKET_ELEMENTS // (layer.keys.shape[2] * layer.keys.shape[3])):
        count = -(-kept[rows[-1]] // page_size)
        column = torch.tensor([skipped[r] for r in rows])[:, None] + torch.arange(count)
        pages = tables[rows].gather(1, column.clamp_(max=tables.shape[1] - 1))
        out[rows] = _decode_bucket(query[rows], layer, pages, [kept[r] for r in rows], options)
    return out


def _buckets(lengths: list[int], limit: int) -> list[list[int]]:
    """Rows grouped: padding to a group's longest, its last, at most doubles its shortest; `limit` tokens a group."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups: list[list[int]] = []
    for row in order:
        fits = groups and lengths[row] * (len(groups[-1]) + 1) <= limit
        if fits and lengths[row] <= 2 * max(lengths[groups[-1][0]], 64):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _decode_bucket(
    query: torch.Tensor, layer: LayerPages, pages: torch.Tensor, lengths: list[int], options: ScoreOptions
) -> torch.Tensor:
    """query: [rows, heads, dim]; pages: [rows, n]; lengths: tokens of each row in them."""
    rows, heads, _ = query.shape
    kv_heads, longest = layer.keys.shape[2], max(lengths)
    k = _heads_first(layer.keys, layer.key_scales, pages, query.dtype)[:, :, :longest]
    v = _heads_first(layer.values, layer.value_scales, pages, query.dtype)[:, :, :longest]
    mask = None
    if options.window or min(lengths) < longest:
        for row, length in enumerate(lengths):  # what lies behind a row's end may be NaN, which no mask takes away
            k[row, :, length:] = 0
            v[row, :, length:] = 0
        ends = torch.tensor(lengths)[:, None]
        token = torch.arange(longest)[None]
        seen = (token < ends) & (token >= ends - options.window) if options.window else token < ends
        mask = seen[:, None, None]
    q = query.view(rows, kv_heads, heads // kv_heads, -1)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scale).reshape(rows, heads, -1)


def _heads_first(
    pool: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The tokens of `pages` [rows, n]: [rows, kv_heads, n * page_size, dim], contiguous: attention is faster so."""
    rows, kv_heads, dim = len(pages), *pool.shape[2:]
    flat = pages.flatten()
    raw = pool.view(torch.uint8) if scales is not None else pool
    found = raw.index_select(0, flat).view(pool.dtype).view(rows, -1, kv_heads, dim).transpose(1, 2)
    out = torch.empty(found.shape, dtype=dtype).copy_(found)
    if scales is not None:
        out *= scales.index_select(0, flat).view(rows, -1, kv_heads).transpose(1, 2)[..., None]
    return out
