import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrail.engine.kv.pages import PageCounts, PagePool
from kvrail.values.pagehash import page_hashes


def test_states_move_and_add_up():
    pool = PagePool(4, 2)
    a, b = pool.allocate(2)
    h = page_hashes([1, 2, 3, 4], 2)
    pool.publish(a, h[0])
    pool.release([a, b])
    assert (pool.counts().free, pool.counts().used, pool.counts().cached) == (3, 0, 1)
    assert pool.match(h) == [a]
    pool.acquire([a])
    assert pool.counts().used == 1
    with pytest.raises(ValueError, match="4 pages asked for, 3 available"):
        pool.allocate(4)
    pool.release([a])
    pool.check()


def test_eviction_takes_the_least_recently_used_and_the_tail_first():
    pool = PagePool(3, 1)
    pages = pool.allocate(3)
    hashes = page_hashes([7, 8, 9], 1)
    for page, page_hash in zip(pages, hashes, strict=True):
        pool.publish(page, page_hash)
    pool.release(pages)
    assert pool.allocate(1) == [pages[2]]  # the head of a prompt outlives its tail
    assert pool.match(hashes) == pages[:2]
    pool.check()


def test_a_hash_covers_everything_before_the_page():
    assert page_hashes([1, 2, 3, 4], 2)[1] != page_hashes([9, 2, 3, 4], 2)[1]
    assert page_hashes([1, 2, 3, 4, 5], 2) == page_hashes([1, 2, 3, 4], 2)
    assert page_hashes([1, 2, 3, 4], 2, page_hashes([1, 2], 2)) == page_hashes([1, 2, 3, 4], 2)


def test_releasing_twice_is_an_error():
    pool = PagePool(1, 1)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(ValueError, match="released more often than held"):
        pool.release(pages)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(["new", "share", "drop"]), st.integers(0, 5), st.integers(1, 4)), max_size=60)
)
def test_any_history_keeps_every_page_in_one_state(history):
    pool = PagePool(8, 1)
    held: list[list[int]] = []
    for action, prompt, count in history:
        tokens = [prompt * 10 + i for i in range(count)]
        hashes = page_hashes(tokens, 1)
        if action == "new" and pool.can_allocate(count):
            pages = pool.allocate(count)
            for page, page_hash in zip(pages, hashes, strict=True):
                pool.publish(page, page_hash)
            held.append(pages)
        elif action == "share":
            pages = pool.match(hashes)
            pool.acquire(pages)
            held.append(pages)
        elif action == "drop" and held:
            pool.release(held.pop(prompt % len(held)))
        pool.check()
        assert pool.counts().used == len({page for pages in held for page in pages})
    for pages in held:
        pool.release(pages)
    assert pool.counts().used == 0


def test_pages_whose_content_is_forgotten_serve_no_request():
    pool = PagePool(4, 4)
    hashes = page_hashes(range(8), 4)
    pages = pool.allocate(2)
    for page, page_hash in zip(pages, hashes, strict=True):
        pool.publish(page, page_hash)
    pool.release(pages[1:])
    pool.forget([*pages, *pages])
    pool.check()
    assert pool.match(hashes) == [] and pool.counts() == PageCounts(free=3, used=1, cached=0)
    pool.release(pages[:1])
    pool.check()
    assert pool.counts().free == 4
