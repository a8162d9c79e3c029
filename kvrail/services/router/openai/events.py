"""Server-sent events: JSON objects as bytes; the most common, a chunk of text, is built from a template.

All JSON is ASCII. Clients end lines at characters that JSON may hold as they are (U+0085, U+2028: httpx's `aiter_lines`
does), and decode each network read by itself, which may end within a character.
"""

import json
import uuid
from collections.abc import Iterator
from json.encoder import encode_basestring_ascii
from typing import Any

from kvrail.services.router.values import Delta

DONE = b"data: [DONE]\n\n"
PIECE = 64
"""Elements of a list that are encoded at once; with twenty likely tokens each that takes some 2 ms."""
MARK = uuid.uuid4().hex
"""Stands for the text in a template; no client can have put it into an answer."""


def encode_json(value: Any) -> bytes:
    """Compact JSON, in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def encode_long(value: dict[str, Any]) -> bytes:
    """Do what `encode_json` does, in a thread and long lists piece by piece, so that other threads run meanwhile."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        for place, (key, each) in enumerate(value.items()):
            yield (b"," if place else b"{") + encode_json(key) + b":"
            yield from _pieces(each)
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and len(value) > PIECE:
        for begin in range(0, len(value), PIECE):
            yield (b"," if begin else b"[") + encode_json(value[begin : begin + PIECE])[1:-1]
        yield b"]"
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield b"," if place else b"["
            yield from _pieces(each)
        yield b"]" if value else b"[]"
    else:
        yield encode_json(value)


def encode_event(value: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + encode_json(value) + b"\n\n"


def encode_named(value: dict[str, Any]) -> bytes:
    """One event whose name is its member `type`."""
    return b"event: %b\ndata: %b\n\n" % (str(value["type"]).encode(), encode_json(value))


class TextEvent:
    """The event of a chunk that brings text and nothing else: the chunks of one choice differ in that text alone."""

    def __init__(self, chunk: dict[str, Any]) -> None:
        """chunk: one of the choice's, whose text is MARK."""
        self._before, _, self._after = encode_event(chunk).decode().partition(f'"{MARK}"')

    def encode(self, text: str) -> bytes:
        """The bytes that `encode_event` would give for the chunk with this text."""
        return f"{self._before}{encode_basestring_ascii(text)}{self._after}".encode()


def is_plain(delta: Delta) -> bool:
    """Whether a `TextEvent` can bring the delta."""
    return bool(delta.text) and not delta.logprobs and delta.finish_reason is None
