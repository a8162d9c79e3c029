"""A client that costs little: it notes when which bytes came, and reads them after the clock has stopped.

httptools, which the router has too, takes responses apart. At 64 streams of 50 tokens a second a token costs 10 µs of
CPU; with httpx it cost 70, so that faster streams would have waited for their client.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

TIMEOUT = "timeout"
IDLE_S = 1.0
"""A connection that was idle for longer is not used again: servers close theirs, commonly after 5 seconds."""


@dataclass(slots=True)
class Reply:
    """What came for one request. begin: when it was sent; parts: when which bytes of the body came.

    status: of HTTP, 0 where none came. trouble: kind and message of what the network did; empty where all went well.
    """

    begin: float
    status: int = 0
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    trouble: tuple[str, str] | None = None


class Client:
    """Asks one server, on as many connections as are needed at a time, and keeps them for the next requests."""

    def __init__(
        self, url: str, api_key: str = "", *, timeout_s: float = 600.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """url: the server's address, with or without /v1. timeout_s: of one request. clock: seconds."""
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        path = f"{parts.path.rstrip('/').removesuffix('/v1')}/v1/completions"
        self._head = (
            f"POST {path} HTTP/1.1\r\nhost: {parts.netloc.rpartition('@')[2]}\r\ncontent-type: application/json\r\n"
            f"accept: text/event-stream\r\n{key}content-length: "
        ).encode()
        self._timeout_s = timeout_s
        self._clock = clock
        self._idle: list[_Connection] = []

    async def ask(self, body: bytes) -> Reply:
        """Send a completion request. A failure of the network is in the reply."""
        reply = Reply(self._clock())
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connection()
                await connection.ask(b"%b%d\r\n\r\n%b" % (self._head, len(body), body), reply)
        except TimeoutError:
            reply.trouble = (TIMEOUT, f"it had not ended after {self._timeout_s:g} s")
        except OSError as error:
            reply.trouble = ("cannot connect", str(error))
        else:
            if connection.usable:
                connection.idle_since = self._clock()
                self._idle.append(connection)
        return reply

    def close(self) -> None:
        """Close the connections that are idle."""
        while self._idle:
            self._idle.pop().close()

    async def _connection(self) -> "_Connection":
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and self._clock() - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(
            lambda: _Connection(self._clock, loop), self._host, self._port, ssl=self._tls
        )
        return made


class _Connection(asyncio.Protocol):
    """One connection, with one response at a time, whose parts httptools passes to callbacks."""

    def __init__(self, clock: Callable[[], float], loop: asyncio.AbstractEventLoop) -> None:
        self._clock = clock
        self._loop = loop
        self._now = 0.0
        self._reply: Reply | None = None
        self.usable = True
        self.idle_since = 0.0

    async def ask(self, request: bytes, reply: Reply) -> None:
        """Send `request` and fill `reply`; returns when the response or the connection has ended."""
        self._parser = httptools.HttpResponseParser(self)
        self._reply, self._ended = reply, self._loop.create_future()
        self._transport.write(request)
        try:
            await self._ended
        finally:
            self._reply = None
            if not self._ended.done() or self._ended.cancelled():
                self.close()

    def close(self) -> None:
        """Close at once; nothing more is read."""
        self.usable = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio: the connection is there."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such base

    def data_received(self, data: bytes) -> None:
        """Asyncio: bytes came."""
        self._now = self._clock()
        if self._reply is None:  # nothing was asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(("unreadable", f"this is not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio: the connection has ended."""
        self.usable = False
        self._end(("broke off", str(exc) if exc else "the server closed the connection"))

    def on_headers_complete(self) -> None:
        """Httptools: the status is known."""
        if self._reply is not None:
            self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Httptools: a part of the body."""
        if self._reply is not None:
            self._reply.parts.append((self._now, body))

    def on_message_complete(self) -> None:
        """Httptools: the response has ended."""
        self.usable = self.usable and bool(self._parser.should_keep_alive())
        self._end(None)

    def _end(self, trouble: tuple[str, str] | None) -> None:
        if self._reply is not None and not self._ended.done():
            self._reply.trouble = trouble
            self._ended.set_result(None)
