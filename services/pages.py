"""The engine's pages as codecs see them."""

from collections.abc import Sequence

from codec.base import Block, PagedBlock
from kvrail.engine.cache import PagedCache


def paged_block(cache: PagedCache, layers: range, pages: Sequence[int]) -> PagedBlock:
    """`pages` of `layers` where they lie in the pool; nothing is copied."""
    return PagedBlock(_pools(cache), layers, pages)


def fill_tail(cache: PagedCache, layers: range, page: int, used: int) -> None:
    """Repeat the KV of token `used` - 1 of a page in the slots behind it, on the current stream.

    No one reads those slots, but they cross with their page: other requests' leftovers should not, and zeros are the
    worst that a codec can get.
    """
    for pool in _pools(cache).tensors():
        slots = pool[layers.start : layers.stop, page]
        slots[:, used:] = slots[:, used - 1 : used]


def _pools(cache: PagedCache) -> Block:
    return Block(cache.keys, cache.values, cache.key_scales, cache.value_scales)
