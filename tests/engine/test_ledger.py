"""A listener that hears news in pieces, however small and however late, ends with the pages that the pool holds."""

from hypothesis import given
from hypothesis import strategies as st

from kvrail.engine.kv import ledger as ledgers
from kvrail.engine.kv.ledger import Cursor, PageLedger
from kvrail.engine.kv.pages import PagePool
from kvrail.values.pagehash import page_digest, page_hashes


class Listener:
    """Applies news the way that a router does."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.heard = Cursor()

    def hear(self, ledger: PageLedger, limit: int) -> bool:
        news = ledger.news(self.heard, limit)
        assert len(news.added) + len(news.removed) <= limit
        if news.anew:
            self.held.clear()
        self.held.difference_update(news.removed)
        self.held.update(news.added)
        self.heard = news.heard
        return news.complete


STEPS = st.lists(st.tuples(st.sampled_from(["prompt", "hear"]), st.integers(0, 9), st.integers(1, 5)), max_size=60)


@given(STEPS, st.integers(1, 7), st.integers(1, 12))
def test_news_in_pieces_tell_the_whole(steps, limit, remembered):
    before, ledgers.REMEMBERED = ledgers.REMEMBERED, remembered
    try:
        pool, listener = PagePool(6, 1), Listener()
        for kind, seed, length in steps:
            if kind == "hear":
                listener.hear(pool.ledger, limit)
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
            if listener.hear(pool.ledger, limit):
                break
        assert listener.held == {page_digest(page_hash) for page_hash in pool._page_of}
        assert listener.hear(pool.ledger, limit)  # and now there is nothing new
    finally:
        ledgers.REMEMBERED = before


def test_what_was_missed_for_too_long_begins_anew(monkeypatch):
    monkeypatch.setattr(ledgers, "REMEMBERED", 2)
    ledger, listener = PageLedger(), Listener()
    hashes = page_hashes(list(range(5)), 1)
    for page_hash in hashes:
        ledger.add(page_hash)
    assert listener.hear(ledger, 10)
    for page_hash in hashes[:3]:
        ledger.remove(page_hash)
    assert ledger.news(listener.heard, 10).anew
    assert listener.hear(ledger, 1) is False
    while not listener.hear(ledger, 1):
        pass
    assert listener.held == {page_digest(page_hash) for page_hash in hashes[3:]}
    assert ledger.news(Cursor(10**9, 10**9), 10).anew  # of another start of the process


def test_two_pages_of_one_digest_break_nothing():
    ledger, listener = PageLedger(), Listener()
    one, other = bytes(16), bytes(8) + b"another."
    for page in (one, other, page_hashes([1, 2], 2)[0]):
        ledger.add(page)
    assert listener.hear(ledger, 10) and listener.held == {0, page_digest(page_hashes([1, 2], 2)[0])}
    for page in (one, other):
        ledger.remove(page)
    assert listener.hear(ledger, 10) and listener.held == {page_digest(page_hashes([1, 2], 2)[0])}
