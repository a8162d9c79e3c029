"""What codecs get to see of a worker's pages."""

import pytest
import torch

from kvrail.engine.kv.cache import PagedCache
from kvrail.transfer.streams import SideStream
from kvrail.values.layout import DTYPE_BYTES, KVLayout
from kvrail.worker.pages import LeasedPages, paged_block


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_codec_reads_and_writes_the_pool_itself(dtype):
    cache = PagedCache(KVLayout(4, 2, 8, 6, 16, dtype), 9, "cpu")
    block = paged_block(cache, range(1, 3), [7, 0])
    tensors = tuple(cache.tensors.values())
    assert [pool.data_ptr() for pool in block.layer_pools()] == [pool[1].data_ptr() for pool in tensors]
    assert (block.spec.dtype, block.spec.num_layers, block.spec.num_pages) == (dtype, 2, 2)
    assert block.spec.raw_bytes == cache.layout.page_bytes  # half of the layers of two pages
    whole = block.gather()
    for pool in tensors:
        pool[1:3, 7] = torch.ones((), dtype=pool.dtype)
    assert not torch.equal(whole.keys.float(), block.gather().keys.float())
    with pytest.raises(ValueError, match="page 9 is outside the pool of 9"):
        paged_block(cache, range(1), [9])


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("used", [1, 5, 7])
def test_a_tail_repeats_the_last_token_and_changes_nothing_else(dtype, used):
    cache = PagedCache(KVLayout(4, 2, 8, 6, 8, dtype), 5, "cpu")
    pools = list(cache.tensors.values())
    for pool in pools:
        pool.view(torch.uint8).random_(0, 256)
    before = [pool.view(torch.uint8).clone() for pool in pools]
    pages = LeasedPages(cache, SideStream(torch.device("cpu")), [2, 4], 8 + used)
    pages.fill_tail(range(1, 3))
    for pool, old in zip(pools, before, strict=True):
        now = pool.view(torch.uint8)
        assert torch.equal(now[1:3, 4, used:], old[1:3, 4, used - 1 : used].expand(-1, 8 - used, *old.shape[3:]))
        now[1:3, 4, used:] = old[1:3, 4, used:]
        assert torch.equal(now, old)


def test_a_prompt_of_whole_pages_has_no_tail():
    cache = PagedCache(KVLayout(4, 2, 8, 6, 8, "bfloat16"), 5, "cpu")
    cache.tensors["keys"].view(torch.uint8).random_(0, 256)
    before = cache.tensors["keys"].view(torch.uint8).clone()
    LeasedPages(cache, SideStream(torch.device("cpu")), [2, 4], 16).fill_tail(range(4))
    assert torch.equal(cache.tensors["keys"].view(torch.uint8), before)


def test_pages_have_the_requests_numbers():
    cache = PagedCache(KVLayout(4, 2, 8, 6, 8, "bfloat16"), 9, "cpu")
    pages = LeasedPages(cache, SideStream(torch.device("cpu")), [7, 0, 3], 20)
    assert list(pages.block(range(2), 1, 3).page_ids) == [0, 3]
