"""Paged attention, slow and readable: the oracle of every fast path."""

import torch

from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.kv.formats import LayerPages


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight-bit elements and one float32 scale for each row: its largest magnitude divided by the type's.

    x: [..., dim]. Returns ([..., dim] of `dtype`, [...] float32); element = stored * scale.
    """
    limit = torch.finfo(dtype).max
    x = x.float()
    amax = x.abs().amax(-1)
    scale = torch.where(amax > 0, amax * (1.0 / limit), torch.ones_like(amax))
    return (x / scale[..., None]).clamp(-limit, limit).to(dtype), scale


def write_pages(layer: LayerPages, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Store new tokens. key, value: [tokens, kv_heads, dim]; slots: int64 [tokens], page * page_size + offset."""
    for new, (pool, scales) in zip((key, value), layer.pairs, strict=True):
        rows = pool.flatten(0, 1)
        if scales is None:
            rows.index_copy_(0, slots, new.to(pool.dtype))
        else:
            stored, scale = quantise(new, pool.dtype)
            rows.view(torch.uint8).index_copy_(0, slots, stored.view(torch.uint8))
            scales.flatten(0, 1).index_copy_(0, slots, scale)


def read_pages(layer: LayerPages, pages: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `pages` in order, as `dtype`.

    pages: int64 [..., n]; returns two of [..., n * page_size, kv_heads, dim].
    """
    found = []
    for pool, scales in layer.pairs:
        flat = pages.flatten()
        if scales is None:
            rows = pool.index_select(0, flat).to(dtype)
        else:
            stored = pool.view(torch.uint8).index_select(0, flat).view(pool.dtype)
            rows = (stored.float() * scales.index_select(0, flat)[..., None]).to(dtype)
        found.append(rows.reshape(*pages.shape[:-1], -1, *pool.shape[2:]))
    return found[0], found[1]


def attend_eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: ScoreOptions,
) -> torch.Tensor:
    """Causal attention of one sequence whose queries are its last tokens.

    query: [queries, heads, key_dim]; key: [tokens, kv_heads, key_dim]; value: [tokens, kv_heads, value_dim], queries
    at most tokens. Softmax in float32 or wider. Returns [queries, heads, value_dim] in the query's type.
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    num_queries, num_tokens = query.shape[0], key.shape[0]
    groups = query.shape[1] // key.shape[1]
    key = key.to(wide).repeat_interleave(groups, dim=1)
    value = value.to(wide).repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.to(wide), key) * options.scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~causal_mask(num_queries, num_tokens, options.window, query.device), float("-inf"))
    if options.sinks is not None:
        column = options.sinks.to(wide).view(-1, 1, 1).expand(-1, num_queries, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


def causal_mask(num_queries: int, num_tokens: int, window: int, device: torch.device | None = None) -> torch.Tensor:
    """Which tokens each of the last `num_queries` tokens sees: bool [num_queries, num_tokens]."""
    position = torch.arange(num_tokens - num_queries, num_tokens, device=device)[:, None]
    token = torch.arange(num_tokens, device=device)[None]
    mask = token <= position
    return mask & (token > position - window) if window else mask


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerPages,
    slots: torch.Tensor,
    page_tables: torch.Tensor,
    plan: list[tuple[int, int]],
    options: ScoreOptions,
) -> torch.Tensor:
    """Store the new tokens, then attend each sequence to its own pages.

    query, key, value: [tokens, heads, dim], sequences one after the other; slots: int64 [tokens]; page_tables:
    [sequences, width]; plan: (new tokens, tokens in all) a sequence. Returns [tokens, heads, value_dim].
    """
    write_pages(layer, key, value, slots)
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    page_size, begin = layer.page_size, 0
    for row, (num_new, num_tokens) in enumerate(plan):
        pages = page_tables[row, : -(-num_tokens // page_size)].long()
        k, v = read_pages(layer, pages, query.dtype)
        end = begin + num_new
        out[begin:end] = attend_eager(query[begin:end], k[:num_tokens], v[:num_tokens], options)
        begin = end
    return out
