"""What happens to every request before its endpoint and its body: an id, a count, the API key."""

import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrail.errors import AuthenticationError
from kvrail.runtime.logs import bound_request_id
from kvrail.security.keyfile import KeyFile
from kvrail.services.router.errors import error_response, is_anthropic
from kvrail.services.router.http.clients import client_of
from kvrail.services.router.page import routes as page
from kvrail.telemetry.moments import Moment, Timeline

SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
OPEN_PATHS = page.OPEN_PATHS | frozenset(
    {
        "/health",
        "/ping",
        "/load",
        "/live",
        "/ready",
        "/version",
        "/metrics",
        "/metrics/vllm",
        "/metrics/targets",
        "/docs",
        "/openapi.json",
    }
)
"""Paths for probes, scrapers and browsers, which carry no key."""
UNPREFIXED = frozenset({"/chat/completions", "/completions", "/models", "/responses"})
"""Paths that clients may ask for without /v1."""
NO_HANDLER = NO_METHOD = "none"
"""Of requests whose path no route has, and of what a connection refuses before it is a request."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
LEFT = 499
"""The status, nginx's, of a request whose client left before an answer began."""


class OneSpelling:
    """Serves /path/ as /path, and llama.cpp's paths as OpenAI's: what follows sees one spelling.

    Starlette would redirect a path with a slash, to the host that the client's Host header names.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            path = scope["path"].rstrip("/") or "/"
            scope["path"] = f"/v1{path}" if path in UNPREFIXED or path.startswith("/models/") else path
        await self._app(scope, receive, send)


class RequestContext:
    """Gives each request its id, in log lines and in the answer's X-Request-Id, starts its clock and counts it.

    routes: the application's.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        timeline = Timeline()
        timeline.mark(Moment.RECEIVED)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        minted = uuid.uuid4().hex
        request_id = given if SAFE_ID.fullmatch(given) else minted
        state = scope.setdefault("state", {})
        state["timeline"] = timeline
        state["headers"] = headers
        state["request_id"] = request_id
        # A client may send one id twice; on the wire ids are unique.
        state["wire_id"] = minted if request_id is minted else f"{request_id}-{minted[:8]}"

        names = ("x-request-id", "request-id") if is_anthropic(scope) else ("x-request-id",)
        status = LEFT

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(dict.fromkeys(names, request_id))
                status = message["status"]
            await send(message)

        with bound_request_id(request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                status = 500 if status == LEFT else status  # the outer layers answer so
                raise
            finally:
                method = scope["method"] if scope["method"] in METHODS else NO_METHOD
                scope["app"].state.service.metrics.answered(self._handler(scope), method, status, timeline.elapsed())

    def _handler(self, scope: Scope) -> str:
        """The path of the request's route, with the names of its parameters; requests refused earlier have one too."""
        route = scope.get("route")
        if route is None:
            route = next((each for each in self._routes if each.matches(scope)[0] is not Match.NONE), None)
        return getattr(route, "path", NO_HANDLER)


class ApiKeys:
    """Refuses requests without one of the keys; without any keys, all requests are let in.

    A key is a bearer token (OpenAI's clients) or the header X-Api-Key (Anthropic's).
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], file: KeyFile | None = None) -> None:
        self._app = app
        self._file = file
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            scope["state"]["key"] = None
            given = _given(Headers(scope=scope))
            key: int | str | None = self._find(given)
            if key is None:
                try:
                    key = self._in_file(given, scope)
                except AuthenticationError as error:
                    if scope["path"] not in OPEN_PATHS:
                        await error_response(error)(scope, receive, send)
                        return
            scope["state"]["api_key"] = key
            scope["state"]["client"] = client_of(scope, key)
        await self._app(scope, receive, send)

    def _find(self, given: Sequence[str]) -> int | None:
        """The place of the request's key among the keys; takes the same time for all wrong keys of one length."""
        found = None
        for secret in given:
            for place, key in enumerate(self._keys):
                if hmac.compare_digest(secret.encode("latin-1"), key):
                    found = place
        return found

    def _in_file(self, given: Sequence[str], scope: Scope) -> str | None:
        """The name that the file gives the request's key; also put into the request's state.

        Raises AuthenticationError where a key is needed and missing, or has expired.
        """
        if self._file is not None:
            for secret in filter(None, given):
                if (key := self._file.find(secret)) is not None:
                    scope["state"]["key"] = key
                    return key.name
        if self._keys or self._file is not None:
            raise AuthenticationError(
                "no valid API key; send the header 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
            )
        return None


def _given(headers: Headers) -> tuple[str, str]:
    """The keys that a request offers."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")
