"""The engine's pages as transfers see them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvrail.codec.base import Block, PagedBlock
from kvrail.engine.kv.cache import PagedCache
from kvrail.engine.kv.closing_cache import ClosingCache
from kvrail.transfer.pool_pages import PoolPages
from kvrail.transfer.streams import SideStream


def paged_block(cache: PagedCache, layers: range, pages: Sequence[int]) -> PagedBlock:
    """`pages` of `layers` where they lie in the pool, none of them closed; nothing is copied."""
    return PagedBlock(Block(*cache.as_block()), layers, cache.where(pages))


class LeasedPages(PoolPages):
    """Pages of the engine's pool on which someone holds a lease: a transfer's source or its sink."""

    def __init__(self, cache: PagedCache, side: SideStream, pages: Sequence[int], num_tokens: int) -> None:
        super().__init__((Block(*cache.as_block()),), side, cache.where(pages), num_tokens)
        self._cache = cache
        self._written = False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """See `PoolPages.writing`."""
        self._written = True
        with super().writing():
            yield

    def block(self, layers: range, first_page: int, end_page: int) -> PagedBlock:
        """Pages `first_page` to `end_page` - 1 of the request; plain copies, to be read, where some are closed."""
        slots = self._pages[first_page:end_page]
        if not isinstance(self._cache, ClosingCache) or min(slots, default=0) >= 0:
            return super().block(layers, first_page, end_page)
        if self._written:
            raise ValueError("a closed page is to be written")
        return PagedBlock(Block(*self._cache.opened(layers, slots)), range(len(layers)), range(len(slots)))
