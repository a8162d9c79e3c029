"""What happens to every request before its endpoint: an id, the bound on its body, the API key."""

import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrail.errors import AuthenticationError
from kvrail.lifecycle import Stage, Timeline
from kvrail.logs import bound_request_id
from services.router.errors import error_response, too_large

SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
OPEN_PATHS = frozenset({"/health", "/version", "/metrics", "/metrics/vllm"})
"""Paths for probes and scrapers, which carry no key."""
DRAIN_FACTOR = 8
"""Of a body that is too large, up to this many times the limit is read and dropped, so that the client hears why."""


class RequestContext:
    """Gives each request its id, in log lines and in the answer's X-Request-Id, and starts its clock."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        timeline = Timeline()
        timeline.mark(Stage.RECEIVED)
        given = Headers(scope=scope).get("x-request-id", "")
        minted = uuid.uuid4().hex
        request_id = given if SAFE_ID.fullmatch(given) else minted
        state = scope.setdefault("state", {})
        state["timeline"] = timeline
        state["request_id"] = request_id
        # A client may send one id twice; on the wire ids are unique.
        state["wire_id"] = minted if request_id is minted else f"{request_id}-{minted[:8]}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with bound_request_id(request_id):
            await self._app(scope, receive, send_with_id)


class ApiKeys:
    """Refuses requests without one of the keys; without any keys everybody is let in."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN_PATHS and not self._knows(scope):
            message = "no valid API key; send the header 'Authorization: Bearer KEY'"
            await error_response(AuthenticationError(message))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        """Whether the request has a known key; takes the same time for each wrong key of one length."""
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        found = False
        for key in self._keys:
            found |= hmac.compare_digest(given.strip().encode("latin-1"), key)
        return found and scheme.lower() == "bearer"


class BodyLimit:
    """Reads the body before the endpoint runs and answers 413 where it is over the limit."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "0")
        size, body = 0, bytearray()
        too_big = len(declared) > 18 or (declared.isdigit() and int(declared) > self._max_bytes)
        more = not (too_big and "expect" in headers)  # a client that asks first has sent nothing yet
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            more = message.get("more_body", False)
            size += len(message.get("body", b""))
            too_big |= size > self._max_bytes
            if not too_big:
                body += message.get("body", b"")
            elif size > self._max_bytes * DRAIN_FACTOR:
                break
        if too_big:
            await too_large(self._max_bytes)(scope, receive, send)
            return
        pending: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)
