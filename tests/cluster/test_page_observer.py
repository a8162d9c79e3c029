"""What the loop hears of a step's layers, and when: a step that is enqueued ahead waits for the one before."""

import asyncio
import threading
from types import SimpleNamespace

from kvrail.engine.request.requests import WrittenPages
from kvrail.services.prefill.observer import PageObserver
from kvrail.values.layout import KVLayout

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, key_dim=8, value_dim=8, page_size=16, dtype="bfloat16")


class Sender:
    """Takes pieces; a frame holds two layers of three pages."""

    def __init__(self):
        self.outgoing = SimpleNamespace(layout=LAYOUT, frame_bytes=2 * 3 * LAYOUT.page_bytes // LAYOUT.num_layers)
        self.added = []

    def add(self, piece):
        self.added.append((piece.first_layer, piece.end_layer, piece.end_page))


class Side:
    """Marks that happen when they are told to."""

    def __init__(self):
        self.marks = []

    def mark(self, *, awaited):
        assert awaited
        mark = SimpleNamespace(done=threading.Event())
        mark.synchronize = mark.done.wait
        self.marks.append(mark)
        return mark


async def told(sender, count):
    async with asyncio.timeout(60):
        while len(sender.added) < count:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    return sender.added


async def test_layers_of_a_step_enqueued_ahead_come_behind_all_of_the_step_before():
    first, second, side = Sender(), Sender(), Side()
    observer = PageObserver(asyncio.get_running_loop(), side)
    with observer.watching("first", first), observer.watching("second", second):
        steps = [[WrittenPages("first", 0, 3)], [WrittenPages("second", 0, 3)], [WrittenPages("second", 3, 6)]]
        for step in steps[:2]:  # both are enqueued before anything is computed
            layer_written = observer.begin(step)
            for layer in range(4):
                layer_written(layer)
        assert await told(first, 2) == [(0, 2, 3), (2, 4, 3)]
        assert second.added == []
        side.marks[0].done.set()  # half of the first step
        assert await told(second, 0) == []
        side.marks[1].done.set()
        assert await told(second, 2) == [(0, 2, 3), (2, 4, 3)]
        observer.begin(steps[2])(3)  # all layers at once
        assert await told(second, 2) == [(0, 2, 3), (2, 4, 3)]
        side.marks[3].done.set()
        assert await told(second, 3) == [(0, 2, 3), (2, 4, 3), (0, 4, 6)]
