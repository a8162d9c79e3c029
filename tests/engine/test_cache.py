"""The page pool: its size, and copies of pages that change no bit."""

import os
from pathlib import Path

import pytest
import torch

from kvrail.engine.kv.cache import PagedCache, pages_that_fit
from kvrail.errors import ConfigError
from kvrail.values.layout import DTYPE_BYTES, KVLayout


def filled(dtype: str, num_pages: int = 9) -> PagedCache:
    cache = PagedCache(KVLayout(4, 2, 8, 6, 16, dtype), num_pages, "cpu")
    generator = torch.Generator().manual_seed(0)
    for tensor in pools(cache):
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return cache


def pools(cache: PagedCache) -> list[torch.Tensor]:
    return list(cache.tensors.values())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def test_copy_page_copies_all_layers() -> None:
    cache = filled("float8_e5m2")
    cache.copy_page(3, 5)
    assert all(same_bits(pool[:, 3], pool[:, 5]) for pool in pools(cache))


def test_pages_take_memory_as_they_are_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, layout = resident(), KVLayout(4, 2, 128, 128, 64, "bfloat16")
    cache = PagedCache(layout, (4 << 30) // layout.page_bytes, "cpu")
    assert resident() < before + (1 << 30) < before + cache.bytes
    key = pools(cache)[0]
    assert not key[:, 7].any()
    key[:, 7] = 1.5
    assert (key[:, 7] == 1.5).all() and not key[:, 6].any() and not key[:, 8].any()
    assert resident() < before + (1 << 30)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_bytes_are_what_the_layout_says(dtype: str) -> None:
    cache = filled(dtype)
    assert cache.bytes == cache.layout.page_bytes * cache.num_pages


def test_pages_leave_room_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, gib = KVLayout(64, 64, 8, 128, 128, "bfloat16"), 1 << 30
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for free, total, fits in ((64, 80, 54.4), (17, 80, 9), (7, 24, 4.6)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, f=free, t=total: (f * gib, t * gib))
        assert pages_that_fit(layout, "cuda") == int(fits * gib) // layout.page_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7 * gib, 80 * gib))
    with pytest.raises(ConfigError, match="raise kv_memory_gib"):
        pages_that_fit(layout, "cuda")


def test_pages_that_fit() -> None:
    layout = KVLayout(4, 2, 8, 6, 16, "bfloat16")
    assert pages_that_fit(layout, "cpu", 0.5) == (1 << 29) // layout.page_bytes
    assert pages_that_fit(layout, "cpu") == (2 << 30) // layout.page_bytes
    with pytest.raises(ConfigError, match="raise kv_memory_gib"):
        pages_that_fit(layout, "cpu", 1e-6)
