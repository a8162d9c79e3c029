"""The OpenAPI document: FastAPI's own, without answers that never occur and with facts that FastAPI cannot know."""

from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvrail import __version__
from kvrail.services.router.http.shapes.base import AnthropicError, Error, Shape
from kvrail.services.router.values import Json

_MEANINGS = {
    400: "The request is wrong, or asks for what this server does not support; the message names the parameter.",
    401: "No valid API key.",
    404: "No such model, or nothing of that id.",
    408: "Headers or body did not come in time.",
    413: "The body is too large.",
    415: "The body is encoded (Content-Encoding).",
    429: "No capacity now; Retry-After says when to ask again.",
    431: "The headers are too long.",
    500: "The server failed.",
    503: "No worker takes requests now, or the server shuts down; Retry-After says when to ask again.",
    504: "The request took longer than this server allows.",
}
_BARE = (400, 401, 408, 431, 500, 503)
_READING = (404,)
_BODY = (413, 415, 429)
_GENERATING = (404, 504)
ASKING = ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest", "Prompted")
"""Schemas of requests that may name the model."""
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
DESCRIPTION = """
OpenAI's and Anthropic's APIs over models whose prefill and decode run on separate workers. Fields that are known and
not supported are refused by name; unknown ones are ignored. Keys are asked for where the operator has set any.
"""


def errors(*statuses: tuple[int, ...], shape: type[Shape] = Error) -> dict[int | str, Json]:
    """Responses of a path for FastAPI: those of every path, and of these groups."""
    found = sorted({*_BARE, *(status for group in statuses for status in group)})
    return {status: {"model": shape, "description": _MEANINGS[status]} for status in found}


ASKED = errors()
READING = errors(_READING)
TEXTS = errors(_BODY, _READING)
GENERATING = errors(_BODY, _GENERATING)
MESSAGES = errors(_BODY, _GENERATING, shape=AnthropicError)


CHUNKS: Json = {
    "type": "object",
    "description": "An event for each chunk, whose data is its JSON; the last one's is [DONE].",
    # "message" is what an event without a name is called.
    "properties": {"event": {"type": "string", "const": "message"}, "data": {"type": "string"}},
    "required": ["data"],
    "additionalProperties": False,
}


def named_events(names: Sequence[str]) -> Json:
    """The events of a stream that have names; data: JSON, whose member `type` is the name."""
    properties = {"event": {"type": "string", "enum": list(names)}, "data": {"type": "string"}}
    described = "Events whose data is JSON, with the name as its member type."
    return {
        "type": "object",
        "description": described,
        "properties": properties,
        "required": ["event", "data"],
        "additionalProperties": False,
    }


def whole_or_stream(shape: type[Shape], event: Json) -> dict[int | str, Json]:
    """The 200 of a path that answers whole or as a stream; event: schema of each event, as its fields."""
    return {200: {"model": shape, "content": {"text/event-stream": {"schema": event}}}}


def describe(app: FastAPI, models: Sequence[str]) -> None:
    """Let `app` show the document; it is made once, when it is first asked for. models: names that are served."""
    made: Json = {}

    def document() -> Json:
        if not made:
            made.update(_document(app, models))
        return made

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, models: Sequence[str]) -> Json:
    found = get_openapi(title="kvrail", version=__version__, description=DESCRIPTION.strip(), routes=app.routes)
    for methods in found["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)  # FastAPI's own; here a wrong request is a 400
    schemas = found["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for name in ASKING:
        schemas[name]["properties"]["model"] = {"enum": [*models, "", None]}
    found["components"]["securitySchemes"] = SECURITY
    found["security"] = [{}, *({name: []} for name in SECURITY)]
    return found
