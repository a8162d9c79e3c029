"""The pool of pages of eight and four bits: what is closed, copied and lent."""

import pytest
import torch

from kvrail.engine.kv.closed.forms import CODE_BITS
from kvrail.engine.kv.closed.pages import LossyPages
from kvrail.engine.kv.closing_cache import LossyCache, PoolSize, size_that_fits
from kvrail.transfer.streams import SideStream
from kvrail.values.layout import KVLayout
from kvrail.worker.pages import LeasedPages

LAYOUT = KVLayout(3, 2, 64, 64, 64, "bfloat16")


def filled(form: str, open_pages: int = 6) -> LossyCache:
    """A pool with as many pages as can be open, written."""
    cache = LossyCache(LAYOUT, PoolSize(10, open_pages, form), "cpu")
    cache.slots.clear()
    for page in range(open_pages):
        cache.slots.begin(page)
    for pool in cache.as_block():
        pool.normal_(generator=torch.Generator().manual_seed(open_pages))
    return cache


def close(cache: LossyCache, *pages: int) -> None:
    for page in pages:
        cache.slots.complete([9, page], 1)
    outcome = cache.close(cache.slots.choose(cache.slots.ready()))
    assert outcome.known()
    cache.take_in(outcome)
    cache.slots.settle(outcome.failed)


@pytest.mark.parametrize(("form", "bits"), CODE_BITS.items())
def test_a_page_is_in_both_forms_until_its_open_slot_is_handed_out(form: str, bits: int) -> None:
    cache = filled(form)
    slots = cache.slots
    known = [pool[:, slots.open_slot[2]].clone() for pool in cache.as_block()]
    close(cache, 2, 4)
    assert slots.is_open(2) and slots.is_closed(2) and slots.closed == 2 and slots.free == 0
    slots.spare([2])
    assert slots.free == 1 and slots.is_open(2)
    slots.begin(7)
    assert not slots.is_open(2) and slots.is_closed(2) and slots.free == 0
    wanted = LossyPages(LAYOUT, 1, bits, "cpu")
    first = torch.zeros(1, dtype=torch.int64)
    wanted.close(*(each[:, None].contiguous() for each in known), first, first)
    assert torch.equal(cache.closed.pages[:, 2], wanted.pages[:, 0])
    slots.check([0, 1, 2, 3, 4, 5, 7])


@pytest.mark.parametrize("form", ["int4", "kvcomp", "rot3"])
def test_a_page_with_a_refused_tile_is_not_closed(form: str) -> None:
    cache = filled(form)
    for bad in (torch.inf, torch.nan, 2.0**36):
        cache.as_block()[1][2, cache.slots.open_slot[3], 5, 1, 7] = bad
        close(cache, 1, 3)
        assert cache.slots.is_closed(1) and not cache.slots.is_closed(3) and cache.slots.is_refused(3)
        for page in (1, 3):
            cache.slots.end(page)
            cache.slots.begin(page)
    assert cache.slots.stuck == 0


def test_copies_and_transfers_take_open_pages_alone() -> None:
    cache = filled("int4")
    close(cache, 1, 2)
    cache.slots.spare([1, 2])
    cache.slots.pin([1])
    cache.slots.begin(8)  # takes the slot of page 2
    cache.copy_page(1, 5)
    for pool in cache.as_block():
        assert torch.equal(pool[:, cache.slots.open_slot[5]], pool[:, cache.slots.open_slot[1]])
    with pytest.raises(RuntimeError, match="its bits are lost"):
        cache.copy_page(2, 5)
    lent = LeasedPages(cache, SideStream(torch.device("cpu")), [0, 1, 2, 3], 250)
    with lent.reading(None):
        assert lent.block(range(3), 0, 2).pools.keys.data_ptr() == cache.tensors["keys"].data_ptr()
        with pytest.raises(ValueError, match="open pages alone"):
            lent.block(range(3), 1, 4)


@pytest.mark.parametrize("form", CODE_BITS)
def test_a_pool_fits_into_its_memory(form: str) -> None:
    layout = KVLayout(36, 8, 128, 128, 64, "bfloat16")
    for gib, context, running in ((45, 8192, 64), (20, 40960, 256), (2, 40960, 64)):
        size = size_that_fits(layout, "cpu", gib, form, max_running=running, max_model_len=context)
        assert 0 <= (gib << 30) - LossyCache(layout, size, "meta").bytes < layout.page_bytes
        plain = (gib << 30) // layout.page_bytes
        assert size.open_pages <= size.num_pages and size.open_pages <= max(plain * 3 // 4, context // 64 + 3 * running)
        assert gib < 45 or size.num_pages > plain * (1.7 if form == "int8" else 3.3)
