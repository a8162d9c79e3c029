"""Which pages are open, in slots of plain memory, and which are closed, in slots of their own. No tensors.

A page is allocated open. Once it is full and final it waits to be closed. It stays open, every bit of it, where its
raw tiles find no spare unit.

Attention reads a sequence's closed pages first, then its open ones. So in every page table no closed page follows an
open one: a page is closed after all pages that some table has before it, and a prefix is shared up to the first closed
page behind an open one. A page that a transfer reads or writes is pinned: it keeps its form.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvrail.engine.kv.slots import MOST_AT_ONCE, Closing

_NONE = int(np.iinfo(np.int32).min)


class LosslessSlots:
    """The slots of `num_pages` pages: at most `open_slots` are open. See kvrail.engine.kv.slots.PageSlots.

    slot_of: int32 [num_pages]: an open page's slot; -1 - slot of a closed one; the least integer for a free one. Before
    `clear` the first pages have a slot each, for trials that allocate none.
    lead, find: see engine.batch.packing.PageForms.
    """

    lead = 0

    def __init__(self, num_pages: int, open_slots: int) -> None:
        self.open_slots = open_slots
        self.closed_slots = num_pages - open_slots
        self.slot_of = np.arange(num_pages, dtype=np.int32)
        self.slot_of[open_slots:] = _NONE
        self._free: list[int] = []
        self._free_closed = list(range(self.closed_slots))[::-1]
        self._generation = [0] * num_pages
        self._before: dict[int, set[tuple[int, int]]] = {}  # pages in tables before this one, with their generations
        self._waiting: dict[int, None] = {}  # full pages, in the order in which they were filled
        self._closing: list[tuple[int, int, int]] = []  # page, generation, closed slot
        self._stuck: set[int] = set()  # full pages that stay open
        self._dropped: list[int] = []
        self._pins: Counter[int] = Counter()

    def clear(self) -> None:
        """Free all slots."""
        self.slot_of[:] = _NONE
        self._free = list(range(self.open_slots))[::-1]

    @property
    def free(self) -> int:
        """Open slots that no page holds."""
        return len(self._free)

    @property
    def free_closed(self) -> int:
        """Closed slots that no page holds."""
        return len(self._free_closed)

    @property
    def closed(self) -> int:
        """Closed pages, and those that are being closed."""
        return self.closed_slots - len(self._free_closed)

    @property
    def stuck(self) -> int:
        """Full pages that stay open, since they or pages before them found no spare unit."""
        return len(self._stuck)

    @property
    def urgent(self) -> bool:
        """No sequence waits for a closing: it reads pages in the form that they have."""
        return False

    def is_open(self, page: int) -> bool:
        """Whether a page holds an open slot."""
        return bool(self.slot_of[page] >= 0)

    takes_slot = is_open

    def is_closed(self, page: int) -> bool:
        """Whether a page holds a closed slot."""
        return bool(_NONE < self.slot_of[page] < 0)

    def count_taken(self, pages: Iterable[int]) -> int:
        """How many of these pages hold an open slot."""
        return int((self.slot_of[list(pages)] >= 0).sum())

    def find(self, pages: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The open slots and the closed slots of `pages`."""
        slots = self.slot_of[pages].astype(np.int64)
        return slots, np.where(slots == _NONE, -1, -1 - slots)

    def begin(self, page: int) -> None:
        """A page was allocated: it is open, and what it held counts no more."""
        self._generation[page] += 1
        self.slot_of[page] = self._free.pop()

    def end(self, page: int) -> None:
        """A page's content counts no more."""
        if self.is_open(page):
            self._free.append(int(self.slot_of[page]))
        elif self.is_closed(page):
            self._drop(-1 - int(self.slot_of[page]))
        self.slot_of[page] = _NONE
        self._stuck.discard(page)
        self._waiting.pop(page, None)
        self._before.pop(page, None)

    def follow(self, pages: Sequence[int]) -> None:
        """A page table has these pages, one behind the other."""
        for before, page in itertools.pairwise(pages):
            self._before.setdefault(page, set()).add((before, self._generation[before]))

    def fill(self, page: int) -> None:
        """A page is full and final."""
        if self.is_open(page) and page not in self._stuck:
            self._waiting[page] = None

    def complete(self, page_table: Sequence[int], number: int) -> None:
        """Page `number` of a page table is full and final."""
        self.follow(page_table[max(number - 1, 0) : number + 1])
        self.fill(page_table[number])

    def usable(self, pages: Sequence[int]) -> list[int]:
        """The leading pages that a table can begin with."""
        opened = False
        for number, page in enumerate(pages):
            if opened and not self.is_open(page):
                return list(pages[:number])
            opened = opened or self.is_open(page)
        return list(pages)

    def pin(self, pages: Iterable[int]) -> None:
        """A transfer reads or writes these pages."""
        self._pins.update(pages)

    def unpin(self, pages: Iterable[int]) -> None:
        """It no longer does."""
        for page in pages:
            self._pins[page] -= 1
            if not self._pins[page]:
                del self._pins[page]

    def ready(self) -> list[int]:
        """Pages that can be closed now, in an order in which they can; none while others are being closed."""
        found: dict[int, None] = {}
        if self._closing:
            return []
        for page in list(self._waiting):
            before = self._pages_before(page)
            if any(each in self._stuck for each in before):
                self._give_up(page)
            elif page not in self._pins and all(each in found or not self.is_open(each) for each in before):
                found[page] = None
                if len(found) == MOST_AT_ONCE:
                    break
        return list(found)

    def choose(self, pages: Sequence[int]) -> Closing:
        """Close the first of these `ready` pages for which closed slots are free; `settle` must follow."""
        chosen = list(pages[: self.free_closed])
        sources = [int(self.slot_of[page]) for page in chosen]
        targets = [self._free_closed.pop() for _ in chosen]
        for page in chosen:
            del self._waiting[page]
        self._closing = [(page, self._generation[page], slot) for page, slot in zip(chosen, targets, strict=True)]
        dropped, self._dropped = self._dropped, []
        return Closing(sources, targets, dropped)

    def settle(self, failed: Sequence[int]) -> int:
        """The chosen pages were closed; returns how many count as closed now.

        failed: of each, how many tiles found no spare unit.
        """
        closing, self._closing = self._closing, []
        closed = 0
        for (page, generation, slot), tiles in zip(closing, failed, strict=True):
            if self._generation[page] != generation or not self.is_open(page):  # freed meanwhile
                self._drop(slot)
                continue
            before = self._pages_before(page)
            if tiles or any(each in self._stuck for each in before):
                self._give_up(page)
                self._drop(slot)
            elif page in self._pins or any(map(self.is_open, before)):  # a table was begun meanwhile
                self._waiting[page] = None
                self._drop(slot)
            else:
                self._free.append(int(self.slot_of[page]))
                self.slot_of[page] = -1 - slot
                closed += 1
        return closed

    def check(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless the slots add up. held: pages that are used or cached."""
        opened = [int(slot) for slot in self.slot_of if slot >= 0]
        closed = [-1 - int(slot) for slot in self.slot_of if _NONE < slot < 0]
        closing = [slot for _, _, slot in self._closing]
        assert sorted([*opened, *self._free]) == list(range(self.open_slots)), "free + taken != open slots"
        taken = sorted([*closed, *closing, *self._free_closed])
        assert taken == list(range(self.closed_slots)), "free + taken != closed slots"
        assert {page for page, slot in enumerate(self.slot_of) if slot != _NONE} == set(held), "a page without a slot"

    def _pages_before(self, page: int) -> list[int]:
        """Pages that tables have before this one, of those that are what they were then."""
        known = self._before.get(page, set())
        known -= {(each, generation) for each, generation in known if self._generation[each] != generation}
        return [each for each, _ in known]

    def _drop(self, slot: int) -> None:
        self._free_closed.append(slot)
        self._dropped.append(slot)

    def _give_up(self, page: int) -> None:
        self._waiting.pop(page, None)
        self._stuck.add(page)
