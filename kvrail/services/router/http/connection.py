"""One client's connection: uvicorn's HTTP protocol with a deadline for each thing that only the client can do.

Headers, bodies and reading each have theirs, so that a client that stops in the middle keeps no place. What is no HTTP
is answered in OpenAI's shape too.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from kvrail.services.router.errors import INVALID, error_object
from kvrail.services.router.http.clients import unmapped

log = logging.getLogger("kvrail.router.connection")

MAX_HEAD_BYTES = 64 << 10
LEAST_BODY_BYTES_PER_S = 64 << 10
"""What a body brings extends its deadline at this rate."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds for a request's headers, for its body, and for which a client may read nothing; connections at once."""

    head_s: float
    body_s: float
    write_s: float
    max_connections: int


class ClientConnection(HttpToolsProtocol):
    """See the module. Belongs to one event loop."""

    def __init__(self, *, limits: ConnectionLimits, refused: Callable[[int], object], **others: Any) -> None:
        """refused: gets the status of each answer that is given here, which no application sees."""
        super().__init__(**others)
        self._limits = limits
        self._refused = refused
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._in_body = False
        self._head_bytes = self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; refused where there are too many."""
        super().connection_made(transport)
        if self.client is not None:
            self.client = unmapped(self.client[0]), self.client[1]
        if len(self.connections) > self._limits.max_connections:
            most = self._limits.max_connections
            self._refuse(503, f"{most} connections are open, which is the most; retry later", "overloaded")
        else:
            self._watch_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_reading()
        self._stop_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; what is left unfinished has a deadline."""
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._in_body and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the headers are longer than {MAX_HEAD_BYTES} bytes; send fewer", "headers_too_large")
        elif self._reading is None and (self._in_body or self._head_bytes):
            self._watch_reading()

    def on_message_begin(self) -> None:
        """Headers begin."""
        super().on_message_begin()
        if not self.flow.write_paused:
            self._stop_writing()

    def on_headers_complete(self) -> None:
        """Headers are complete: the request starts."""
        super().on_headers_complete()  # raises where the path is none
        if self.scope["http_version"] < "1.1":
            self.cycle.send = _unchunked(self.cycle)  # type: ignore[assignment, method-assign]
        self._stop_reading()
        self._in_body, self._head_bytes, self._body_bytes = True, 0, 0

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is complete."""
        self._stop_reading()
        self._in_body, self._head_bytes = False, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is written, but perhaps not yet read."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_writing()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """It has read on."""
        self._stop_writing()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP request, or could be read as two; called while the parser's error is handled."""
        error = sys.exception()
        cause = error and error.__context__  # what a callback has raised
        self._refuse(400, f"this is no valid HTTP request: {cause or error}", None)

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing of WebSockets, which this server has not: the request is served as it is."""

    @property
    def _answering(self) -> bool:
        """Whether a request that is here as a whole has no whole answer yet."""
        return self.cycle is not None and not self.cycle.response_complete and not self._in_body

    def _watch_reading(self) -> None:
        self._reading_since = self.loop.time()
        wait_s = self._limits.body_s if self._in_body else self._limits.head_s
        self._reading = self.loop.call_later(wait_s, self._reading_late)

    def _reading_late(self) -> None:
        self._reading = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused or self._answering:  # it is not the client that is late
            self._watch_reading()
            return
        allowed = self._limits.head_s
        if self._in_body:
            allowed = self._limits.body_s + self._body_bytes / LEAST_BODY_BYTES_PER_S
            if (left := self._reading_since + allowed - self.loop.time()) > 0:
                self._reading = self.loop.call_later(left, self._reading_late)
                return
        part = "body" if self._in_body else "headers"
        self._refuse(408, f"the request's {part} did not come within {allowed:.0f} s; send it again", "request_timeout")

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _watch_writing(self) -> None:
        if self._writing is None:
            self._writing = self.loop.call_later(self._limits.write_s, self._writing_late)

    def _writing_late(self) -> None:
        self._writing = None
        if self.transport.get_write_buffer_size():
            log.warning("a client read nothing for %g s; its connection ends", self._limits.write_s)
            self.transport.abort()

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _refuse(self, status: int, message: str, code: str | None) -> None:
        """Answer with an error and end the connection; where an answer is under way it only ends."""
        if not self._answering and not (self._in_body and self.cycle.response_started):
            kind = INVALID if status < 500 else "service_unavailable_error"
            content = json.dumps(error_object(message, kind, None, code)).encode()
            head = b"content-type: application/json\r\nconnection: close\r\n"
            retry = b"retry-after: 1\r\n" if status == 503 else b""
            length = b"content-length: %d\r\n\r\n" % len(content)
            self.transport.write(STATUS_LINE[status] + head + retry + length + content)
            self._refused(status)
        self.transport.close()
        self._watch_writing()


def _unchunked(cycle: RequestResponseCycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """The cycle's `send` for HTTP before 1.1, which has no chunks: without a length, the connection ends the answer.

    uvicorn closes the connection after such an answer, but would send chunks all the same.
    """
    send, until_close = cycle.send, False

    async def unchunked(message: Any) -> None:
        nonlocal until_close
        if message["type"] == "http.response.start":
            until_close = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = False if until_close else None
        elif until_close:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return unchunked
