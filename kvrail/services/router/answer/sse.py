"""A response of server-sent events: its headers leave early, and it is kept alive while there is no event."""

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Send

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]
KEEP_ALIVE = b"\n\n"
"""Two empty lines, which end no event: the standard has them ignored, as comments
(https://html.spec.whatwg.org/multipage/server-sent-events.html, sections 9.2.5 and 9.2.6). Unlike a comment they also
leave nothing behind in clients that strip each read (decision 0020)."""


class SseStream:
    """Writes one response. As a context manager it sends headers by itself, unless `write` does so first.

    head_after_s: seconds until the headers leave alone, if no event has come. Until then a failure can still have a
    status. keep_alive_s: seconds of silence after which KEEP_ALIVE leaves; 0: never.
    """

    def __init__(self, send: Send, *, head_after_s: float, keep_alive_s: float) -> None:
        self._send = send
        self._head_after_s = head_after_s
        self._keep_alive_s = keep_alive_s
        self._last = 0.0
        self._speaking: asyncio.Task[None] | None = None
        self._greeting = b""
        self.started = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._speaking = asyncio.create_task(self._speak())
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._speaking is not None:
            self._speaking.cancel()
            await asyncio.gather(self._speaking, return_exceptions=True)

    async def greet(self, events: bytes) -> None:
        """Send events before all others: with the headers, or at once where these have left."""
        self._greeting = events
        if self.started:
            await self.write(b"")

    async def write(self, events: bytes) -> None:
        """Send whole events in one write, after the headers where these have not left; no events: the headers alone."""
        events, self._greeting = self._greeting + events, b""
        self._last = self._loop.time()
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        if events:
            await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        """Nothing follows."""
        if self._speaking is not None:
            self._speaking.cancel()
        await self._send({"type": "http.response.body", "body": b""})

    async def _speak(self) -> None:
        await asyncio.sleep(self._head_after_s)
        if not self.started:
            await self.write(b"")
        while self._keep_alive_s:
            silent_s = self._loop.time() - self._last
            if silent_s < self._keep_alive_s:
                await asyncio.sleep(self._keep_alive_s - silent_s)
            else:
                await self.write(KEEP_ALIVE)
