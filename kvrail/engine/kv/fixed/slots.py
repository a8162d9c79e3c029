"""Which pages are open, which are closed, and which are both. No tensors.

Every page has a closed slot: its own number. Open slots are handed out. A page is allocated open, and once it is full
and final it waits to be closed; then it is in both forms. Once no table, copy or transfer needs it open its slot is
spare: another page may take it. Until then the page can still be read exactly.

A page with a refused tile is never closed, and neither is the first page of a sequence.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvrail.engine.kv.slots import MOST_AT_ONCE, Closing


class FixedSlots:
    """The slots of `num_pages` pages; at most `open_slots` are open. See kvrail.engine.kv.slots.PageSlots.

    open_slot: int32 [num_pages], each page's open slot; closed_slot: its own number where it is closed; -1: none.
    lead, find: see engine.batch.packing.PageForms.
    """

    lead = 1

    def __init__(self, num_pages: int, open_slots: int) -> None:
        self.open_slots = open_slots
        self.open_slot = np.arange(num_pages, dtype=np.int32)
        self.open_slot[open_slots:] = -1
        self.closed_slot = np.full(num_pages, -1, dtype=np.int32)
        self._free: list[int] = []
        self._spare: OrderedDict[int, None] = OrderedDict()  # pages whose open slot is spare, longest first
        self._needs = [0] * num_pages  # tables, copies and transfers that need it open
        self._generation = [0] * num_pages
        self._waiting: dict[int, None] = {}  # full pages, in the order in which they were filled
        self._wanted: dict[int, None] = {}  # those of them for which a sequence waits
        self._closing: list[tuple[int, int]] = []  # page, generation
        self._refused: set[int] = set()

    def clear(self) -> None:
        """Free all slots."""
        self.open_slot[:] = -1
        self._free = list(range(self.open_slots))[::-1]

    @property
    def free(self) -> int:
        """Open slots that no page holds, and spare ones."""
        return len(self._free) + len(self._spare)

    @property
    def free_closed(self) -> int:
        """No page lacks a closed slot."""
        return len(self.closed_slot)

    @property
    def closed(self) -> int:
        """Closed pages."""
        return int((self.closed_slot >= 0).sum())

    @property
    def stuck(self) -> int:
        """Pages with a tile that was refused."""
        return len(self._refused)

    @property
    def urgent(self) -> bool:
        """Whether sequences wait until pages are closed."""
        return bool(self._wanted)

    def is_open(self, page: int) -> bool:
        """Whether a page holds an open slot."""
        return bool(self.open_slot[page] >= 0)

    def is_closed(self, page: int) -> bool:
        """Whether a page can be read closed."""
        return bool(self.closed_slot[page] >= 0)

    def is_refused(self, page: int) -> bool:
        """Whether a tile of a page was refused: it stays open."""
        return page in self._refused

    def takes_slot(self, page: int) -> bool:
        """Whether a page holds an open slot that `free` does not count."""
        return self.is_open(page) and page not in self._spare

    def count_taken(self, pages: Iterable[int]) -> int:
        """How many of these pages hold an open slot that `free` does not count."""
        return sum(map(self.takes_slot, pages))

    def count_spare(self, pages: Iterable[int]) -> int:
        """How many of the slots that `free` counts hold these pages."""
        return sum(page in self._spare for page in pages)

    def find(self, pages: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The open slots and the closed slots of `pages`."""
        return self.open_slot[pages].astype(np.int64), self.closed_slot[pages].astype(np.int64)

    def begin(self, page: int) -> None:
        """A page was allocated: it is open, and its table needs it so."""
        self._generation[page] += 1
        if not self._free:
            self._take_away(next(iter(self._spare)))
        self.open_slot[page] = self._free.pop()
        self._needs[page] = 1

    def end(self, page: int) -> None:
        """A page's content counts no more."""
        self._spare.pop(page, None)
        if self.is_open(page):
            self._free.append(int(self.open_slot[page]))
        self.open_slot[page] = self.closed_slot[page] = -1
        self._needs[page] = 0
        for places in (self._waiting, self._wanted):
            places.pop(page, None)
        self._refused.discard(page)

    def need(self, pages: Iterable[int]) -> None:
        """One more table or copy needs these pages open, which they are."""
        for page in pages:
            self._needs[page] += 1
            self._spare.pop(page, None)

    def spare(self, pages: Iterable[int]) -> None:
        """The reverse of `need`, or of `begin`."""
        for page in pages:
            self._needs[page] -= 1
            self._offer(page)

    pin, unpin = need, spare

    def follow(self, pages: Sequence[int]) -> None:
        """A page may be closed before or after those before it."""

    def complete(self, page_table: Sequence[int], number: int) -> None:
        """Page `number` of a page table is full and final; it may be closed, unless it is the first."""
        page = page_table[number]
        if number and not self.is_closed(page) and page not in self._refused:
            self._waiting[page] = None

    def want(self, page: int) -> None:
        """A sequence waits until this page is closed, or will soon."""
        if page in self._waiting:
            self._wanted[page] = None

    def usable(self, pages: Sequence[int]) -> list[int]:
        """All of them: kvrail.engine.schedule.lossy_tables says what a table can begin with."""
        return list(pages)

    def ready(self) -> list[int]:
        """Pages that can be closed now, those first for which a sequence waits."""
        if self._closing:
            return []
        return [*self._wanted, *(page for page in self._waiting if page not in self._wanted)][:MOST_AT_ONCE]

    def choose(self, pages: Sequence[int]) -> Closing:
        """Close these `ready` pages; `settle` must follow."""
        for page in pages:
            del self._waiting[page]
            self._wanted.pop(page, None)
        self._closing = [(page, self._generation[page]) for page in pages]
        return Closing([int(self.open_slot[page]) for page in pages], list(pages), [])

    def settle(self, failed: Sequence[int]) -> int:
        """The chosen pages were closed; returns how many count as closed now. failed: refused tiles of each."""
        closing, self._closing = self._closing, []
        closed = 0
        for (page, generation), tiles in zip(closing, failed, strict=True):
            if self._generation[page] != generation or not self.is_open(page):  # freed meanwhile
                continue
            if tiles:
                self._refused.add(page)
                continue
            self.closed_slot[page] = page
            self._offer(page)
            closed += 1
        return closed

    def check(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless the slots add up. held: pages that are used or cached."""
        opened = {page for page, slot in enumerate(self.open_slot) if slot >= 0}
        closed = {page for page, slot in enumerate(self.closed_slot) if slot >= 0}
        taken = [int(self.open_slot[page]) for page in opened]
        assert sorted([*taken, *self._free]) == list(range(self.open_slots)), "free + taken != open slots"
        assert opened | closed == set(held), "a page without a slot"
        needed = {page for page, count in enumerate(self._needs) if count}
        assert min(self._needs) >= 0 and self._spare.keys() == (opened & closed) - needed, "spare slots do not add up"
        assert self._refused <= opened - closed, "a refused page is not open alone"
        assert self._wanted.keys() <= self._waiting.keys() <= opened - closed - self._refused, (
            "a page waits for nothing"
        )

    def _offer(self, page: int) -> None:
        """Its open slot is spare if the page is closed and not needed open."""
        if not self._needs[page] and self.is_closed(page) and self.is_open(page):
            self._spare[page] = None

    def _take_away(self, page: int) -> None:
        """Take a spare slot away: the page is closed alone from now on."""
        del self._spare[page]
        self._free.append(int(self.open_slot[page]))
        self.open_slot[page] = -1
