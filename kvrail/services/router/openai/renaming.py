"""Requests of other APIs as chat requests, with errors that name the other API's parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from pydantic import ValidationError

from kvrail.errors import InvalidRequestError
from kvrail.services.router.errors import from_validation
from kvrail.services.router.schema import ChatRequest

Rename = Callable[[str], str]


def as_chat(body: dict[str, Any], rename: Rename) -> tuple[ChatRequest, Rename]:
    """The chat request that `body` is, and `rename`. Raises InvalidRequestError, renamed."""
    try:
        return ChatRequest.model_validate(body), rename
    except ValidationError as error:
        found = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors(include_url=False)]
        _raise(from_validation(found, body), rename)


@contextmanager
def renamed(rename: Rename) -> Iterator[None]:
    """Inside, an InvalidRequestError names the other API's parameter."""
    try:
        yield
    except InvalidRequestError as error:
        _raise(error, rename)


def _raise(error: InvalidRequestError, rename: Rename) -> NoReturn:
    """Raise `error` under the name that its parameter has in the other API."""
    if error.param is None or (name := rename(error.param)) == error.param:
        raise error
    text = str(error)
    if text.startswith(f"{error.param}:"):
        text = name + text.removeprefix(error.param)
    raise type(error)(text, param=name) from None
