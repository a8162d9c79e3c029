"""The page pool: its size, and copies of pages that change no bit."""

import pytest
import torch

from kvrail.engine.cache import PagedCache, pages_that_fit
from kvrail.errors import ConfigError
from kvrail.layout import DTYPE_BYTES, KVLayout


def filled(dtype: str, num_pages: int = 9) -> PagedCache:
    cache = PagedCache(KVLayout(4, 2, 8, 6, 16, dtype), num_pages, "cpu")
    generator = torch.Generator().manual_seed(0)
    for tensor in pools(cache):
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return cache


def pools(cache: PagedCache) -> list[torch.Tensor]:
    return [t for t in (cache.keys, cache.values, cache.key_scales, cache.value_scales) if t is not None]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def test_copy_page_copies_all_layers() -> None:
    cache = filled("float8_e5m2")
    cache.copy_page(3, 5)
    assert all(same_bits(pool[:, 3], pool[:, 5]) for pool in pools(cache))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_bytes_are_what_the_layout_says(dtype: str) -> None:
    cache = filled(dtype)
    assert cache.bytes == cache.layout.page_bytes * cache.num_pages


def test_pages_that_fit() -> None:
    layout = KVLayout(4, 2, 8, 6, 16, "bfloat16")
    assert pages_that_fit(layout, "cpu", 0.5) == (1 << 29) // layout.page_bytes
    assert pages_that_fit(layout, "cpu") == (2 << 30) // layout.page_bytes
    with pytest.raises(ConfigError, match="raise kv_memory_gib"):
        pages_that_fit(layout, "cpu", 1e-6)
