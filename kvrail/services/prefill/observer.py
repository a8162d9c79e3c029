"""From the engine's thread to the event loop: which pages a step has completed."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import torch

from kvrail.engine.request.requests import WrittenPages
from kvrail.transfer.pieces import Piece
from kvrail.transfer.sending import PageSender
from kvrail.worker.process import Worker

_LOOK_S = 0.0005
"""Between looks whether a step is done. A thread that waited for the event would keep a core busy."""


class PageObserver:
    """Passes on, from the engine's thread to the loop, which pages each group of layers has completed.

    A group's KV fills a frame, so that the loop hears of a step no more often than frames can leave.

    On a GPU the engine enqueues a step, and tells of its layers, while the one before computes. Were these encoded at
    once, what is left of the step before would come behind them on the transfers' stream, and wait for a whole step. So
    the loop hears of a step when the one before is done; its own layers are then encoded as they come.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._holder = ThreadPoolExecutor(1, thread_name_prefix="written")
        self._before: torch.Event | None = None  # the end of the step before the current one
        self._end: torch.Event | None = None  # of the last step that has been enqueued
        self._worker: Worker | None = None
        self._senders: dict[str, PageSender] = {}
        self._step: Sequence[WrittenPages] = ()
        self._first_layer = self._group = 0

    def attach(self, worker: Worker) -> None:
        """Name the worker whose engine calls; before it starts."""
        self._worker = worker

    def layers_written(self, layers: range, written: Sequence[WrittenPages]) -> None:
        """The work of neighbouring layers of the current step is enqueued, after that of the layers before them."""
        assert self._worker is not None
        if written is not self._step:
            self._step, self._first_layer, self._group = written, 0, self._layers_per_frame(written)
            self._before = self._end
        end = layers.stop
        if end + len(layers) - self._first_layer <= self._group and end < self._worker.loaded.layout.num_layers:
            return  # the next ones fit into the same frame
        mark = self._worker.side.mark()
        complete = range(self._first_layer, end), written, mark
        self._first_layer = end
        if mark is None:
            self._loop.call_soon_threadsafe(self._add, *complete)
            return
        self._holder.submit(self._hold, self._before, *complete)
        self._end = mark

    def watch(self, request_id: str, sender: PageSender) -> None:
        """Pass the pages of a request of the engine to `sender`."""
        self._senders[request_id] = sender

    def forget(self, request_id: str) -> None:
        """Stop passing them."""
        self._senders.pop(request_id, None)

    async def heard(self) -> None:
        """Return once the loop has heard of all layers that the engine has told of by now."""
        if self._end is None:
            await asyncio.sleep(0)
        else:
            await asyncio.wrap_future(self._holder.submit(lambda: None))

    def _hold(
        self, before: torch.Event | None, layers: range, written: Sequence[WrittenPages], ready: torch.Event | None
    ) -> None:
        """Pass them on when `before` has happened; in a thread of its own, one after the other."""
        while before is not None and not before.query():
            sleep(_LOOK_S)
        self._loop.call_soon_threadsafe(self._add, layers, written, ready)

    def _add(self, layers: range, written: Sequence[WrittenPages], ready: torch.Event | None) -> None:
        for pages in written:
            sender = self._senders.get(pages.request_id)
            if sender is not None:
                sender.add(Piece(layers.start, layers.stop, pages.first_page, pages.end_page, ready))

    def _layers_per_frame(self, written: Sequence[WrittenPages]) -> int:
        """Layers of a step's pages that fill the smallest frame of those that wait for them; 1 or more."""
        groups = []
        for pages in written:
            sender = self._senders.get(pages.request_id)
            if sender is not None:
                layout = sender.outgoing.layout
                layer_bytes = (pages.end_page - pages.first_page) * layout.page_bytes // layout.num_layers
                groups.append(sender.outgoing.frame_bytes // layer_bytes)
        return max(1, min(groups, default=1))
