"""What a reply comes to: an answer with its latencies, or a failure with its kind."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvrail.tools.bench.client import TIMEOUT, Reply

Json = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """A request that succeeded; seconds as `vllm bench serve` defines them.

    ttft: from sending to the first token's chunk. gaps: between one chunk with output and the next (its ITL). usage: as
    the server sent it.
    """

    ttft: float
    gaps: list[float]
    text: str
    usage: Json

    @property
    def tokens(self) -> int:
        """Tokens of the output."""
        return int(self.usage["completion_tokens"])

    @property
    def e2el(self) -> float:
        """End-to-end latency: from sending to the last chunk with output."""
        return self.ttft + sum(self.gaps)

    @property
    def tpot(self) -> float:
        """Time per output token after the first; 0 where there is but one."""
        return sum(self.gaps) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def kvrail(self) -> Json:
        """What only kvrail's servers tell: codec, bytes, times; empty for others."""
        return self.usage.get("kvrail") or {}


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed. kind: what such failures are counted under."""

    kind: str
    message: str


@dataclass(slots=True)
class _Stream:
    """What the events of one stream say. moments: of chunks with output."""

    moments: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: Json = field(default_factory=dict)
    finish_reason: str | None = None
    done: bool = False


def read(reply: Reply, output_tokens: int) -> Answer | Failure:
    """The answer, if it ended with [DONE], has a finish reason and as many tokens as asked for."""
    if reply.status != 200 and reply.status:
        return Failure(f"HTTP {reply.status}", _message(b"".join(part for _, part in reply.parts)))
    stream = _Stream()
    try:
        for moment, data in _events(reply):
            if failure := _take(stream, moment, data):
                return failure
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return Failure("unreadable", f"this is no stream of completions: {type(error).__name__}: {error}")
    if not stream.done or (reply.trouble and reply.trouble[0] == TIMEOUT):
        return Failure(*(reply.trouble or ("broke off", "the stream ended without [DONE]")))
    tokens = stream.usage.get("completion_tokens")
    if tokens is None:
        return Failure("no usage", "the stream had no number of tokens; the server must know include_usage")
    if tokens != output_tokens or not stream.moments:
        return Failure("wrong number of tokens", f"{tokens} tokens came; {output_tokens} were asked for")
    if stream.finish_reason is None:
        return Failure("no finish reason", "the stream ended without a finish_reason")
    gaps = [later - earlier for earlier, later in zip(stream.moments, stream.moments[1:], strict=False)]
    return Answer(stream.moments[0] - reply.begin, gaps, "".join(stream.texts), stream.usage)


def _events(reply: Reply) -> Iterator[tuple[float, bytes]]:
    """The data of each server-sent event, with the moment at which its line was complete; up to [DONE]."""
    rest = b""
    for moment, part in reply.parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield moment, line[5:].strip()


def _take(stream: _Stream, moment: float, data: bytes) -> Failure | None:
    """Add an event; a failure where it is an error."""
    if data == b"[DONE]":
        stream.done = True
        return None
    chunk = json.loads(data)
    if error := chunk.get("error"):
        return Failure("error in the stream", str(error.get("message", error) if isinstance(error, dict) else error))
    if chunk.get("usage"):
        stream.usage = chunk["usage"]
    if choices := chunk.get("choices"):
        stream.moments.append(moment)
        stream.texts.append(choices[0].get("text") or "")
        stream.finish_reason = choices[0].get("finish_reason") or stream.finish_reason
    return None


def _message(body: bytes) -> str:
    """What an error's body says."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace").strip() or "(no message)"
