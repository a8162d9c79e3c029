"""The pool of lossless pages: what is closed, copied and lent is what was written."""

import pytest
import torch

from kvrail.engine.kv.closing_cache import LosslessCache, PoolSize, size_that_fits
from kvrail.transfer.streams import SideStream
from kvrail.values.layout import KVLayout
from kvrail.worker.pages import LeasedPages
from tests.lossless.cases import distributions, pages_of

LAYOUT = KVLayout(3, 2, 64, 64, 64, "bfloat16")


def filled(open_pages: int = 6) -> tuple[LosslessCache, list[torch.Tensor]]:
    """A pool with all pages open and written, and copies of them, as integers."""
    cache = LosslessCache(LAYOUT, PoolSize(open_pages + 4, open_pages), "cpu")
    cache.slots.clear()
    for page in range(open_pages):
        cache.slots.begin(page)
    shape = (3, open_pages, 64, 2, 64)
    for pool, kind in zip(cache.as_block(), ("escapes", "payloads of NaN"), strict=True):
        pool.copy_(pages_of(distributions(shape)[kind]))
    in_order = cache.slots.slot_of[:open_pages].tolist()
    return cache, [pool[:, in_order].view(torch.int16).clone() for pool in cache.as_block()]


def close(cache: LosslessCache, pages: list[int]) -> None:
    for page in pages:
        cache.slots.fill(page)
    outcome = cache.close(cache.slots.choose(cache.slots.ready()))
    assert outcome.known() and cache.slots.settle(outcome.failed) == len(pages)
    for pool in cache.as_block():  # what was closed is read from there alone
        pool[:, [slot for slot in range(cache.open_pages) if slot in cache.slots._free]] = 7.0


def test_a_closed_page_is_copied_into_an_open_one() -> None:
    cache, known = filled()
    close(cache, [0, 1])
    cache.copy_page(1, 4)
    cache.copy_page(5, 3)
    for pool, wanted in zip(cache.as_block(), known, strict=True):
        for src, dst in ((1, 4), (5, 3)):
            assert torch.equal(pool[:, cache.slots.slot_of[dst]].view(torch.int16), wanted[:, src])


@pytest.mark.parametrize("layers", [range(3), range(1, 2), range(1, 3)])
def test_a_transfer_reads_pages_of_both_forms(layers: range) -> None:
    cache, known = filled()
    close(cache, [2, 0])
    lent = LeasedPages(cache, SideStream(torch.device("cpu")), [2, 0, 5, 1], 250)
    with lent.reading(None):
        found = lent.block(layers, 0, 4).gather()
    for pool, wanted in zip((found.keys, found.values), known, strict=True):
        assert torch.equal(pool.view(torch.int16), wanted[layers.start : layers.stop][:, [2, 0, 5, 1]])
    block = lent.block(layers, 2, 4)
    assert block.pools.keys.data_ptr() == cache.tensors["keys"].data_ptr()  # open pages are read where they lie


def test_a_closed_page_is_never_written() -> None:
    cache, _ = filled()
    close(cache, [2, 0])
    lent = LeasedPages(cache, SideStream(torch.device("cpu")), [2, 0, 5, 1], 250)
    with lent.writing():
        lent.block(range(3), 2, 4)
        with pytest.raises(ValueError, match="closed page"):
            lent.block(range(3), 1, 4)


def test_a_pool_fits_into_its_memory() -> None:
    layout = KVLayout(36, 8, 128, 128, 64, "bfloat16")
    for gib, context, running in ((45, 8192, 64), (20, 40960, 256), (2, 40960, 64)):
        size = size_that_fits(layout, "cpu", gib, "lossless", max_running=running, max_model_len=context)
        assert 0 <= (gib << 30) - LosslessCache(layout, size, "meta").bytes < layout.page_bytes
        plain = (gib << 30) // layout.page_bytes
        assert size.num_pages > plain and size.open_pages <= max(plain * 3 // 4, context // 64 + 2 * running)
