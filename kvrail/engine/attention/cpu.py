"""Paged attention on a CPU: torch's own attention over gathered pages.

What a token gets depends on its own sequence alone, bit for bit in float32, whatever is computed beside it and however
many tokens of its sequence come at once: drafts are verified many at a time, and the outcome must be that of one at a
time. torch's attention does that where queries come in multiples of QUERY_ROWS and keys in multiples of KEY_ROWS,
counted from the sequence's beginning and masked beyond its end: so every sum has the same terms in the same order.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kvrail.engine.attention import reference
from kvrail.engine.attention.meta import StepMeta
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.cache import LayerPages

QUERY_ROWS = 4
"""Matrix products, attention's and linear layers', give a row the same bits beside any others where their number is a
multiple of this."""
KEY_ROWS = 512
"""Keys that torch's attention takes at once; with fewer, its products would choose other kernels by their size."""

_BUCKET_ELEMENTS = 1 << 19
"""Key elements of sequences that are attended together: 2 MiB in float32, about a core's cache. Larger groups were
slower: their memory is fresh, and touching it costs more than the arithmetic."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with one new token that are attended together, the same in every layer of a window.

    rows: which of the step's; pages: int64, those of all rows, one after the other; counts: tokens of each to read;
    seen: bool [rows, 1, 1, tokens], a multiple of KEY_ROWS.
    """

    rows: list[int]
    pages: torch.Tensor
    counts: list[int]
    seen: torch.Tensor


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
    tokens = len(meta.slots)
    reference.write_pages(layer, key[:tokens], value[:tokens], meta.slots.long())
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    out[tokens:] = 0
    plan, page_tables, decodes = meta.plan, meta.page_tables, meta.decodes
    plain = options.softcap == 0 and options.sinks is None
    if plain and decodes:
        out[:decodes] = _decode(query[:decodes], layer, meta, options)
    begin = decodes if plain else 0
    for row in range(begin, len(plan)):
        num_new, num_tokens = plan[row]
        q = query[begin : begin + num_new]
        if plain:
            out[begin : begin + num_new] = _prefill(q, layer, page_tables[row], num_tokens, options)
        else:
            k, v = _read(layer, page_tables[row], num_new, num_tokens, options.window, query.dtype)
            out[begin : begin + num_new] = reference.attend_eager(q, k, v, options)
        begin += num_new
    return out


def padded(count: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `count`."""
    return -(-count // multiple) * multiple


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


def _prefill(
    query: torch.Tensor, layer: LayerPages, table: torch.Tensor, num_tokens: int, options: ScoreOptions
) -> torch.Tensor:
    """One sequence's last tokens. query: [queries, heads, dim]; returns [queries, heads, value_dim]."""
    queries = len(query)
    first = _first_read(num_tokens - queries + 1, layer, options)
    pages = _pages_of(table[None], [first], [num_tokens - first], layer.keys.shape[1])
    k, v = _gather(layer, pages, [num_tokens - first], query.dtype)
    causal = queries == num_tokens > KEY_ROWS // 2 and not options.window  # skips half of the work, rounds alike
    rows = k.shape[2] if causal else padded(queries, QUERY_ROWS)
    q = pad(query.transpose(0, 1), (0, 0, 0, rows - queries))[None]
    mask = None
    if not causal:
        seen = reference.causal_mask(queries, num_tokens, options.window)[:, first:]
        mask = pad(seen, (0, k.shape[2] - seen.shape[1], 0, rows - queries))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=options.scale, enable_gqa=True)
    return out[0, :, :queries].transpose(0, 1)


def _decode(query: torch.Tensor, layer: LayerPages, meta: StepMeta, options: ScoreOptions) -> torch.Tensor:
    """One new token a sequence. query: [sequences, heads, dim]."""
    groups = meta.shared.get(options.window)
    if groups is None:
        groups = meta.shared[options.window] = _groups(layer, meta, options)
    out = query.new_empty(*query.shape[:2], layer.values.shape[-1])
    for group in groups:
        k, v = _gather(layer, group.pages, group.counts, query.dtype)
        out[group.rows] = _attend_group(query[group.rows], k, v, group.seen, options)
    return out


def _groups(layer: LayerPages, meta: StepMeta, options: ScoreOptions) -> list[_Group]:
    """Sequences with one new token, those of similar length together."""
    page_size, kv_heads, dim = layer.keys.shape[1:]
    lengths = [total for _, total in meta.plan[: meta.decodes]]
    skipped = [_first_read(length, layer, options) for length in lengths]
    kept = [length - first for length, first in zip(lengths, skipped, strict=True)]
    found = []
    for rows in _buckets([padded(count, KEY_ROWS) for count in kept], limit=_BUCKET_ELEMENTS // (kv_heads * dim)):
        begins, counts = [skipped[row] for row in rows], [kept[row] for row in rows]
        ends, token = torch.tensor(counts)[:, None], torch.arange(padded(max(counts), KEY_ROWS))[None]
        seen = (token < ends) & (token >= ends - options.window) if options.window else token < ends
        pages = _pages_of(meta.page_tables[rows], begins, counts, page_size)
        found.append(_Group(rows, pages, counts, seen[:, None, None]))
    return found


def _first_read(length: int, layer: LayerPages, options: ScoreOptions) -> int:
    """The first token to read for a query that is its sequence's token number `length`: a whole page and KEY_ROWS."""
    unit = max(KEY_ROWS, layer.keys.shape[1])
    return max(0, length - options.window) // unit * unit if options.window else 0


def _buckets(lengths: list[int], limit: int) -> list[list[int]]:
    """Rows grouped: padding to a group's longest, its last, at most doubles its shortest; `limit` tokens a group."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups: list[list[int]] = []
    for row in order:
        fits = groups and lengths[row] * (len(groups[-1]) + 1) <= limit
        if fits and lengths[row] <= 2 * lengths[groups[-1][0]]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _attend_group(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, options: ScoreOptions
) -> torch.Tensor:
    """query: [rows, heads, dim]; key, value: of `_gather`; seen: of the group."""
    rows, heads, _ = query.shape
    kv_heads = key.shape[1]
    q = query.view(rows, kv_heads, heads // kv_heads, -1)
    group = q.shape[2]
    q = pad(q, (0, 0, 0, padded(group, QUERY_ROWS) - group))
    out = scaled_dot_product_attention(q, key, value, attn_mask=seen, scale=options.scale)
    return out[:, :, :group].reshape(rows, heads, -1)


def _pages_of(tables: torch.Tensor, begins: list[int], counts: list[int], page_size: int) -> torch.Tensor:
    """The pages that hold tokens begins[i] to begins[i] + counts[i] of each row, int64, as many for every row.

    tables: [rows, width]; begins: where pages begin.
    """
    column = torch.tensor(begins)[:, None] // page_size + torch.arange(-(-max(counts) // page_size))
    return tables.gather(1, column.clamp_(max=tables.shape[1] - 1)).long().flatten()


def _gather(
    layer: LayerPages, pages: torch.Tensor, counts: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first counts[i] tokens of each row, zeros behind them. pages: of `_pages_of`.

    Returns two of [rows, kv_heads, tokens, dim], contiguous: attention is faster so; tokens is a multiple of KEY_ROWS.
    """
    most = padded(max(counts), KEY_ROWS)
    found = []
    for pool, scales in ((layer.keys, layer.key_scales), (layer.values, layer.value_scales)):
        raw = pool.view(torch.uint8) if scales is not None else pool
        taken = raw.index_select(0, pages).view(pool.dtype)
        rows = taken.view(len(counts), -1, *pool.shape[2:]).transpose(1, 2)[:, :, :most]
        read = rows.shape[2]
        out = torch.empty(*rows.shape[:2], most, pool.shape[3], dtype=dtype)
        out[:, :, :read] = rows
        if scales is not None:
            scale = scales.index_select(0, pages).view(len(counts), -1, pool.shape[2]).transpose(1, 2)[:, :, :most]
            out[:, :, :read] *= scale[..., None]
        for row, count in zip(out, counts, strict=True):  # what lies there may be NaN, which no mask takes away
            row[:, count:] = 0
        found.append(out)
    return found[0], found[1]
