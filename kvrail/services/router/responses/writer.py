"""Writes the answers of /v1/responses: items, whole or as one event for each change of an item.

response.created, response.in_progress
  response.output_item.added
    response.content_part.added, response.output_text.delta …, .done, response.content_part.done     (a message)
    response.content_part.added, response.reasoning_text.delta …, .done, response.content_part.done  (reasoning)
    response.function_call_arguments.delta …, .done                                                  (a call)
  response.output_item.done
response.completed, or response.incomplete where the output was cut off, or error and response.failed
"""

import time
from collections.abc import Callable
from typing import Any

from kvrail.errors import KvrailError
from kvrail.services.router.errors import to_http
from kvrail.services.router.openai.events import encode_named
from kvrail.services.router.openai.logprobs import TokenTexts, chat_logprobs
from kvrail.services.router.plan.reading import OutputReader
from kvrail.services.router.plan.tools.forms import CallDelta, Said
from kvrail.services.router.values import Delta, Json, Scored, Updates
from kvrail.values.sampling import FinishReason

EVENTS = (
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
    "response.incomplete",
    "response.failed",
    "error",
)
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def failure_event(error: KvrailError, sequence_number: int = 0) -> bytes:
    """The event of an error."""
    body = to_http(error)[1]["error"]
    said = {"code": body["code"] or body["type"], "message": body["message"], "param": body["param"]}
    return encode_named({"type": "error", "sequence_number": sequence_number, **said})


class ResponseWriter:
    """Writes one response.

    response: the object as it begins. reader: splits its output into parts. texts: names tokens in log probabilities,
    where these are asked for. keep: called with the response when it has ended.
    """

    greets = True  # so that a response that waits can be cancelled by its id

    def __init__(
        self, response: Json, reader: OutputReader, texts: TokenTexts | None, keep: Callable[[Json], object]
    ) -> None:
        self._response = response
        self._reader = reader
        self._texts = texts
        self._keep = keep
        self._number = 0
        self._items: list[Json] = []
        self._open: Json | None = None  # the last of the items, where more of it may come
        self._cut = False
        self._reasoning_tokens = 0
        self._logprobs: list[Json] = []  # of tokens whose text may still become a message's

    def opening(self) -> bytes:
        """The response, before there is any output."""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._response) for kind in kinds)

    def events(self, updates: Updates) -> bytes:
        """What happens to items."""
        return b"".join(self._take(update) for update in updates if isinstance(update, Delta))

    def closing(self, usage: Json) -> bytes:
        """The events that end the last item and the response."""
        events = self._finish(usage)
        status = self._response["status"]
        return events + self._event(f"response.{status}", response=self._response)

    def failure(self, error: KvrailError) -> bytes:
        """An error, and the response that failed."""
        event = failure_event(error, self._number)
        self._number += 1
        body = to_http(error)[1]["error"]
        self._response |= {
            "status": "failed",
            "error": {"code": "server_error", "message": body["message"]},
            "output": self._items,
        }
        self._keep(self._response)
        return event + self._event("response.failed", response=self._response)

    def add(self, update: Delta | Scored) -> None:
        """Collect new output; this API has no log probabilities of prompts."""
        if isinstance(update, Delta):
            self._take(update)

    def whole(self, usage: Json) -> Json:
        """The whole response."""
        self._finish(usage)
        return self._response

    def _event(self, kind: str, **members: Any) -> bytes:
        event = encode_named({"type": kind, "sequence_number": self._number, **members})
        self._number += 1
        return event

    def _take(self, delta: Delta) -> bytes:
        said = self._reader.push(delta.text, last=delta.finish_reason is not None)
        if said.reasoning and not said.content:
            self._reasoning_tokens += len(delta.token_ids)
        logprobs = []
        if self._texts is not None and delta.token_ids:
            logprobs = chat_logprobs(self._texts, delta)["content"]
        events = self._show(said, logprobs, last=delta.finish_reason is not None)
        if delta.finish_reason is not None:
            self._cut = delta.finish_reason is FinishReason.LENGTH
        return events

    def _show(self, said: Said, logprobs: list[Json], *, last: bool) -> bytes:
        """The events for new output, in the order in which models write it."""
        events = b""
        if said.reasoning:
            events += self._text("reasoning", said.reasoning, [])
        kind = "message" if self._open is None else self._open["type"]
        self._logprobs += logprobs
        if said.content or (last and self._logprobs and self._items and kind == "message"):
            events += self._text("message", said.content, self._logprobs)
            self._logprobs = []
        elif said.reasoning or said.calls or kind != "message":
            self._logprobs = []  # of reasoning, of a call, or of their marks: no message shows these
        for call in said.calls:
            events += self._call(call)
        return events

    def _text(self, kind: str, text: str, logprobs: list[Json]) -> bytes:
        """Add to the open item, if it is of this kind; else open one."""
        events = b""
        if self._open is None or self._open["type"] != kind:
            events = self._close() + self._add(kind)
            part: Json = {"type": _PARTS[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            events += self._event("response.content_part.added", **self._place(0), part=part)
            self._items[-1]["content"].append(part)
        part = self._items[-1]["content"][0]
        part["text"] += text
        more: Json = {}
        if kind == "message":
            part["logprobs"].extend(logprobs)
            more = {"logprobs": logprobs}
        return events + self._event(f"response.{_PARTS[kind]}.delta", **self._place(0), delta=text, **more)

    def _call(self, call: CallDelta) -> bytes:
        events = b""
        if call.id is not None:
            events = self._close()
            events += self._add("function_call", call_id=call.id, name=call.name, arguments="")
        if call.arguments:
            self._items[-1]["arguments"] += call.arguments
            kind = "response.function_call_arguments.delta"
            events += self._event(kind, **self._place(), delta=call.arguments)
        return events

    def _add(self, kind: str, **members: Any) -> bytes:
        """Open an item."""
        # An item's id names its response, so that a reference finds it.
        item_id = f"{_PREFIXES[kind]}_{self._response['id'].removeprefix('resp_')}_{len(self._items)}"
        item: Json = {"id": item_id, "type": kind, "status": "in_progress", **members}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._items.append(item)
        self._open = item
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _place(self, content_index: int | None = None) -> Json:
        """The members that name the item of an event."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place if content_index is None else {**place, "content_index": content_index}

    def _close(self, status: str = "completed") -> bytes:
        """End the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return b""
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = self._event("response.function_call_arguments.done", **self._place(), **done)
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            kind = _PARTS[item["type"]]
            events = self._event(f"response.{kind}.done", **self._place(0), text=part["text"], **more)
            events += self._event("response.content_part.done", **self._place(0), part=part)
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _finish(self, usage: Json) -> bytes:
        """End the last item, and note how the response ended."""
        status = "incomplete" if self._cut else "completed"
        events = b"" if self._items else self._text("message", "", self._logprobs)
        events += self._close(status)
        self._response |= {
            "status": status,
            "completed_at": None if self._cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if self._cut else None,
            "output": self._items,
            "usage": _usage(usage, self._reasoning_tokens),
        }
        self._keep(self._response)
        return events


def _usage(usage: Json, reasoning_tokens: int) -> Json:
    """The usage under this API's names."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage["total_tokens"],
        "kvrail": usage["kvrail"],
    }
