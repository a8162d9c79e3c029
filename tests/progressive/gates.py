"""Later stages that wait for drafts: between two ends in one process hardly a draft would be made otherwise."""

import asyncio
from collections import Counter
from collections.abc import Callable

from kvrail.engine.request.events import Drafted, Event
from kvrail.runtime.logs import request_id
from kvrail.services.decode.progress import Progress
from kvrail.transfer.send_queue import SendQueue
from tests.cluster.staged import hold_later_stages


class Gates:
    """A request's later stages leave once it has made as many drafts as it was told to make.

    on_event: called with each request's id and event, after a gate may have opened. drafts: made so far, by request,
    those included that were dropped. queues: those that held later stages.
    """

    def __init__(self, monkeypatch, on_event: Callable[[str, Event], None] = lambda name, event: None) -> None:
        self.drafts: Counter[str] = Counter()
        self.queues: set[SendQueue] = set()
        self._wanted: dict[str, int] = {}
        self._open: dict[str, asyncio.Event] = {}
        self._on_event = on_event
        take, hold = Progress.take, SendQueue.hold

        def heard(progress: Progress, event: Event):
            reply = take(progress, event)
            self._hear(progress.request.caller_id, event)
            return reply

        def held(queue: SendQueue, payload_bytes: int) -> None:
            self.queues.add(queue)
            hold(queue, payload_bytes)

        monkeypatch.setattr(Progress, "take", heard)
        monkeypatch.setattr(SendQueue, "hold", held)
        hold_later_stages(monkeypatch, self._passed)

    def close(self, name: str, drafts: int) -> None:
        """Hold back the later stages of request `name` until so many drafts were made."""
        self._wanted[name] = drafts
        self._open[name] = asyncio.Event()
        self._look(name)

    def open_all(self) -> None:
        """Let everything through that waits now."""
        for gate in self._open.values():
            gate.set()

    async def _passed(self) -> None:
        gate = self._open.get(request_id.get())
        if gate is not None:
            await gate.wait()

    def _hear(self, name: str, event: Event) -> None:
        if isinstance(event, Drafted):
            self.drafts[name] += len(event.token_ids)
            self._look(name)
        self._on_event(name, event)

    def _look(self, name: str) -> None:
        if self.drafts[name] >= self._wanted.get(name, 0) and name in self._open:
            self._open[name].set()
