"""From the engine's thread to the event loop: which pages a step has completed."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from kvrail.engine.request.requests import WrittenPages
from kvrail.transfer.pieces import Piece
from kvrail.transfer.sending import PageSender
from kvrail.transfer.streams import SideStream


class PageObserver:
    """Passes on, from the engine's thread to the loop, which pages each group of layers has completed.

    A group's KV fills a frame, so that the loop wakes no more often than frames can leave.

    On a GPU the engine enqueues a step, and reports its layers, while the one before computes. If these were encoded at
    once, what is left of the step before would come behind them on the transfers' stream, and wait for a whole step. So
    a thread waits for the end of the step before, then passes the layers on; they are encoded as they are computed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, side: SideStream) -> None:
        self._loop = loop
        self._side = side
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="written")
        self._end: torch.Event | None = None  # of the last step that has been enqueued
        self._senders: dict[str, PageSender] = {}

    def begin(self, written: Sequence[WrittenPages]) -> Callable[[int], None]:
        """A step begins that completes these pages of each layer; see LayerListener."""
        waiting = [(sender, pages) for pages in written if (sender := self._senders.get(pages.request_id)) is not None]
        group = max(1, min((_layers_per_frame(*each) for each in waiting), default=1))
        num_layers = waiting[0][0].outgoing.layout.num_layers if waiting else 0
        before, first_layer, enqueued = self._end, 0, 0

        def layer_written(layer: int) -> None:
            nonlocal first_layer, enqueued
            end, size = layer + 1, layer + 1 - enqueued
            enqueued = end
            if end + size - first_layer <= group and end < num_layers:
                return  # the next ones fit into the same frame
            mark = self._side.mark(awaited=True)
            complete = waiting, range(first_layer, end), mark
            first_layer = end
            if mark is None:
                self._loop.call_soon_threadsafe(_add, *complete)
                return
            self._waiter.submit(self._pass_on, before, *complete)
            self._end = mark

        return layer_written

    @contextmanager
    def watching(self, request_id: str, sender: PageSender) -> Iterator[None]:
        """Inside, the pages of a request of the engine are passed to `sender`."""
        self._senders[request_id] = sender
        try:
            yield
        finally:
            del self._senders[request_id]

    async def passed_on(self) -> None:
        """Return once all layers that the engine has reported by now are with their senders."""
        if self._end is None:
            await asyncio.sleep(0)
        else:
            await asyncio.wrap_future(self._waiter.submit(lambda: None))

    def _pass_on(self, before: torch.Event | None, *complete: Any) -> None:
        """Pass layers on once `before` has happened; in a thread of its own, one after the other."""
        if before is not None:
            before.synchronize()
        self._loop.call_soon_threadsafe(_add, *complete)


def _add(waiting: Sequence[tuple[PageSender, WrittenPages]], layers: range, ready: torch.Event | None) -> None:
    for sender, pages in waiting:
        sender.add(Piece(layers.start, layers.stop, pages.first_page, pages.end_page, ready))


def _layers_per_frame(sender: PageSender, pages: WrittenPages) -> int:
    """Layers of these pages that fill a frame."""
    layout = sender.outgoing.layout
    layer_bytes = (pages.end_page - pages.first_page) * layout.page_bytes // layout.num_layers
    return sender.outgoing.frame_bytes // layer_bytes
