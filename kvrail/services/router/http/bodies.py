"""Bodies of requests: how long they may be, how much of them is in memory at once, and their JSON."""

import codecs
import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrail.errors import OverloadedError
from kvrail.services.router.errors import error_response, too_large, unsupported_encoding
from kvrail.services.router.http import biases
from kvrail.wire.convert import MAX_BIASES

DRAIN_FACTOR = 64
"""A body that is too large is read and dropped up to this many times the limit, so that the client gets the error.

A client that still sends while its connection ends sees no answer. Dropping costs less than that many allowed bodies.
"""
HELD_BODIES = 64
"""This many of the largest bodies may be in memory at once, half received or not yet parsed."""
MAX_VALUES, MAX_CONTAINERS, MAX_NAMES = 1 << 20, 1 << 18, 1 << 16
"""Most parts of a body's JSON, counted as commas and as opening brackets, in texts too, and members by their names.
While a body is parsed nothing else runs: at this bound strings take 27 ms, lists 17, members 25."""
MAX_ESCAPES = 8
"""Backslashes before a quote, as of JSON in a text, in a text …, from which on it counts as one that opens a string."""
SHORT_BODY = 1 << 16
"""Bytes that are parsed in a millisecond or two; longer bodies take turns."""

_HUGE = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{200}")
"""What a number beyond a double has; the parser takes such a one for infinity, which it does not allow elsewhere."""

HALF_PAIR = "unexpected end of hex escape"
"""What the parser says of half a surrogate pair too."""


class JsonRequest(Request):
    """A request whose JSON is read strictly: UTF-8, no NaN, no infinity, at most 200 levels."""

    async def json(self) -> Any:
        """The body's value. Raises JSONDecodeError."""
        body = (await self.body()).removeprefix(codecs.BOM_UTF8)
        if len(body) <= SHORT_BODY:
            return _parsed(body)
        return await self.app.state.parsing.run(self.state.client, lambda: _parsed_apart(body), cost=len(body))


def _parsed_apart(body: bytes) -> Any:
    """The body's value; other threads run while a wide bias in it is parsed."""
    place = biases.span(body)
    if place is None:
        return _parsed(body)
    value = _parsed(biases.without(body, *place))
    if biases.is_marked(value):
        try:
            value[biases.FIELD] = biases.parsed(body[slice(*place)])
        except ValueError as error:
            raise json.JSONDecodeError(f"{biases.FIELD}: {error}", "", 0) from None
        return value
    if most_names(body) > MAX_NAMES:
        raise json.JSONDecodeError(f"only {biases.FIELD} may have more than {MAX_NAMES} members", "", 0)
    return _parsed(body)


def _has_many_names(body: bytearray) -> bool:
    """Whether the body's objects may have more members than allowed; a wide bias is not counted."""
    if most_names(body) <= MAX_NAMES:
        return False
    place = biases.span(body)
    if place is None:
        return True
    return body.count(b":", *place) > MAX_BIASES or most_names(biases.without(body, *place)) > MAX_NAMES


def _parsed(body: bytes) -> Any:
    try:
        value = from_json(body, allow_inf_nan=False)
        if _HUGE.search(body) and _has_infinity(value):
            raise ValueError("number out of range")
        return value
    except ValueError as error:
        why = str(error).replace(HALF_PAIR, f"{HALF_PAIR} or half a surrogate pair")
        raise json.JSONDecodeError(why, "", 0) from None


def _has_infinity(value: Any) -> bool:
    """Whether a number in a parsed body is infinite."""
    if isinstance(value, dict):
        return any(map(_has_infinity, value.values()))
    if isinstance(value, list):
        return any(map(_has_infinity, value))
    return isinstance(value, float) and math.isinf(value)


def most_names(body: bytes | bytearray) -> int:
    """An upper bound on the members of a body's objects, counted from its colons and quotes."""
    colons, quotes = body.count(b":"), body.count(b'"')
    for escapes in range(1, MAX_ESCAPES, 2):
        if min(colons, quotes // 2) <= MAX_NAMES:
            break
        escaped = body.count(b"\\" * escapes + b'"')
        if not escaped:
            break
        quotes -= escaped - body.count(b"\\" * (escapes + 1) + b'"')
    return min(colons, quotes // 2)


class JsonRoute(APIRoute):
    """A path whose endpoint gets its body from a JsonRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given a JsonRequest."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


class BodyLimit:
    """Reads the body before the endpoint runs.

    Answers 413 if the body is too large, 415 if it is encoded, 429 if other bodies fill the memory. max_bytes: the most
    of one body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        pending = bytearray()
        try:
            refusal = await self._read(Headers(scope=scope), receive, pending)
            if refusal is not None:
                await refusal(scope, receive, send)
                return

            replayed = False

            async def replay() -> Message:
                nonlocal replayed
                if replayed:
                    return await receive()
                replayed = True
                return {"type": "http.request", "body": self._taken(pending), "more_body": False}

            await self._app(scope, replay, send)
        except ClientDisconnect:
            return
        finally:
            self._taken(pending)

    async def _read(self, headers: Headers, receive: Receive, body: bytearray) -> Response | None:
        """Fill `body`; return the answer where it is refused. Raises ClientDisconnect."""
        coding = ", ".join(headers.getlist("content-encoding")).strip()
        if coding.lower() not in ("", "identity"):
            return unsupported_encoding(coding)
        declared = headers.get("content-length", "0")
        announced = int(declared) if declared.isdecimal() and len(declared) <= 18 else 0
        too_big = announced > self._max_bytes
        # A client that asks first has sent nothing yet; one that announces far too much is not worth reading.
        hopeless = too_big and ("expect" in headers or announced > self._max_bytes * DRAIN_FACTOR)
        size, more = 0, not hopeless
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            more = message.get("more_body", False)
            part = message.get("body", b"")
            size += len(part)
            too_big |= size > self._max_bytes
            if too_big:
                self._taken(body)
                more &= size <= self._max_bytes * DRAIN_FACTOR
            elif self._held_bytes + len(part) > self._max_bytes * HELD_BODIES:
                return error_response(OverloadedError("bodies of other requests fill the memory; retry later"))
            else:
                self._held_bytes += len(part)
                body += part
        if too_big:
            return too_large(f"the body is larger than the {self._max_bytes} bytes that this server takes")
        if body.count(b",") >= MAX_VALUES or body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
            return too_large(f"the body has more than {MAX_VALUES} values or {MAX_CONTAINERS} lists and objects")
        if _has_many_names(body):
            return too_large(f"the objects of the body have more than {MAX_NAMES} members")
        return None

    def _taken(self, body: bytearray) -> bytes:
        """What `body` holds; from here on it counts no more."""
        taken = bytes(body)
        self._held_bytes -= len(taken)
        body.clear()
        return taken
