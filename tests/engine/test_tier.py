"""A tier behind the pool: what is evicted comes back with all its bits, and serves the prompts that begin alike."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvrail.engine.kv.cache import PagedCache
from kvrail.engine.kv.pages import PagePool
from kvrail.engine.request.events import Admitted, Recomputed
from kvrail.engine.request.requests import EngineRequest
from kvrail.values.layout import DTYPE_BYTES, KVLayout
from kvrail.values.pagehash import PageHash, page_hashes
from kvrail.values.sampling import SamplingParams
from tests.engine.bench import Bench, prompts
from tests.engine.drafting import PAGE_SIZE, DecodeSite
from tests.engine.page_machine import POISON, expected


class MemoryTier:
    """All of it in a dict. pools: tensors whose first axis is the page."""

    def __init__(self, *pools: torch.Tensor) -> None:
        self.pools = pools
        self.kept: dict[PageHash, list[torch.Tensor]] = {}
        self.loaded = 0

    def lookup(self, hashes: Sequence[PageHash]) -> int:
        return next((at for at, each in enumerate(hashes) if each not in self.kept), len(hashes))

    def load(self, hashes: Sequence[PageHash], pages: Sequence[int]) -> None:
        for page_hash, page in zip(hashes, pages, strict=True):
            self.loaded += 1
            for pool, content in zip(self.pools, self.kept[page_hash], strict=True):
                pool[page] = content

    def store(self, page_hash: PageHash, page: int) -> None:
        self.kept[page_hash] = [pool[page].clone() for pool in self.pools]

    def drop(self, page_hash: PageHash) -> None:
        self.kept.pop(page_hash, None)


def tier_of(cache: PagedCache) -> MemoryTier:
    return MemoryTier(*(pool.transpose(0, 1) for pool in cache.as_block()))


def over_cells(cells: np.ndarray) -> MemoryTier:
    return MemoryTier(torch.from_numpy(cells))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_evicted_pages_come_back_bit_for_bit(dtype: str) -> None:
    cache = PagedCache(KVLayout(3, 2, 8, 6, 4, dtype), 6, "cpu")
    pool, hashes = PagePool(6, 4, tier=tier_of(cache)), page_hashes(list(range(16)), 4)
    for tensor in cache.as_block():
        tensor.view(torch.uint8).random_(0, 256)
    pages = pool.allocate(4)
    wanted = [tensor[:, pages].view(torch.uint8) for tensor in cache.as_block()]
    for page, page_hash in zip(pages, hashes, strict=True):
        pool.publish(page, page_hash)
    pool.release(pages)
    others = pool.allocate(6)
    for tensor in cache.as_block():
        tensor.view(torch.uint8).fill_(0xFF)
    pool.release(others)
    assert pool.match(hashes) == []
    fresh = pool.allocate(5)
    assert pool.restore(hashes, fresh) == 4
    for tensor, bits in zip(cache.as_block(), wanted, strict=True):
        assert torch.equal(tensor[:, fresh[:4]].view(torch.uint8), bits)
    assert pool.match(hashes) == fresh[:4]
    pool.check()


@pytest.mark.parametrize("ahead", [False, True])
def test_prompts_find_what_was_evicted(ahead: bool) -> None:
    bench = Bench(num_pages=12, tier=over_cells, ahead=ahead)
    asked = [[number, *range(30)] for number in range(4)]
    for turn in range(3):
        for number, prompt in enumerate(asked):
            name = f"{number} {turn}"
            bench.submit(name, prompt)
            bench.run()
            assert bench.tokens(name) == expected(prompt, 8)
            assert bench.of(name, Admitted)[0].cached_tokens == (28 if turn else 0)
    assert bench.pool._tier.loaded > 20


@pytest.mark.parametrize("ahead", [False, True])
def test_a_busy_engine_answers_as_ever(ahead: bool) -> None:
    bench = Bench(num_pages=16, tier=over_cells, ahead=ahead)
    asked = [prompt[: 4 * (number % 5)] + prompt for number, prompt in enumerate(prompts(60, longest=12))]
    asked += [[*prompt, 1, 2, 3] for prompt in asked] + asked
    for number, prompt in enumerate(asked):
        bench.submit(str(number), prompt, n=1 + number % 2)
        bench.step(number % 7)
    bench.run()
    for number, prompt in enumerate(asked):
        for index in range(1 + number % 2):
            assert bench.tokens(str(number), index) == expected(prompt, 8, index)
    assert bench.pool._tier.loaded and bench.pool.counts().used == 0


def test_kv_that_gave_no_finite_logits_leaves_the_tier_too() -> None:
    bench = Bench(num_pages=12, tier=over_cells)
    prompt = list(range(30))
    for each in (prompt, [50, *prompt], [60, *prompt]):
        bench.submit(str(each[0]), each)
        bench.run()
    tier = bench.pool._tier
    assert bench.pool.match(page_hashes(prompt, 4)) == [] and tier.lookup(page_hashes(prompt, 4)) == 7
    for contents in tier.kept.values():
        contents[0].fill_(POISON)
    bench.submit("again", prompt)
    bench.run()
    assert bench.tokens("again") == expected(prompt, 8) and bench.of("again", Recomputed)
    assert tier.lookup(page_hashes(prompt, 4)) == 0


def test_a_model_answers_the_same_from_the_tier() -> None:
    site = DecodeSite("llama", num_pages=5)
    site.pool._tier = tier = tier_of(site.runner.cache)
    asked, params = [[number, *range(7, 7 + 3 * PAGE_SIZE)] for number in (5, 6)], SamplingParams(max_tokens=8, seed=1)
    answers = []
    for turn in range(2):
        for number, prompt in enumerate(asked):
            site.engine.submit(EngineRequest(f"{number} {turn}", tuple(prompt), params))
            site.run()
            answers.append(site.answer(f"{number} {turn}")[:2])
    assert answers[:2] == answers[2:] and tier.loaded
    assert site.of("0 1", Admitted)[0].cached_tokens == 3 * PAGE_SIZE
