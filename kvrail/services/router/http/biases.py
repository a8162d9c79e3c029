"""A logit_bias as wide as a vocabulary: read out of a body apart from the rest, in a thread and piece by piece.

At once, 150,000 members take the parser some 60 ms of the interpreter's lock, in which nothing else runs.
"""

import re
import uuid
from typing import Any

from pydantic_core import from_json

FIELD = "logit_bias"
WIDE = 1 << 16
"""Bytes of a bias from which on it is read apart."""
PIECE = 1 << 16
"""Bytes that are parsed at once: some 5,000 members, in 2 ms."""
_BEGIN = re.compile(rb'"logit_bias"[ \t\r\n]*:[ \t\r\n]*\{')
_ALLOWED = b' \t\r\n0123456789",:.eE+-'
_MARK = uuid.uuid4().hex
"""Stands for the bias in the rest of the body; no client can have sent it."""


def span(body: bytes | bytearray) -> tuple[int, int] | None:
    """Where the members of a wide bias begin and end, between the braces; None where the body seems to have none.

    Whether it is the request's own is not known before the rest is parsed.
    """
    for found in _BEGIN.finditer(body):
        begin, end = found.end(), body.find(b"}", found.end())
        if end - begin >= WIDE:
            return None if body[begin:end].translate(None, _ALLOWED) else (begin, end)
    return None


def without(body: bytes | bytearray, begin: int, end: int) -> bytes:
    """The body with a text in place of the bias."""
    return b"".join((body[: begin - 1], b'"', _MARK.encode(), b'"', body[end + 1 :]))


def is_marked(value: Any) -> bool:
    """Whether a parsed body has the text as its logit_bias."""
    return isinstance(value, dict) and value.get(FIELD) == _MARK


def parsed(members: bytes) -> dict[str, Any]:
    """The members as an object. Raises ValueError; other threads run between pieces."""
    found: dict[str, Any] = {}
    begin = 0
    while True:
        end = members.find(b",", begin + PIECE)
        piece = members[begin : end if end >= 0 else len(members)]
        if not piece.strip():
            raise ValueError("there is a comma at the end")
        found |= from_json(b"{%b}" % piece, allow_inf_nan=False)
        if end < 0:
            return found
        begin = end + 1
