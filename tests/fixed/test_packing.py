"""A step over pages that can be open and closed at once: each sequence says which it reads closed."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.batch.packing import pack

PAGE = 4
OPEN = {0: 5, 1: 3, 3: 0, 4: 1, 6: 2}
"""Open slots of pages."""
CLOSED = {1: 1, 2: 2, 3: 3, 6: 6}
"""Closed slots of pages: pages 1, 3 and 6 have both."""


@dataclass
class BothForms:
    """Where pages lie."""

    lead: int = 1

    def find(self, pages: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        each = (np.array([slots.get(page, -1) for page in range(8)]) for slots in (OPEN, CLOSED))
        opened, closed = (slots[pages] for slots in each)
        return opened, closed


def test_each_sequence_reads_its_own_pages_closed() -> None:
    packed = pack(
        [
            SequenceSlice([1], 18, [0, 1, 2, 3, 4], 1, closed=3),
            SequenceSlice([2], 18, [0, 1, 2, 3, 4], 1, closed=2),
            SequenceSlice([3, 4], 11, [0, 1, 3, 4], 1, closed=0),
            SequenceSlice([5], 1, [4, 7], 1, closed=0),  # a page with no slot behind those in use
            SequenceSlice([6], 8, [4, 2, 3], 1),
            SequenceSlice([7], 4, [1, 3], 1),
        ],
        PAGE,
        BothForms(),
    )
    assert packed.closed_tokens.tolist() == [16, 12, 0, 8, 0, 0]
    assert packed.page_tables.tolist() == [
        [5, 1, 2, 3, 1],
        [5, 1, 2, 0, 1],
        [1, 0, 0, 0, 0],
        [1, 2, 0, 0, 0],
        [3, 0, 0, 0, 0],
        [5, 3, 0, 1, 0],
    ]
    assert packed.slots.tolist() == [4 * 1 + 2, 4 * 1 + 2, 4 * 1 + 1, 0, 0, 4 * 0 + 3, 4 * 1]


@pytest.mark.parametrize(
    ("table", "start", "closed", "why"),
    [
        ([0, 1, 2, 4], 12, 1, "page 2 is to be read open and has no open slot"),
        ([0, 4, 1, 3], 12, 2, "page 4 is to be read closed and has no closed slot"),
        ([2, 1, 3], 8, 1, "page 2 is to be read open and has no open slot"),
        ([0, 7], 4, 0, "page 7 is to be read open and has no open slot"),
        ([2, 1, 3], 8, None, "a closed page lies behind an open one, or among the first 1"),
        ([0, 1, 2, 4], 12, None, "a closed page lies behind an open one"),
        ([0, 7], 4, None, "page 7 is to be read closed and has no closed slot"),
        ([0, 1, 2], 11, 2, "a closed page is to be written"),
        ([0, 1, 2], 8, 7, "a closed page is to be written"),
    ],
)
def test_a_form_that_a_page_does_not_have_is_an_error(
    table: list[int], start: int, closed: int | None, why: str
) -> None:
    with pytest.raises(RuntimeError, match=why):
        pack([SequenceSlice([9], start, table, 1, closed=closed)], PAGE, BothForms())
