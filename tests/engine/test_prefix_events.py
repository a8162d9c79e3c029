"""A reader of KV events in parts, however small and however late, ends with the pages that the pool has."""

from hypothesis import given
from hypothesis import strategies as st

from kvrail.engine.kv import prefix_events
from kvrail.engine.kv.pages import PagePool
from kvrail.engine.kv.prefix_events import Cursor, PrefixEvents
from kvrail.values.pagehash import page_digest, page_hashes


class Reader:
    """Applies events the way that a router does."""

    def __init__(self) -> None:
        self.pages: set[int] = set()
        self.cursor = Cursor()

    def read(self, events: PrefixEvents, limit: int) -> bool:
        part = events.since(self.cursor, limit)
        assert len(part.stored) + len(part.removed) <= limit
        if part.snapshot:
            self.pages.clear()
        self.pages.difference_update(part.removed)
        self.pages.update(part.stored)
        self.cursor = part.cursor
        return part.complete


STEPS = st.lists(st.tuples(st.sampled_from(["prompt", "read"]), st.integers(0, 9), st.integers(1, 5)), max_size=60)


@given(STEPS, st.integers(1, 7), st.integers(1, 12))
def test_events_in_parts_are_the_whole(steps, limit, remembered):
    before, prefix_events.REMEMBERED = prefix_events.REMEMBERED, remembered
    try:
        pool, reader = PagePool(6, 1), Reader()
        for kind, seed, length in steps:
            if kind == "read":
                reader.read(pool.events, limit)
                continue
            hashes = page_hashes([seed, *range(length)], 1)[1:]
            hits = pool.match(hashes)
            pool.acquire(hits)
            fresh = pool.allocate(len(hashes) - len(hits))
            for page, page_hash in zip(fresh, hashes[len(hits) :], strict=True):
                pool.publish(page, page_hash)
            pool.release([*hits, *fresh])
            pool.check()
        for _ in range(100):
            if reader.read(pool.events, limit):
                break
        assert reader.pages == {page_digest(page_hash) for page_hash in pool._page_of}
        assert reader.read(pool.events, limit)  # and now there is nothing new
    finally:
        prefix_events.REMEMBERED = before


def test_a_reader_that_missed_too_much_gets_a_snapshot(monkeypatch):
    monkeypatch.setattr(prefix_events, "REMEMBERED", 2)
    events, reader = PrefixEvents(), Reader()
    hashes = page_hashes(list(range(5)), 1)
    for page_hash in hashes:
        events.store(page_hash)
    assert reader.read(events, 10)
    for page_hash in hashes[:3]:
        events.remove(page_hash)
    assert events.since(reader.cursor, 10).snapshot
    assert reader.read(events, 1) is False
    while not reader.read(events, 1):
        pass
    assert reader.pages == {page_digest(page_hash) for page_hash in hashes[3:]}
    assert events.since(Cursor(10**9, 10**9), 10).snapshot  # of another start of the process


def test_two_pages_of_one_digest_break_nothing():
    events, reader = PrefixEvents(), Reader()
    one, other = bytes(16), bytes(8) + b"another."
    for page in (one, other, page_hashes([1, 2], 2)[0]):
        events.store(page)
    assert reader.read(events, 10) and reader.pages == {0, page_digest(page_hashes([1, 2], 2)[0])}
    for page in (one, other):
        events.remove(page)
    assert reader.read(events, 10) and reader.pages == {page_digest(page_hashes([1, 2], 2)[0])}
