"""Responses in OpenAI's shapes, whole and as chunks of a stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvrail.text import Tokenizer
from services.router.logprobs import CompletionLogprobs, chat_logprobs
from services.router.reading import OutputReader
from services.router.tools.shown import join_calls, shown_delta, whole_message
from services.router.values import Delta, Drafted, Settled

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one response has; created: Unix seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def envelope(self, kind: str, choices: list[Json]) -> Json:
        """An object of the API."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


@dataclass(slots=True)
class Choice:
    """One choice of a whole response, while it grows."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta, logprobs: Json | None) -> None:
        """Append new output."""
        self.text.append(delta.text)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            self.stop_reason = delta.stop_reason


class Format(Protocol):
    """One of the two APIs."""

    verbatim: bool
    """Whether text is shown as it comes."""

    def opening(self) -> list[Json]:
        """Chunks that go before the first output."""

    def chunk(self, delta: Delta) -> Json | None:
        """The chunk for new output; None where it has nothing to show."""

    def draft_chunk(self, news: Drafted | Settled) -> Json:
        """The chunk that tells of drafts: one without output, and the member `kvrail`."""

    def last(self) -> Json:
        """The chunk without choices that carries the usage."""

    def add(self, delta: Delta) -> None:
        """Collect new output for `whole`."""

    def whole(self) -> Json:
        """The response with all output that was added."""


def _join_lists(parts: Sequence[Json]) -> Json:
    """Merge objects of parallel lists; a field that is no list keeps its first value."""
    first = parts[0]
    return {
        key: [item for part in parts for item in part[key]] if isinstance(value, list) else value
        for key, value in first.items()
    }


def _finish(delta: Delta, *, called: bool = False) -> Json:
    """How a choice ended, if it did; called: it has called a tool."""
    reason = None if delta.finish_reason is None else delta.finish_reason.value
    if called and reason == "stop":
        reason = "tool_calls"
    return {"finish_reason": reason, "stop_reason": delta.stop_reason}


def _draft_member(news: Drafted | Settled) -> Json:
    """The member `kvrail` of a chunk that tells of drafts (docs/provisional-streaming.md)."""
    if isinstance(news, Drafted):
        place = {"index": news.index, "position": news.position}
        return {"provisional": {**place, "tokens": len(news.token_ids), "text": news.text}}
    member: Json = {}
    if news.accepted:
        member["confirm"] = {"index": news.index, "position": news.position, "tokens": news.accepted}
    if news.accepted < news.proposed:
        member["retract"] = {"index": news.index, "position": news.position + news.accepted}
    return member


class ChatFormat:
    """chat.completion and chat.completion.chunk."""

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer,
        *,
        choices: int,
        logprobs: bool,
        reader: Callable[[], OutputReader] | None = None,
    ) -> None:
        """reader: what takes a choice's output apart; None: all of it is content."""
        self._head = head
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._choices = [Choice() for _ in range(choices)]
        self._readers = [OutputReader(None, None) if reader is None else reader() for _ in range(choices)]
        self.verbatim = reader is None

    def _chunk(self, choices: list[Json]) -> Json:
        return self._head.envelope("chat.completion.chunk", choices)

    def _find_logprobs(self, delta: Delta) -> Json | None:
        return chat_logprobs(self._tokenizer, delta) if self._logprobs and delta.token_ids else None

    def opening(self) -> list[Json]:
        """Each choice's role."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(len(self._choices))
        ]

    def chunk(self, delta: Delta) -> Json | None:
        """New text; None where it is held back and nothing else is to say."""
        logprobs = self._find_logprobs(delta)
        reader = self._readers[delta.index]
        shown = shown_delta(reader.push(delta.text, last=delta.finish_reason is not None))
        if not shown and logprobs is None and delta.finish_reason is None:
            return None
        finish = _finish(delta, called=reader.called)
        return self._chunk([{"index": delta.index, "delta": shown, "logprobs": logprobs, **finish}])

    def draft_chunk(self, news: Drafted | Settled) -> Json:
        """An empty delta, and the member `kvrail`."""
        choice = {"index": news.index, "delta": {}, "logprobs": None, "finish_reason": None}
        return {**self._chunk([choice]), "kvrail": _draft_member(news)}

    def last(self) -> Json:
        """A chunk without choices."""
        return self._chunk([])

    def add(self, delta: Delta) -> None:
        """Collect new output."""
        choice, reader = self._choices[delta.index], self._readers[delta.index]
        said = reader.push(delta.text, last=delta.finish_reason is not None)
        choice.add(replace(delta, text=said.content), self._find_logprobs(delta))
        choice.reasoning.append(said.reasoning)
        join_calls(choice.calls, said.calls)
        if reader.called and choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"

    def whole(self) -> Json:
        """The whole response."""
        return self._head.envelope(
            "chat.completion",
            [
                {
                    "index": i,
                    "message": whole_message("".join(choice.text), "".join(choice.reasoning), choice.calls),
                    "logprobs": _join_lists(choice.logprobs) if choice.logprobs else None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for i, choice in enumerate(self._choices)
            ],
        )


class CompletionFormat:
    """text_completion, whole or as chunks; prefixes: text before each choice's output."""

    def __init__(self, head: Head, tokenizer: Tokenizer, *, prefixes: Sequence[str], logprobs: bool) -> None:
        self._head = head
        self.verbatim = True
        self._prefixes = prefixes
        self._choices = [Choice() for _ in prefixes]
        self._logprobs = [CompletionLogprobs(tokenizer) for _ in prefixes] if logprobs else []

    def _find_logprobs(self, delta: Delta) -> Json | None:
        return self._logprobs[delta.index].take(delta) if self._logprobs and delta.token_ids else None

    def _chunk(self, choices: list[Json]) -> Json:
        return self._head.envelope("text_completion", choices)

    def opening(self) -> list[Json]:
        """Each choice's prompt, where it is to be echoed."""
        return [
            self._chunk([{"index": i, "text": prefix, "logprobs": None, "finish_reason": None}])
            for i, prefix in enumerate(self._prefixes)
            if prefix
        ]

    def chunk(self, delta: Delta) -> Json | None:
        """New text; None where it is held back and nothing else is to say."""
        logprobs = self._find_logprobs(delta)
        if not delta.text and logprobs is None and delta.finish_reason is None:
            return None
        return self._chunk([{"index": delta.index, "text": delta.text, "logprobs": logprobs, **_finish(delta)}])

    def draft_chunk(self, news: Drafted | Settled) -> Json:
        """An empty text, and the member `kvrail`."""
        choice = {"index": news.index, "text": "", "logprobs": None, "finish_reason": None}
        return {**self._chunk([choice]), "kvrail": _draft_member(news)}

    def last(self) -> Json:
        """A chunk without choices."""
        return self._chunk([])

    def add(self, delta: Delta) -> None:
        """Collect new output."""
        self._choices[delta.index].add(delta, self._find_logprobs(delta))

    def whole(self) -> Json:
        """The whole response."""
        return self._chunk(
            [
                {
                    "index": i,
                    "text": prefix + "".join(choice.text),
                    "logprobs": _join_lists(choice.logprobs) if choice.logprobs else None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for i, (prefix, choice) in enumerate(zip(self._prefixes, self._choices, strict=True))
            ]
        )
