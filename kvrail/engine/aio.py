"""The engine's events on an asyncio loop: one `EngineEvents` a request."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from kvrail.engine.engine import Engine
from kvrail.engine.request.events import Delivery, Event, Failed, Finished, Prefilled
from kvrail.engine.request.requests import EngineRequest
from kvrail.errors import InvalidRequestError


class EventRouter:
    """Passes events from the engine's thread to the requests' `EngineEvents` on `loop`.

    Waking the loop costs a system call and contention for the interpreter's lock, so the loop is woken once for all
    events that are delivered before it looks.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[str, EngineEvents] = {}
        self._deliveries: deque[Delivery] = deque()
        self._called = False

    def deliver(self, events: Delivery) -> None:
        """Hand over a batch of events; called from any thread. One thread's events arrive in its order."""
        if not events or self._loop.is_closed():
            return
        # Append, then test the flag; `_dispatch` clears the flag, then looks. So it either sees these events or is
        # called again.
        self._deliveries.append(events)
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._dispatch)

    def _dispatch(self) -> None:
        self._called = False
        while self._deliveries:
            for request_id, event in self._deliveries.popleft():
                stream = self._streams.get(request_id)
                if stream is not None:
                    stream.put(event)

    def open(self, engine: Engine, request: EngineRequest) -> "EngineEvents":
        """Submit a request and return its events, which must be closed. Raises what `Engine.submit` raises."""
        if request.request_id in self._streams:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        stream = self._streams[request.request_id] = EngineEvents(self, engine, request.request_id)
        try:
            engine.submit(request)
        except BaseException:
            del self._streams[request.request_id]
            raise
        return stream

    def forget(self, request_id: str) -> None:
        """Stop passing on a request's events."""
        self._streams.pop(request_id, None)


class EngineEvents:
    """Events of one request, until it ends. `close` drops the request and returns its pages."""

    def __init__(self, router: EventRouter, engine: Engine, request_id: str) -> None:
        self._router = router
        self._engine = engine
        self._request_id = request_id
        self._waiting: deque[Event] = deque()
        self._reader: asyncio.Future[None] | None = None

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events up to the last; raises the error of a request that failed."""
        while True:
            while not self._waiting:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            event = self._waiting.popleft()
            if isinstance(event, Failed):
                raise event.error
            yield event
            if isinstance(event, Finished | Prefilled):
                return

    def put(self, event: Event) -> None:
        """Add the request's next event, which may be a failure outside the engine; called on the loop."""
        self._waiting.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def close(self) -> None:
        """Drop the request if it is still live."""
        self._router.forget(self._request_id)
        self._engine.abort(self._request_id)
