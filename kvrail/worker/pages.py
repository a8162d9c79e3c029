"""The engine's pages as transfers see them."""

from collections.abc import Sequence

from kvrail.codec.base import Block, PagedBlock
from kvrail.engine.kv.cache import PagedCache
from kvrail.transfer.pool_pages import PoolPages
from kvrail.transfer.streams import SideStream


def paged_block(cache: PagedCache, layers: range, pages: Sequence[int]) -> PagedBlock:
    """`pages` of `layers` where they lie in the pool; nothing is copied."""
    return PagedBlock(_pools(cache), layers, pages)


class LeasedPages(PoolPages):
    """Pages of the engine's pool on which someone holds a lease: a transfer's source or its sink."""

    def __init__(self, cache: PagedCache, side: SideStream, pages: Sequence[int], num_tokens: int) -> None:
        super().__init__((_pools(cache),), side, pages, num_tokens)


def _pools(cache: PagedCache) -> Block:
    return Block(*cache.as_block())
