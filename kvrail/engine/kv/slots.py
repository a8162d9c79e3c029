"""Where pages lie in a pool that closes full ones: what the books of pages, closers and checks need of it.

An open page lies in a slot of plain tensors, which are fewer than pages. `kvrail.engine.kv.lossless.slots` and
`kvrail.engine.kv.fixed.slots` are the two kinds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

MOST_AT_ONCE = 64
"""Pages that are closed at once, so that no step waits long for them."""
FEWEST_AT_ONCE = 8
"""Pages that are worth a closing, as long as open slots are not scarce."""


@dataclass(frozen=True, slots=True)
class Closing:
    """Pages to close. sources: their open slots. targets: closed slots. dropped: closed slots whose content is gone."""

    sources: list[int]
    targets: list[int]
    dropped: list[int]


class PageSlots(Protocol):
    """The slots of a pool's pages. The engine calls it with its lock held.

    lead: pages at a sequence's beginning that are always read open.
    """

    open_slots: int
    lead: int

    def clear(self) -> None:
        """Free all slots: before, the first pages have an open one each, for trials that allocate none."""

    @property
    def free(self) -> int:
        """Open slots that the next pages can have."""

    @property
    def free_closed(self) -> int:
        """Pages that can be closed before closed slots run out."""

    @property
    def closed(self) -> int:
        """Closed pages."""

    @property
    def stuck(self) -> int:
        """Full pages that cannot be closed."""

    @property
    def urgent(self) -> bool:
        """Whether sequences wait until pages are closed."""

    def find(self, pages: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The open slots and the closed slots of `pages`, of any shape; less than 0 where a page has none."""

    def is_closed(self, page: int) -> bool:
        """Whether a page can be read closed."""

    def takes_slot(self, page: int) -> bool:
        """Whether a page holds an open slot that `free` does not count."""

    def count_taken(self, pages: Iterable[int]) -> int:
        """How many of these pages hold an open slot that `free` does not count."""

    def begin(self, page: int) -> None:
        """A page was allocated: it is open, and what it held counts no more."""

    def end(self, page: int) -> None:
        """A page's content counts no more."""

    def follow(self, pages: Sequence[int]) -> None:
        """A page table has these pages, one behind the other."""

    def complete(self, page_table: Sequence[int], number: int) -> None:
        """Page `number` of a page table is full and final: it may be closed."""

    def usable(self, pages: Sequence[int]) -> list[int]:
        """The leading pages that a table can begin with."""

    def pin(self, pages: Iterable[int]) -> None:
        """A transfer reads or writes these pages."""

    def unpin(self, pages: Iterable[int]) -> None:
        """It no longer does."""

    def ready(self) -> list[int]:
        """Pages that can be closed now, at most MOST_AT_ONCE; none while others are being closed."""

    def choose(self, pages: Sequence[int]) -> Closing:
        """Close the first of these `ready` pages for which there is room; `settle` must follow."""

    def settle(self, failed: Sequence[int]) -> int:
        """The chosen pages were closed; returns how many count as closed now.

        failed: of each, how many tiles could not be closed.
        """

    def check(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless the slots add up. held: pages that are used or cached."""
