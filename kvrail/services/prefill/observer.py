"""From the engine's thread to the event loop: which pages a step has completed."""

import asyncio
from collections.abc import Sequence

import torch

from kvrail.engine.requests import WrittenPages
from kvrail.transfer.pieces import Piece
from kvrail.transfer.sending import PageSender
from kvrail.worker import Worker


class PageObserver:
    """Passes on, from the engine's thread to the loop, which pages each group of layers has completed.

    A group's KV fills a frame, so that the loop hears of a step no more often than frames can leave.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
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
        end = layers.stop
        if end + len(layers) - self._first_layer <= self._group and end < self._worker.loaded.layout.num_layers:
            return  # the next ones fit into the same frame
        mark = self._worker.side.mark()
        self._loop.call_soon_threadsafe(self._add, range(self._first_layer, end), written, mark)
        self._first_layer = end

    def watch(self, request_id: str, sender: PageSender) -> None:
        """Pass the pages of a request of the engine to `sender`."""
        self._senders[request_id] = sender

    def forget(self, request_id: str) -> None:
        """Stop passing them."""
        self._senders.pop(request_id, None)

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
