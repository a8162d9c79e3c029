"""Which page may be closed when: rules that random traffic meets too rarely."""

import pytest

from kvrail.engine.kv.lossless.slots import LosslessSlots


def slots_of(pages: int = 4) -> LosslessSlots:
    """With this many open pages, and room to close all of them."""
    slots = LosslessSlots(2 * pages, pages)
    slots.clear()
    for page in range(pages):
        slots.begin(page)
    return slots


def close(slots: LosslessSlots, failed: dict[int, int] | None = None) -> list[int]:
    ready = slots.ready()
    slots.choose(ready)
    slots.settle([(failed or {}).get(page, 0) for page in ready])
    return [page for page in ready if slots.is_closed(page)]


def test_pages_close_in_the_order_of_every_table() -> None:
    slots = slots_of()
    slots.follow([0, 2])
    slots.follow([1, 2])
    slots.fill(2)
    slots.fill(1)
    assert close(slots) == [1]
    slots.fill(0)
    assert slots.ready() == [0]  # page 2 was filled first, so it is looked at before
    assert close(slots) == [0] and close(slots) == [2]


def test_a_page_before_that_was_freed_holds_nothing_up() -> None:
    slots = slots_of()
    slots.follow([0, 1])
    slots.fill(1)
    assert not slots.ready()
    slots.end(0)
    slots.begin(5)
    slots.end(5)
    slots.begin(0)  # another content
    assert close(slots) == [1]
    slots.check(range(4))


def test_what_happens_while_a_page_is_being_closed() -> None:
    for happens in ("pinned", "followed", "freed", "freed and taken"):
        slots = slots_of()
        slots.fill(1)
        slots.choose(slots.ready())
        assert not slots.ready()
        if happens == "pinned":
            slots.pin([1])
        elif happens == "followed":
            slots.follow([0, 1])
        else:
            slots.end(1)
        if happens == "freed and taken":
            slots.begin(1)
        assert slots.settle([0]) == 0 and not slots.is_closed(1), happens
        slots.check({0, 2, 3} if happens == "freed" else range(4))
        slots.unpin([1] if happens == "pinned" else [])
        slots.fill(0)
        dropped = slots.choose(slots.ready()).dropped
        assert len(dropped) == 1 and dropped == list(set(dropped)), happens  # its spare units return
        slots.settle([0] * 2 if happens in ("pinned",) else [0])


def test_a_prefix_ends_at_a_closed_page_behind_an_open_one() -> None:
    slots = slots_of()
    slots.fill(1)
    assert close(slots) == [1]
    assert slots.usable([0, 1, 2]) == [0] and slots.usable([1, 0, 2]) == [1, 0, 2]


def test_pages_behind_one_without_a_spare_unit_stay_open() -> None:
    slots = slots_of()
    slots.follow([0, 1, 2])
    for page in (0, 1, 2):
        slots.fill(page)
    assert close(slots, {1: 3}) == [0]
    assert slots.stuck == 2 and not slots.ready()
    slots.fill(1)
    assert not slots.ready()
    slots.check(range(4))
    slots.end(1)
    assert slots.stuck == 1


@pytest.mark.parametrize("room", [0, 1, 5])
def test_no_more_pages_are_closed_than_there_is_room_for(room: int) -> None:
    slots = LosslessSlots(4 + room, 4)
    slots.clear()
    for page in range(4):
        slots.begin(page)
        slots.fill(page)
    assert len(slots.choose(slots.ready()).targets) == min(room, 4)
    slots.settle([0] * min(room, 4))
    slots.check(range(4))
