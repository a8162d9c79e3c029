"""One client's connection: uvicorn's HTTP protocol with a deadline for each thing that only the client can do.

Headers, bodies and reading have one each, so that a client that stops halfway does not keep its place. Input that is
not HTTP gets an error in OpenAI's shape too.
"""

import asyncio
import json
import logging
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from kvrail.services.router.errors import INVALID, error_object
from kvrail.services.router.http.clients import unmapped

log = logging.getLogger("kvrail.router.connection")

MAX_HEAD_BYTES = 64 << 10
MAX_PIPELINED = 16
"""Requests that are read while the first of them is answered; what else has come is parsed later."""
PIECE_BYTES = 4 << 10
"""Bytes that are parsed at once: some 200 of the shortest requests."""
LEAST_BYTES_PER_S = 64 << 10
"""What a body brings, or the client reads, extends the deadline at this rate."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds for a request's headers, its body, and a pause in the client's reading; the most connections at once."""

    head_s: float
    body_s: float
    write_s: float
    max_connections: int


class _LongHeadError(Exception):
    """The headers are too long."""


class ClientConnection(HttpToolsProtocol):
    """See the module. Belongs to one event loop."""

    def __init__(self, *, limits: ConnectionLimits, refused: Callable[[int], object], **others: Any) -> None:
        """refused: called with the status of each answer that is given here; the application sees none of them."""
        super().__init__(**others)
        self._limits = limits
        self._refused = refused
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._in_body = False
        self._head_bytes = self._fields_bytes = self._body_bytes = 0
        self._refusing = False  # whatever comes, since it follows what was no request
        self._upgrade: int | None = None  # where the parser stopped before another protocol
        self._unparsed = bytearray()
        self._unanswered: deque[RequestResponseCycle] = deque()  # requests whose answers are not complete, in order

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; where there are too many, another that is idle ends, or this one is refused."""
        super().connection_made(transport)
        resume = self.flow.resume_reading
        self.flow.resume_reading = lambda: None if self._full else resume()  # type: ignore[method-assign]
        if self.client is not None:
            self.client = unmapped(self.client[0]), self.client[1]
        most = self._limits.max_connections
        if len(self.connections) > most and not self._end_idle():
            self._refuse(503, f"{most} connections are open, which is the most; retry later", "overloaded")
        else:
            self._watch_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_reading()
        self._stop_writing()
        super().connection_lost(exc)
        for cycle in self._unanswered:  # uvicorn ends the last one alone, and others may run before it
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse; an unfinished request gets a deadline."""
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        """Parse what has come, until the connection is full."""
        while self._unparsed and not (self._ended or self._full):
            piece = bytes(self._unparsed[:PIECE_BYTES])
            del self._unparsed[:PIECE_BYTES]
            self._head_bytes += len(piece)
            super().data_received(piece)
            if self._upgrade is not None:
                self._unparsed[:0] = self._without_upgrade() + piece[self._upgrade :]
                self._upgrade, self._head_bytes, self.parser = None, 0, self._new_parser()
            elif self._head_bytes > MAX_HEAD_BYTES and not self._ended:
                self._refuse_head()
        if self._ended:
            self._unparsed.clear()
            return
        if self._full:
            self.flow.pause_reading()
        if self._reading is None and (self._in_body or self._head_bytes):
            self._watch_reading()

    @property
    def _full(self) -> bool:
        """Whether nothing more is read before an answer is complete."""
        held = len(self.cycle.body) if self.pipeline else 0
        return len(self._unanswered) > MAX_PIPELINED or held > HIGH_WATER_LIMIT

    def on_message_begin(self) -> None:
        """Headers begin."""
        super().on_message_begin()
        self._fields_bytes = 0
        if not self.flow.write_paused:
            self._stop_writing()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is complete."""
        super().on_header(name, value)
        self._fields_bytes += len(name) + len(value)

    def on_headers_complete(self) -> None:
        """Headers are complete: the request starts."""
        if self._fields_bytes + len(self.url) > MAX_HEAD_BYTES:
            raise _LongHeadError
        if self._upgrades:
            return  # `data_received` has it parsed again
        super().on_headers_complete()  # raises where the path is none
        if self.scope["http_version"] < "1.1":
            self.cycle.send = _unchunked(self.cycle)  # type: ignore[assignment, method-assign]
        self._unanswered.append(self.cycle)
        self.flow.resume_reading()  # uvicorn has paused behind a second request, and would not see the client leave
        self._stop_reading()
        self._in_body, self._head_bytes, self._body_bytes = True, 0, 0

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._head_bytes = 0  # what follows may be trailers, or the extension of a chunk
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is complete."""
        if self._upgrades:
            return
        self._stop_reading()
        self._in_body, self._head_bytes = False, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is written, but perhaps not yet read."""
        if self._unanswered:
            self._unanswered.popleft()
        super().on_response_complete()
        self._parse()
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
        """Answer input that is not one HTTP request; called while the parser's error is handled."""
        error = sys.exception()
        cause = error and error.__context__  # what a callback has raised
        if isinstance(cause, _LongHeadError):  # one that came in one piece
            self._refuse_head()
        else:
            self._refuse(400, f"this is no valid HTTP request: {cause or error}", None)

    def _unsupported_upgrade_warning(self) -> None:
        """Note where the parser stopped: this server has no other protocol, so the request is served as it is.

        Java's client asks for HTTP/2 with each request. The parser takes the body for the other protocol's.
        """
        error = sys.exception()
        if error is not None and self.parser.get_method() != b"CONNECT":
            self._upgrade = error.args[0]

    @property
    def _upgrades(self) -> bool:
        """Whether the request being read asks for another protocol."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _without_upgrade(self) -> bytes:
        """The head that was read last, without the header that asks for another protocol."""
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = (b"%b: %b" % header for header in self.headers if header[0] != b"upgrade")
        return b"\r\n".join((line, *kept, b"\r\n"))

    def _new_parser(self) -> httptools.HttpRequestParser:
        """A parser like uvicorn's."""
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    @property
    def idle_until(self) -> float | None:
        """When this connection ends unless a request comes, by the loop's clock; None where none is waited for."""
        waiting = self.timeout_keep_alive_task
        return None if waiting is None or self.transport.is_closing() else waiting.when()

    def _end_idle(self) -> bool:
        """End the connection that has been idle the longest; False where none is idle."""
        idle = [each for each in self.connections if isinstance(each, ClientConnection) and each.idle_until]
        if idle:
            min(idle, key=lambda each: each.idle_until or 0.0).transport.close()
        return bool(idle)

    @property
    def _ended(self) -> bool:
        """Whether nothing more is read."""
        return self._refusing or self.transport.is_closing()

    @property
    def _answering(self) -> bool:
        """Whether a request has arrived whole and its answer is not complete yet."""
        return len(self._unanswered) > self._asking

    @property
    def _asking(self) -> bool:
        """Whether the last of the unanswered requests has not arrived whole."""
        return self._in_body and bool(self._unanswered) and self._unanswered[-1] is self.cycle

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
            allowed = self._limits.body_s + self._body_bytes / LEAST_BYTES_PER_S
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
            self._writing_since, self._unread = self.loop.time(), self.transport.get_write_buffer_size()
            self._writing = self.loop.call_later(self._limits.write_s, self._writing_late)

    def _writing_late(self) -> None:
        self._writing = None
        if unread := self.transport.get_write_buffer_size():
            allowed = self._limits.write_s + (self._unread - unread) / LEAST_BYTES_PER_S
            if (left := self._writing_since + allowed - self.loop.time()) > 0:
                self._writing = self.loop.call_later(left, self._writing_late)
                return
            log.warning("a client read too little in %.1f s; its connection ends", allowed)
            self.transport.abort()

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _refuse_head(self) -> None:
        self._refuse(431, f"the headers are longer than {MAX_HEAD_BYTES} bytes; send fewer", "headers_too_large")

    def _refuse(self, status: int, message: str, code: str | None) -> None:
        """Answer with an error and end the connection; where answers are due, end it behind the last of them."""
        if self._answering:
            self._unanswered[-1 - self._asking].keep_alive = False
            if self._asking:  # its application has not begun
                self._unanswered.pop()
                self.pipeline.popleft()
            self._refusing = True
            self._stop_reading()
            return
        if not (self._in_body and self.cycle.response_started):
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
    """The cycle's `send` for HTTP before 1.1, which has no chunks: an answer without a length ends with the connection.

    uvicorn closes the connection after such an answer, but would still send chunks.
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
