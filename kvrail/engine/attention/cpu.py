"""Paged attention on a CPU: units of work over the pages where they lie, divided among threads.

A token's result depends on its own sequence alone, bit for bit: not on the rest of the batch, nor on how many tokens of
its sequence come at once. Drafts are verified many at a time, and the result must be that of one at a time.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvrail.engine.attention import reference
from kvrail.engine.attention.cpu_kernel import attend_units
from kvrail.engine.attention.cpu_kernel_vectors import BFLOAT16, E4M3, E5M2, FLOAT16, FLOAT32
from kvrail.engine.attention.meta import StepMeta
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.kv.closed.pages import ClosedLayer
from kvrail.engine.kv.formats import LayerPages

Units = npt.NDArray[np.int64]

_KINDS = {
    torch.bfloat16: BFLOAT16,
    torch.float16: FLOAT16,
    torch.float32: FLOAT32,
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2: E5M2,
}
_THREADS = torch.get_num_threads()
"""The threads that torch has when a worker starts; the engine's thread uses fewer in a small step."""
_UNIT_ROWS = 64
"""Queries in a unit, of all heads that share a KV head: enough to make the cost of widening keys and values small."""
_WIDENING = 5
"""The cost of widening a token's key and value, in rows that attend to it."""
_PRODUCTS_PER_THREAD = 1 << 22
"""Multiplications that are worth the start of another thread, some 50 us."""


_NO_BYTES, _NO_ORDER = np.zeros(0, np.uint8), np.zeros(0, np.int32)
_NONE_CLOSED = (_NO_BYTES, _NO_BYTES, 0, 0, 0, _NO_ORDER, _NO_ORDER, _NO_ORDER, _NO_ORDER, 0, 0)


class _Tile(NamedTuple):
    """Tokens of one sequence: where they begin in the step, their number, and how many tokens precede them."""

    sequence: int
    begin: int
    tokens: int
    before: int


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerPages,
    meta: StepMeta,
    options: ScoreOptions,
) -> torch.Tensor:
    """Store the new tokens, then attend each sequence to its own pages.

    query, key, value: [tokens, heads, dim], sequences one after the other; tokens behind the step's own are padding
    and get zeros. Computes in float32; returns [tokens, heads, value_dim] in the query's type.
    """
    tokens = len(meta.slots)
    reference.write_pages(layer, key[:tokens], value[:tokens], meta.slots.long())
    shares = meta.shared.get(options.window)
    if shares is None:
        shares = meta.shared[options.window] = _shares(query, layer, meta, options.window)
    out = torch.zeros(*query.shape[:2], value.shape[-1])
    attend = functools.partial(
        attend_units,
        query=query.float().contiguous().numpy(),
        out=out.numpy(),
        page_tables=meta.page_tables.numpy(),
        keys=_bytes(layer.keys),
        values=_bytes(layer.values),
        key_scales=_floats(layer.key_scales),
        value_scales=_floats(layer.value_scales),
        kind=_KINDS[layer.keys.dtype],
        item_bytes=layer.keys.element_size(),
        page_size=layer.page_size,
        kv_heads=layer.kv_heads,
        scale=np.float32(options.scale),
        window=options.window,
        softcap=np.float32(options.softcap),
        sinks=_floats(options.sinks),
        closed_tokens=np.zeros(len(meta.page_tables), np.int64) if layer.closed is None else meta.closed_tokens.numpy(),
        closed=_NONE_CLOSED if layer.closed is None else _closed(layer.closed),
    )
    _run(attend, shares)
    return out.to(query.dtype)


def _shares(query: torch.Tensor, layer: LayerPages, meta: StepMeta, window: int) -> list[Units]:
    """A layer's units, one list for each thread that is worth its start."""
    kv_heads, dims = layer.kv_heads, layer.keys.shape[3] + layer.values.shape[3]
    group = query.shape[1] // kv_heads
    tiles = list(_tiles(meta.plan, max(1, _UNIT_ROWS // group)))
    costs = [_tokens_read(tile, window) * (tile.tokens * group + _WIDENING) for tile in tiles]
    units = [
        (tile.sequence, head, tile.begin, tile.begin + tile.tokens, tile.before)
        for tile in (tiles[number] for number in np.argsort(costs, stable=True)[::-1])
        for head in range(kv_heads)
    ]
    threads = min(_THREADS, len(units), max(1, kv_heads * sum(costs) * dims // _PRODUCTS_PER_THREAD))
    return [np.array(units[thread::threads], np.int64) for thread in range(threads)]


def _tiles(plan: Sequence[tuple[int, int]], most: int) -> Iterator[_Tile]:
    """All new tokens, in tiles of at most `most` tokens of a sequence."""
    begin = 0
    for sequence, (new, total) in enumerate(plan):
        for first in range(0, new, most):
            yield _Tile(sequence, begin + first, min(most, new - first), total - new + first)
        begin += new


def _tokens_read(tile: _Tile, window: int) -> int:
    seen = tile.before + tile.tokens
    return min(seen, window + tile.tokens) if window else seen


def _run(attend: Callable[[Units], None], shares: list[Units]) -> None:
    """Attend all shares, the first in this thread; none is running when this returns or raises."""
    others = [_helpers(_THREADS - 1).submit(attend, share) for share in shares[1:]]
    try:
        attend(shares[0])
    finally:
        wait(others)
    for other in others:
        other.result()


@functools.cache
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="attention")


def _closed(layer: ClosedLayer) -> tuple[object, ...]:
    """Closed pages as kernels take them."""
    pages, spare, unit_bytes = layer.arguments
    key_bytes, both = layer.tiles
    sizes = (unit_bytes, key_bytes, both - key_bytes)
    units = _NO_BYTES if spare is None else _bytes(spare)
    return (_bytes(pages), units, *sizes, *layer.orders, layer.code_bits, layer.lead)


def _bytes(pool: torch.Tensor) -> npt.NDArray[np.uint8]:
    return pool.view(torch.uint8).view(-1).numpy()


def _floats(tensor: torch.Tensor | None) -> npt.NDArray[np.float32]:
    """The tensor, flat; empty where it is None."""
    return np.zeros(0, np.float32) if tensor is None else tensor.detach().float().contiguous().view(-1).numpy()
