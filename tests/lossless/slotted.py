"""A bench whose full pages are closed: cells in slots, some of which find no spare unit, some of which close late."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvrail.engine.kv.lossless.slots import LosslessSlots
from kvrail.engine.kv.slots import Closing


class Outcome:
    def __init__(self, failed: list[int], polls: int) -> None:
        self.failed = failed
        self._polls = polls

    def known(self, *, wait: bool = False) -> bool:
        self._polls -= 1
        return wait or self._polls < 0


class SlottedCells:
    """Stands for LosslessCache, and for the cells of a page machine. odd: how likely a page finds no spare unit."""

    raw_tiles = 0
    page_tiles = 1

    def __init__(self, num_pages: int, open_pages: int, page_size: int, odd: float = 0.0, seed: int = 0) -> None:
        self.slots = LosslessSlots(num_pages, open_pages)
        self.open = np.full((open_pages, page_size), -1, dtype=np.int64)
        self.closed = np.full((num_pages - open_pages, page_size), -1, dtype=np.int64)
        self.dropped: set[int] = set()
        self.closings = self.failures = self.copied_closed = 0
        self._rng = random.Random(seed)
        self._odd = odd

    def __getitem__(self, pages: int | list[int] | tuple[int, int]) -> np.ndarray:
        if isinstance(pages, tuple):
            return self._page(pages[0])[pages[1]]
        if isinstance(pages, int):
            self.copied_closed += self.slots.is_closed(pages)
            return self._page(pages)
        forms = [self.slots.is_closed(page) for page in pages]
        assert forms == sorted(forms, reverse=True), "a closed page lies behind an open one"
        return np.stack([self._page(page) for page in pages])

    def __setitem__(self, place: Any, value: Any) -> None:
        page, offset = place if isinstance(place, tuple) else (place, slice(None))
        assert self.slots.is_open(page), "a page that is not open is written"
        self.open[self.slots.slot_of[page], offset] = value

    def close(self, closing: Closing) -> Outcome:
        assert len(set(closing.targets)) == len(closing.targets) == len(closing.sources)
        assert not any(-1 in self.open[slot] for slot in closing.sources), "a page that is not full is closed"
        self.closed[closing.dropped] = -1
        self.closed[closing.targets] = self.open[closing.sources]
        failed = [int(self._rng.random() < self._odd) for _ in closing.sources]
        self.closings += len(failed)
        self.failures += sum(failed)
        return Outcome(failed, self._rng.randrange(4))

    def take_in(self, outcome: Outcome) -> None:
        pass

    def _page(self, page: int) -> np.ndarray:
        slot = int(self.slots.slot_of[page])
        return self.open[slot] if slot >= 0 else self.closed[-1 - slot]


def pages_in(cells: SlottedCells, pages: Sequence[int]) -> list[bool]:
    """Which pages are closed."""
    return [cells.slots.is_closed(page) for page in pages]
