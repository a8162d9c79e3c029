"""Writes the answers of /v1/messages: content blocks, whole or as events.

message_start
  content_block_start, content_block_delta …, content_block_stop     (each of text, thinking, tool_use)
message_delta, message_stop, or error
"""

import json
import math

from kvrail.errors import KvrailError
from kvrail.services.router.errors import anthropic_error, to_http
from kvrail.services.router.openai.events import encode_named
from kvrail.services.router.plan.reading import OutputReader
from kvrail.services.router.plan.tools.forms import CallDelta, Said
from kvrail.services.router.values import Delta, Json, Scored, Updates
from kvrail.values.sampling import FinishReason

EVENTS = (
    "message_start",
    "ping",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
    "error",
)
PING = encode_named({"type": "ping"})


def failure_event(error: KvrailError, request_id: str) -> bytes:
    """The event of an error."""
    return encode_named(anthropic_error(str(error), to_http(error)[0], request_id))


class MessageWriter:
    """Writes one message; reader: splits its output into parts. prompt_tokens: of the whole prompt."""

    greets = False  # as with OpenAI's older APIs, the first event goes with the first token

    def __init__(self, message_id: str, model: str, prompt_tokens: int, reader: OutputReader, request_id: str) -> None:
        self._message: Json = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "diagnostics": None,
            "usage": _usage(prompt_tokens, 0, 0, 0),
        }
        self._reader, self._request_id = reader, request_id
        self._blocks: list[Json] = []
        self._open = ""  # kind of the last block, where more of it may come
        self._arguments = ""  # of the call that is open
        self._thinking_tokens = 0

    def opening(self) -> bytes:
        """The message, before there is any output."""
        return encode_named({"type": "message_start", "message": self._message}) + PING

    def events(self, updates: Updates) -> bytes:
        """What happens to blocks."""
        return b"".join(self._take(update) for update in updates if isinstance(update, Delta))

    def closing(self, usage: Json) -> bytes:
        """Why it ended, and the usage."""
        events = self._finish(usage)
        shown = {name: self._message[name] for name in ("stop_reason", "stop_sequence")}
        events += encode_named({"type": "message_delta", "delta": shown, "usage": self._message["usage"]})
        return events + encode_named({"type": "message_stop"})

    def failure(self, error: KvrailError) -> bytes:
        """An error; nothing follows it."""
        return failure_event(error, self._request_id)

    def add(self, update: Delta | Scored) -> None:
        """Collect new output; this API has no log probabilities of prompts."""
        if isinstance(update, Delta):
            self._take(update)

    def whole(self, usage: Json) -> Json:
        """The whole message."""
        self._finish(usage)
        return self._message

    def _take(self, delta: Delta) -> bytes:
        said = self._reader.push(delta.text, last=delta.finish_reason is not None)
        if said.reasoning and not said.content:
            self._thinking_tokens += len(delta.token_ids)
        events = self._show(said)
        if delta.finish_reason is not None:
            self._message["stop_reason"] = "max_tokens" if delta.finish_reason is FinishReason.LENGTH else "end_turn"
            if isinstance(delta.stop_reason, str):
                self._message |= {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        return events

    def _show(self, said: Said) -> bytes:
        events = b""
        if said.reasoning:
            events += self._text("thinking", said.reasoning)
        if said.content:
            events += self._text("text", said.content)
        for call in said.calls:
            events += self._call(call)
        return events

    def _text(self, kind: str, text: str) -> bytes:
        """Add to the open block, if it is of this kind; else open one."""
        events = b""
        if self._open != kind:
            begun: Json = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {"citations": []})}
            events = self._close() + self._start(begun)
        self._blocks[-1][kind] += text
        return events + self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: CallDelta) -> bytes:
        events = b""
        if call.id is not None:
            events = self._close() + self._start(_called(call))
        if call.arguments:
            self._arguments += call.arguments
            events += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        return events

    def _start(self, block: Json) -> bytes:
        self._blocks.append(block)
        self._open, self._arguments = block["type"], ""
        return encode_named({"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block})

    def _delta(self, delta: Json) -> bytes:
        return encode_named({"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta})

    def _close(self) -> bytes:
        """End the open block, if there is one."""
        kind, self._open = self._open, ""
        if not kind:
            return b""
        if kind == "tool_use":
            self._blocks[-1]["input"] = _parsed(self._arguments)
        return encode_named({"type": "content_block_stop", "index": len(self._blocks) - 1})

    def _finish(self, usage: Json) -> bytes:
        """End the last block, and note how the message ended."""
        called = any(block["type"] == "tool_use" for block in self._blocks)
        if called and self._message["stop_reason"] in ("end_turn", "stop_sequence"):
            self._message |= {"stop_reason": "tool_use", "stop_sequence": None}
        events = self._close()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        shown = _usage(usage["prompt_tokens"], usage["completion_tokens"], cached, self._thinking_tokens)
        self._message |= {"content": self._blocks, "usage": {**shown, "kvrail": usage["kvrail"]}}
        return events


def _called(call: CallDelta) -> Json:
    """A call's block before its arguments; its `caller` is the model itself, not code that the model has written."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}, "caller": {"type": "direct"}}


def _parsed(arguments: str) -> Json:
    """The arguments as an object; empty where they are none, as where the output was cut off within them."""
    try:
        value = json.loads(arguments or "{}", parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _finite(number: str) -> float | None:
    """A number of a model's JSON; NaN and what is beyond a double, which no JSON has, as null."""
    return value if math.isfinite(value := float(number)) else None


def _usage(prompt_tokens: int, completion_tokens: int, cached: int, thinking: int) -> Json:
    """Counts under Anthropic's names: cached tokens of the prompt are not among its input tokens."""
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "cache_read_input_tokens": cached,
        "output_tokens": completion_tokens,
        "output_tokens_details": {"thinking_tokens": thinking},
        "server_tool_use": None,
        "service_tier": "standard",
        "speed": "standard",
        "inference_geo": None,
    }
