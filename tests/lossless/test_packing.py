"""A step over pages in slots: tables, closed tokens, and the integers that a GPU gets."""

import pytest
import torch

from kvrail.engine.attention.meta import decode
from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.batch.packing import pack
from kvrail.engine.kv.lossless.slots import LosslessSlots
from kvrail.engine.step.buffers import StepBuffer, decode_size, mixed_size

PAGE = 4


def some_slots() -> LosslessSlots:
    """Pages 0 to 2 and 5 closed, in slots 0 to 2 and 3; pages 3 and 4 open; page 6 free."""
    slots = LosslessSlots(12, 6)
    slots.clear()
    for page in range(6):
        slots.begin(page)
    for page in (0, 1, 2, 5):
        slots.fill(page)
    slots.choose(slots.ready())
    slots.settle([0] * 4)
    return slots


def test_pages_in_slots() -> None:
    slots = some_slots()
    packed = pack(
        [
            SequenceSlice([7, 8], 8, [0, 2, 3], 1),
            SequenceSlice([9], 4, [5, 4], 1),
            SequenceSlice([6], 2, [4, 6], 1),  # a free page behind those in use
        ],
        PAGE,
        slots,
    )
    assert packed.closed_tokens.tolist() == [4, 0, 8]
    closed = [-1 - int(slots.slot_of[page]) for page in (5, 0, 2)]
    three, four = int(slots.slot_of[3]), int(slots.slot_of[4])
    assert packed.page_tables.tolist() == [[closed[0], four, 0], [four, 0, 0], [closed[1], closed[2], three]]
    assert packed.slots.tolist() == [4 * four, 4 * four + 2, 4 * three, 4 * three + 1]


@pytest.mark.parametrize(("table", "start"), [([3, 0, 4], 8), ([0, 2, 3], 7), ([0, 2], 5)])
def test_an_order_that_attention_cannot_read_or_a_write_into_a_closed_page_is_an_error(table, start) -> None:
    with pytest.raises(RuntimeError, match="closed page"):
        pack([SequenceSlice([7], start, table, 1)], PAGE, some_slots())


def test_a_free_page_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="page 6 is to be read closed and has no closed slot"):
        pack([SequenceSlice([7], 4, [0, 6], 1)], PAGE, some_slots())


@pytest.mark.parametrize("mixed", [False, True])
def test_a_captured_step_gets_them_too(mixed: bool) -> None:
    size = mixed_size(16, 4, 5, 2, 8, 8, closed=True) if mixed else decode_size(4, 5, 2, closed=True)
    buffer = StepBuffer(size, torch.device("cpu"))
    slots = some_slots()
    for tables in ([[0, 1, 2, 3], [5, 4]], [[5, 3]]):
        packed = pack([SequenceSlice([7], 4 * len(each) - 3, each, 1) for each in tables], PAGE, slots)
        buffer.fill(packed)
        buffer.send()
        meta = decode(buffer.there.data, size.extents.plan())
        rest = [0] * (4 - len(tables))
        assert meta.closed_tokens.tolist() == [*packed.closed_tokens.tolist(), *rest]
        assert meta.closed_tokens.dtype == torch.int32
    assert decode(buffer.there.data, decode_size(4, 5, 2).extents.plan()).closed_tokens is None
