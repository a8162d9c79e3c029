"""The one mapping from errors to HTTP: a status, the headers that belong to it, and an object.

The object has OpenAI's shape, and for Anthropic's clients theirs.
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from kvrail.errors import (
    AuthenticationError,
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    KvrailError,
    ModelNotFoundError,
    OverloadedError,
    RateLimitError,
    RequestCancelledError,
    ResponseNotFoundError,
    WorkerUnavailableError,
)

log = logging.getLogger("kvrail.router.errors")

INVALID = "invalid_request_error"
UNAVAILABLE_RETRY_S = 1

# Most specific first: class, status, type, code.
_TABLE: tuple[tuple[type[KvrailError], int, str, str | None], ...] = (
    (ContextLengthError, 400, INVALID, "context_length_exceeded"),
    (InvalidRequestError, 400, INVALID, None),
    (ModelNotFoundError, 404, INVALID, "model_not_found"),
    (ResponseNotFoundError, 404, INVALID, "not_found"),
    (AuthenticationError, 401, INVALID, "invalid_api_key"),
    (RateLimitError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (OverloadedError, 429, "rate_limit_error", "overloaded"),
    (WorkerUnavailableError, 503, "service_unavailable_error", "worker_unavailable"),
    (RequestCancelledError, 503, "service_unavailable_error", "cancelled"),
    (DeadlineError, 504, "timeout_error", "deadline_exceeded"),
    (KvrailError, 500, "server_error", "internal_error"),
)
_OUTCOMES = {400: "invalid", 401: "invalid", 404: "invalid", 429: "overloaded", 503: "unavailable", 504: "deadline"}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large", 415: "unsupported_media_type"}


ANTHROPIC_PATH, MODELS_PATH = "/v1/messages", "/v1/models"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def refuse(param: str, message: str) -> NoReturn:
    """Raise InvalidRequestError about a parameter."""
    raise InvalidRequestError(f"{param}: {message}", param=param)


class ErrorResponse(Response):
    """An error object as a response; the message may quote any text of the client's, surrogates included."""

    def __init__(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        super().__init__(json.dumps(body), status, headers, media_type="application/json")
        self.error = body["error"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, in the shape that the path's clients know."""
        if is_anthropic(scope):
            body = anthropic_error(self.error["message"], self.status_code, scope.get("state", {}).get("request_id"))
            self.body = json.dumps(body).encode()
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def is_anthropic(scope: Scope) -> bool:
    """Whether a request's client expects Anthropic's shapes: by its path, or, of models, by its header."""
    path: str = scope["path"]
    if path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/"):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def anthropic_error(message: str, status: int, request_id: str | None) -> dict[str, Any]:
    """Anthropic's error shape (https://docs.anthropic.com/en/api/errors)."""
    kind = _ANTHROPIC_TYPES.get(status, INVALID if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_object(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """OpenAI's error shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def to_http(error: KvrailError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of an error."""
    status, kind, code = next(row[1:] for row in _TABLE if isinstance(error, row[0]))
    param = error.param if isinstance(error, InvalidRequestError) else None
    headers: dict[str, str] = {}
    if isinstance(error, ModelNotFoundError):
        param = "model"
    elif isinstance(error, OverloadedError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    elif status == 503:
        headers["retry-after"] = str(UNAVAILABLE_RETRY_S)
    return status, error_object(str(error), kind, param, code), headers


class ResponseCancelledError(InvalidRequestError):
    """The client has cancelled its response by another request."""


def outcome_of(error: KvrailError) -> str:
    """The outcome under which kvrail_requests_total counts an error."""
    if isinstance(error, ResponseCancelledError):
        return "cancelled"
    return _OUTCOMES.get(to_http(error)[0], "error")


def error_response(error: KvrailError) -> Response:
    """The HTTP answer to an error."""
    status, body, headers = to_http(error)
    if status >= 500:
        log.warning("answered %d: %s", status, error)
    return ErrorResponse(status, body, headers)


def too_large(why: str) -> Response:
    """The answer to a body over a limit."""
    body = error_object(f"{why}; send a shorter one", INVALID, None, _CODES[413])
    return ErrorResponse(413, body, {"connection": "close"})


def unsupported_encoding(coding: str) -> Response:
    """The answer to a body that is encoded."""
    why = f"Content-Encoding: {coding[:80]!r} is not supported; send the body as it is, without this header"
    return ErrorResponse(415, error_object(why, INVALID, None, _CODES[415]), {"accept-encoding": "identity"})


def parameter_path(location: Sequence[Any], body: Any) -> str:
    """Dotted path of a validation error: `messages.0.role`.

    pydantic puts names of union members and validators between the keys; only what leads through the body, or names a
    key that is missing there, is kept.
    """
    path: list[str] = []
    here = body
    for position, step in enumerate(location):
        if isinstance(step, int):
            if isinstance(here, list) and step < len(here):
                path.append(str(step))
                here = here[step]
        elif isinstance(here, dict) and (step in here or position == len(location) - 1):
            path.append(step)
            here = here.get(step)
    return ".".join(path)


def from_validation(errors: Sequence[Any], body: Any) -> InvalidRequestError:
    """The client's error: the one that lies deepest, because its parent's only repeat it."""
    paths = [
        parameter_path(entry["loc"][1:], body) if entry["loc"][0] == "body" else str(entry["loc"][-1])
        for entry in errors
    ]
    deepest = max(range(len(errors)), key=lambda i: paths[i].count(".") if paths[i] else -1)
    entry, path = errors[deepest], paths[deepest]
    if entry["type"] == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON: {entry.get('ctx', {}).get('error', entry['msg'])}")
    message = entry["msg"].removeprefix("Value error, ")
    if not path and entry["type"] == "value_error":
        return InvalidRequestError(f"the body {message}")
    if not path:
        return InvalidRequestError(f"the body must be a JSON object sent as application/json: {message}")
    shown = "" if entry["type"] == "missing" else f"; got {_shorten(entry['input'])}"
    return InvalidRequestError(f"{path}: {message[:1].lower()}{message[1:]}{shown}", param=path)


def _shorten(value: Any) -> str:
    """What the client sent, short enough for a message."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} with {len(value)} entries"
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _methods(routes: Sequence[BaseRoute], request: Request) -> set[str]:
    """What a path takes, over all routes of it; one that is written out hides those with a parameter in its place."""
    found = [each for each in routes if isinstance(each, Route) and each.matches(request.scope)[0] is not Match.NONE]
    own = [route for route in found if route.path == request.scope["path"]]
    return {method for route in own or found for method in route.methods or ()}


def install(app: FastAPI, note: Callable[[Request, KvrailError], None], routes: Sequence[BaseRoute]) -> None:
    """Let every error of `app`, which has `routes`, answer in its shape; `note` gets those that endpoints raise."""

    async def on_kvrail(request: Request, error: Exception) -> Response:
        assert isinstance(error, KvrailError)
        note(request, error)
        return error_response(error)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await on_kvrail(request, from_validation(error.errors(), error.body))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message, headers = error.detail, dict(error.headers or {})
        if error.status_code == 404:
            message = f"unknown path {request.url.path}; see /docs for the API"
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
            headers = {"allow": ", ".join(sorted(_methods(routes, request)))}
        kind = INVALID if error.status_code < 500 else "server_error"
        body = error_object(message, kind, None, _CODES.get(error.status_code))
        return ErrorResponse(error.status_code, body, headers)

    async def on_unexpected(request: Request, _: Exception) -> Response:
        body = error_object("internal error; the server's log has the cause", "server_error", None, "internal_error")
        headers = {"connection": "close"}  # uvicorn ends it; this answer goes past the middleware that names requests
        if (request_id := request.scope.get("state", {}).get("request_id")) is not None:
            headers["x-request-id"] = request_id
        return ErrorResponse(500, body, headers)

    app.add_exception_handler(KvrailError, on_kvrail)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_unexpected)
