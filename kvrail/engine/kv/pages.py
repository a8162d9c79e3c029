"""Bookkeeping of KV pages: who holds which page, and which finished pages can be used again. No tensors.

Each page is in exactly one of three states, and free + used + cached = total, always:

    free    no holder, and its content means nothing
    used    at least one holder: a sequence, or a transfer that writes or reads it
    cached  no holder, but its content is known by hash and serves the next prompt that begins alike

        allocate              release (content known)
    free ──────▶ used ──────────────────────────────▶ cached
      ▲           │ ▲                                   │
      │  release  │ │ acquire (prefix hit)              │
      ├───────────┘ └───────────────────────────────────┤
      └──── evict, least recently used first; forget ───┘

A tier, where there is one, is given the content of pages that are evicted, and `restore` brings it back.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrail.engine.kv.prefix_events import PrefixEvents
from kvrail.engine.kv.slots import FEWEST_AT_ONCE, Closing, PageSlots
from kvrail.engine.kv.tier import KVTier
from kvrail.values.pagehash import PageHash


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; their sum is the pool's size."""

    free: int
    used: int
    cached: int


class PagePool:
    """Reference counts, prefix cache and least-recently-used eviction over `num_pages` pages.

    slots: where full pages are closed: each allocated page takes an open one, until it is closed. A tier sees plain
    pages only.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_cache: bool = True,
        tier: KVTier | None = None,
        slots: PageSlots | None = None,
    ) -> None:
        assert tier is None or slots is None, "a tier reads and writes plain pages"
        self.num_pages = num_pages
        self.page_size = page_size
        self._keep = prefix_cache
        self._tier = tier if prefix_cache else None
        self._free: deque[int] = deque(range(num_pages))
        self._holders = [0] * num_pages
        self._hash_of: dict[int, PageHash] = {}
        self._page_of: dict[PageHash, int] = {}
        self.slots = slots
        if slots is not None:
            slots.clear()
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.events = PrefixEvents()

    def counts(self) -> PageCounts:
        """Pages by state."""
        free, cached = len(self._free), len(self._cached)
        return PageCounts(free=free, used=self.num_pages - free - cached, cached=cached)

    def available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def most_pages(self) -> int:
        """The most pages that one sequence can have: all of them may be open at once."""
        return self.num_pages if self.slots is None else self.slots.open_slots

    def can_allocate(self, count: int, held: Iterable[int] = (), spared: int = 0) -> bool:
        """Whether `allocate(count)` would succeed once the pages `held` are acquired.

        spared: free open slots that they take.
        """
        revived = [page for page in held if self.is_cached(page)]
        if count + len(revived) > self.available():
            return False
        if self.slots is None or count <= (free := self.slots.free - spared):
            return True
        return count <= free + self.slots.count_taken(self._cached) - self.slots.count_taken(revived)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, evicting cached ones where none is free. The caller becomes their only holder."""
        if not self.can_allocate(count):
            raise ValueError(f"{count} pages asked for, {self.available()} available; ask can_allocate first")
        if self.slots is not None:
            self._free_slots(self.slots, count)
        while len(self._free) < count:
            self._set_free(self._evict())
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            if self.slots is not None:
                self.slots.begin(page)
            self._holders[page] = 1
        return pages

    def is_cached(self, page: int) -> bool:
        """Whether the page has no holder but known content."""
        return page in self._cached

    def match(self, hashes: Iterable[PageHash]) -> list[int]:
        """The longest run of leading pages whose content is here, without taking them."""
        found: list[int] = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            found.append(page)
        return found if self.slots is None else self.slots.usable(found)

    def acquire(self, pages: Iterable[int]) -> None:
        """Become one more holder of pages that are used or cached."""
        for page in pages:
            if self._holders[page] == 0:
                del self._cached[page]
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Stop holding pages. The last pages of a sequence are given back first, so they are evicted first."""
        for page in reversed(list(pages)):
            if self._holders[page] <= 0:
                raise ValueError(f"page {page} released more often than held")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._hash_of:
                self._cached[page] = None
            else:
                self._set_free(page)

    def lease(self, pages: Sequence[int]) -> None:
        """Hold pages for a transfer, in the form that they have."""
        self.acquire(pages)
        if self.slots is not None:
            self.slots.pin(pages)

    def end_lease(self, pages: Sequence[int]) -> None:
        """The reverse of `lease`."""
        if self.slots is not None:
            self.slots.unpin(pages)
        self.release(pages)

    def follow(self, pages: Sequence[int]) -> None:
        """A page table has these cached pages, one behind the other."""
        if self.slots is not None:
            self.slots.follow(pages)

    def fill(self, page_table: Sequence[int], number: int) -> None:
        """Page `number` of a page table is full and final: it may be closed."""
        if self.slots is not None:
            self.slots.complete(page_table, number)

    def choose_closing(self, *, at_once: bool) -> Closing | None:
        """Pages to close now; `PageSlots.settle` must follow. None: there are none, or too few, unless `at_once`.

        Where open slots are scarce, closed pages make room for others: cached ones, least recently used first.
        """
        if self.slots is None or not (ready := self.slots.ready()):
            return None
        scarce = self.slots.free < self.slots.open_slots // 4
        if len(ready) < FEWEST_AT_ONCE and not (at_once or scarce or self.slots.urgent):
            return None
        if scarce and len(ready) > self.slots.free_closed:
            closed = [page for page in self._cached if self.slots.is_closed(page)]
            for page in closed[: len(ready) - self.slots.free_closed]:
                self._set_free(self._evict(page))
        return self.slots.choose(ready) if self.slots.free_closed else None

    def publish(self, page: int, page_hash: PageHash) -> None:
        """Make a full page's content known. Where another page with this content is known, that one stays."""
        if self._keep and page_hash not in self._page_of:
            self._page_of[page_hash] = page
            self._hash_of[page] = page_hash
            self.events.store(page_hash)

    def restore(self, hashes: Sequence[PageHash], pages: Sequence[int]) -> int:
        """Fill pages that were just allocated with what the tier has of `hashes`, in order; returns how many.

        Their content is known from then on.
        """
        if self._tier is None:
            return 0
        count = min(self._tier.lookup(hashes), len(pages))
        self._tier.load(hashes[:count], pages[:count])
        for page, page_hash in zip(pages[:count], hashes, strict=False):
            self.publish(page, page_hash)
        return count

    def forget(self, pages: Iterable[int]) -> None:
        """Make the content of pages unknown, because it is wrong. Cached pages become free; holders keep theirs."""
        for page in pages:
            if page not in self._hash_of:
                continue
            page_hash = self._forget_hash(page)
            if self._tier is not None:
                self._tier.drop(page_hash)
            if page in self._cached:
                del self._cached[page]
                self._set_free(page)

    def check(self) -> None:
        """Raise AssertionError unless every page is in exactly one state and hashes are one to one."""
        free, cached = set(self._free), set(self._cached)
        used = {page for page, holders in enumerate(self._holders) if holders > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert not (free & cached or free & used or cached & used), "a page is in two states"
        assert len(free) + len(used) + len(cached) == self.num_pages, "free + used + cached != total"
        assert {h: p for p, h in self._hash_of.items()} == self._page_of, "hashes and pages disagree"
        assert len(self.events) == len(self._page_of), "events and pages disagree"
        assert cached <= self._hash_of.keys() and not (free & self._hash_of.keys()), "cached pages need a hash"
        if self.slots is not None:
            self.slots.check(used | cached)

    def _set_free(self, page: int) -> None:
        self._free.append(page)
        if self.slots is not None:
            self.slots.end(page)

    def _free_slots(self, slots: PageSlots, count: int) -> None:
        """Evict open pages, least recently used first, until `count` slots are free."""
        if missing := max(0, count - slots.free):
            evicted = [page for page in self._cached if slots.takes_slot(page)][:missing]
            for page in evicted:
                self._set_free(self._evict(page))

    def _evict(self, page: int | None = None) -> int:
        """Forget a cached page's content; None: of the one least recently used."""
        if page is None:
            page = next(iter(self._cached))
        del self._cached[page]
        page_hash = self._forget_hash(page)
        if self._tier is not None:
            self._tier.store(page_hash, page)
        return page

    def _forget_hash(self, page: int) -> PageHash:
        page_hash = self._hash_of.pop(page)
        del self._page_of[page_hash]
        self.events.remove(page_hash)
        return page_hash
