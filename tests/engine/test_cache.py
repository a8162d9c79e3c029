"""The page pool: moving pages changes no bit."""

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


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_gather_copies_pages_in_order(dtype: str) -> None:
    cache = filled(dtype)
    got = cache.gather(range(1, 3), [7, 0, 3])
    assert len(got) == (4 if cache.layout.scaled else 2)
    for copy, pool in zip(got, pools(cache), strict=True):
        assert copy.is_contiguous() and same_bits(copy, pool[1:3][:, [7, 0, 3]])


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_scatter_writes_there_and_nowhere_else(dtype: str) -> None:
    source, target, untouched = filled(dtype), filled(dtype), filled(dtype)
    for tensor in pools(source):
        tensor.view(torch.uint8).bitwise_not_()
    target.scatter(range(1, 3), [2, 8], source.gather(range(1, 3), [7, 0]))
    for wrote, was, new in zip(pools(target), pools(untouched), pools(source), strict=True):
        assert same_bits(wrote[1:3, 2], new[1:3, 7]) and same_bits(wrote[1:3, 8], new[1:3, 0])
        rest = [page for page in range(9) if page not in (2, 8)]
        assert same_bits(wrote[:, rest], was[:, rest])
        assert same_bits(wrote[[0, 3]], was[[0, 3]])


def test_copy_page_copies_all_layers() -> None:
    cache = filled("float8_e5m2")
    cache.copy_page(3, 5)
    assert all(same_bits(pool[:, 3], pool[:, 5]) for pool in pools(cache))


@pytest.mark.parametrize("page", [-1, 9])
def test_pages_outside_the_pool_are_refused(page: int) -> None:
    cache = filled("bfloat16")
    with pytest.raises(ValueError, match=str(page)):
        cache.gather(range(4), [0, page])


def test_scatter_refuses_another_type() -> None:
    cache = filled("bfloat16")
    with pytest.raises(ValueError, match="float32"):
        cache.scatter(range(4), [0], [t.float() for t in cache.gather(range(4), [0])])
    with pytest.raises(ValueError, match="1 tensors"):
        cache.scatter(range(4), [0], cache.gather(range(4), [0])[:1])


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
