"""What happens to every request before its endpoint and its body: an id, the API key."""

import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrail.errors import AuthenticationError
from kvrail.lifecycle import Stage, Timeline
from kvrail.logs import bound_request_id
from services.router.clients import client_of
from services.router.errors import error_response

SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
OPEN_PATHS = frozenset({"/health", "/version", "/metrics", "/metrics/vllm"})
"""Paths for probes and scrapers, which carry no key."""


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
        if scope["type"] == "http":
            scope["state"]["client"] = client_of(scope, by_key=bool(self._keys))
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        """Whether the request has a known key; takes the same time for each wrong key of one length."""
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        found = False
        for key in self._keys:
            found |= hmac.compare_digest(given.strip().encode("latin-1"), key)
        return found and scheme.lower() == "bearer"
