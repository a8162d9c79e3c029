"""The engine's pages as transfers see them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from kvrail.codec.base import Block, PagedBlock
from kvrail.engine.kv.cache import PagedCache
from kvrail.engine.kv.streams import SideStream


def paged_block(cache: PagedCache, layers: range, pages: Sequence[int]) -> PagedBlock:
    """`pages` of `layers` where they lie in the pool; nothing is copied."""
    return PagedBlock(_pools(cache), layers, pages)


class LeasedPages:
    """Pages of the pool under a lease: a transfer's source or its sink.

    pages: the pool's numbers, in the request's order. num_tokens: of the prompt that they hold.
    """

    def __init__(self, cache: PagedCache, side: SideStream, pages: Sequence[int], num_tokens: int) -> None:
        self._cache = cache
        self._side = side
        self._pages = pages
        self._num_tokens = num_tokens
        self._pools = _pools(cache)
        self._indices: dict[tuple[int, int], torch.Tensor] = {}
        self._leased = side.mark()  # earlier steps that use these pages are enqueued before this

    def block(self, layers: range, first_page: int, end_page: int) -> PagedBlock:
        """Pages `first_page` to `end_page` - 1 of the request; inside `reading` or `writing`."""
        page_ids = self._pages[first_page:end_page]
        if not self._pools.keys.is_cuda:
            return PagedBlock(self._pools, layers, page_ids)
        index = self._indices.get((first_page, end_page))
        if index is None:  # once for all layers
            block = PagedBlock(self._pools, layers, page_ids)
            index = self._indices[first_page, end_page] = block.page_index()
        return PagedBlock(self._pools, layers, page_ids, index)

    def reading(self, ready: torch.Event | None) -> AbstractContextManager[None]:
        """Inside, work on the current stream starts once `ready` has happened."""
        return self._side.after(ready)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, work on the current stream starts once all work that used the pages before the lease is done."""
        with self._side.after(self._leased):
            yield

    def fill_tail(self, layers: range) -> None:
        """Repeat the KV of the prompt's last token in the slots behind it, on the current stream.

        No step reads those slots, but they cross with their page. Leftovers of other requests must not cross, and zeros
        compress worst.
        """
        last, used = divmod(self._num_tokens, self._cache.layout.page_size)
        if not used:
            return
        for pool in self._pools.tensors():
            slots = pool[layers.start : layers.stop, self._pages[last]]
            slots[:, used:] = slots[:, used - 1 : used]

    def synchronize(self) -> None:
        """Wait until the side stream's work is done."""
        self._side.synchronize()


def _pools(cache: PagedCache) -> Block:
    return Block(*cache.as_block())
