"""Log lines: one format for the whole process, the request id in each of them."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""Id of the request that the current task or thread works for; "-" outside of any."""

trace_ids: ContextVar[tuple[str, str] | None] = ContextVar("trace_ids", default=None)
"""Trace and span of that request, in hexadecimal; None where it is not traced."""


def exemplar() -> dict[str, str]:
    """What leads from a metric to the current request: its trace's id, or without one its own; empty outside of any."""
    if (ids := trace_ids.get()) is not None:
        return {"trace_id": ids[0]}
    return {"request_id": current} if (current := request_id.get()) != "-" else {}


FOREIGN_LOGGERS = ("uvicorn", "uvicorn.error", "uvicorn.access")
"""Loggers of libraries that bring handlers of their own; theirs are removed, so that one format comes out."""


@contextmanager
def bound_request_id(value: str) -> Iterator[None]:
    """Put `value` into each log line that is written inside the block, and the ids of a trace that begins there."""
    token, outer = request_id.set(value), trace_ids.set(None)
    try:
        yield
    finally:
        request_id.reset(token)
        trace_ids.reset(outer)


def setup(level: str, format: Literal["text", "json"], service: str) -> None:
    """Send every log line of this process to standard error.

    level: least severe one written: debug, info, warning or error. format: lines for people or JSON objects.
    service: router, prefill or decode; stands in each line. Calling it again replaces what the last call set.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service) if format == "json" else _TextFormatter(service))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in FOREIGN_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)


def _timestamp(record: logging.LogRecord) -> str:
    """Return the record's time in UTC, ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160), 0x2028, 0x2029)}
"""What would end a line, or steer a terminal, if a peer's words were written as they are."""


@contextmanager
def shown_on(stream: TextIO) -> Iterator[None]:
    """Inside the block, write messages of kvrail's loggers, from level info on, to `stream`: for commands."""
    logger, handler = logging.getLogger("kvrail"), logging.StreamHandler(stream)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _TextFormatter(logging.Formatter):
    """time LEVEL service logger [request id] message, then the traceback if there is one."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_timestamp(record)} {record.levelname:<7} {self._service} {record.name} [{request_id.get()}]"
        line = f"{head} {record.getMessage()}".translate(_ESCAPED)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(_TextFormatter):
    """One JSON object a line: ts, level, logger, service, request_id, message and, after an error, exception.

    A traced request's lines have trace_id and span_id. What a line gives as `extra={"fields": …}` is added.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "ts": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "service": self._service,
            "request_id": request_id.get(),
            "message": record.getMessage(),
        }
        if (ids := trace_ids.get()) is not None:
            fields["trace_id"], fields["span_id"] = ids
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
