"""The engine's pages as codecs see them."""

from collections.abc import Sequence

from codec.base import Block, PagedBlock
from kvrail.engine.cache import PagedCache


def paged_block(cache: PagedCache, layers: range, pages: Sequence[int]) -> PagedBlock:
    """`pages` of `layers` where they lie in the pool; nothing is copied."""
    return PagedBlock(Block(cache.keys, cache.values, cache.key_scales, cache.value_scales), layers, pages)
