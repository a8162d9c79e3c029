"""The engine's events on an asyncio loop: one stream a request."""

import asyncio
from collections.abc import AsyncIterator

from kvrail.engine.engine import Engine
from kvrail.engine.events import Delivery, Event, Failed, Finished, Prefilled
from kvrail.engine.requests import EngineRequest
from kvrail.errors import InvalidRequestError, KvrailError


class EventRouter:
    """Carries events from the engine's thread to the streams that wait for them on `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[str, asyncio.Queue[Event]] = {}

    def deliver(self, events: Delivery) -> None:
        """Hand over a batch of events; called from any thread, wakes the loop once."""
        if events and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: Delivery) -> None:
        for request_id, event in events:
            queue = self._queues.get(request_id)
            if queue is not None:
                queue.put_nowait(event)

    def open(self, engine: Engine, request: EngineRequest) -> "EventStream":
        """Submit a request; raises what `Engine.submit` raises. The stream must be closed."""
        queue: asyncio.Queue[Event] = asyncio.Queue()
        if request.request_id in self._queues:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        self._queues[request.request_id] = queue
        try:
            engine.submit(request)
        except BaseException:
            del self._queues[request.request_id]
            raise
        return EventStream(self, engine, request.request_id, queue)

    def forget(self, request_id: str) -> None:
        """Stop carrying a request's events."""
        self._queues.pop(request_id, None)


class EventStream:
    """Events of one request, until it ends. Closing it drops the request and returns its pages."""

    def __init__(self, router: EventRouter, engine: Engine, request_id: str, queue: "asyncio.Queue[Event]") -> None:
        self._router = router
        self._engine = engine
        self._request_id = request_id
        self._queue = queue

    async def get(self) -> Event:
        """The next event; raises the error of a request that failed."""
        event = await self._queue.get()
        if isinstance(event, Failed):
            raise event.error
        return event

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self.get()
            yield event
            if isinstance(event, Finished | Prefilled):
                return

    def fail(self, error: KvrailError) -> None:
        """End the stream with an error from outside the engine; called on the loop."""
        self._queue.put_nowait(Failed(error))

    def close(self) -> None:
        """Drop the request if it still lives."""
        self._router.forget(self._request_id)
        self._engine.abort(self._request_id)
