"""Responses in OpenAI's shapes, whole and as chunks of a stream."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from kvrail.services.router.openai.logprobs import CompletionLogprobs, TokenTexts, chat_logprobs
from kvrail.services.router.openai.scored import ScoredPrompt
from kvrail.services.router.plan.reading import OutputReader
from kvrail.services.router.plan.tools.forms import Said
from kvrail.services.router.plan.tools.shown import join_calls, shown_delta, whole_message
from kvrail.services.router.values import Delta, Drafted, Json, Scored, Settled


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

    def whole(self, kind: str, choices: list[Json]) -> Json:
        """A whole response, with the further keys that OpenAI's and vLLM's have."""
        return {**self.envelope(kind, choices), "service_tier": "default", "kv_transfer_params": None}


@dataclass(slots=True)
class Choice:
    """One choice of a whole response, while it grows."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta, logprobs: Json | None) -> None:
        """Append new output."""
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            self.stop_reason = delta.stop_reason


_UNENDED: Json = {"finish_reason": None}


class Format(ABC):
    """One of the two APIs whose streams are chunks of one shape.

    kind: of a chunk. silent: what a choice without output has there. simple: whether chunks that bring text alone
    differ only in that text.
    """

    kind: ClassVar[str]
    silent: ClassVar[Json]

    def __init__(self, head: Head, *, simple: bool) -> None:
        self._head = head
        self.simple = simple

    def _chunk(
        self, index: int, output: Json, logprobs: Json | None = None, end: Json = _UNENDED, **more: list[int]
    ) -> Json:
        """A chunk of one choice."""
        choice = {"index": index, **output, "logprobs": logprobs, **end, **more}
        return self._head.envelope(self.kind, [choice])

    @abstractmethod
    def opening(self) -> list[Json]:
        """Chunks that go before the first output."""

    @abstractmethod
    def chunk(self, delta: Delta) -> Json | None:
        """The chunk for new output; None where it is held back and there is nothing else to send."""

    def draft_chunk(self, news: Drafted | Settled) -> Json:
        """The chunk that reports drafts: one without output, and the member `kvrail`."""
        return {**self._chunk(news.index, self.silent), "kvrail": _draft_member(news)}

    @abstractmethod
    def scored_chunk(self, scored: Scored) -> Json | None:
        """The chunk with log probabilities of a prompt, where a stream shows them."""

    def last(self) -> Json:
        """The chunk without choices that carries the usage."""
        return self._head.envelope(self.kind, [])

    @abstractmethod
    def add(self, update: Delta | Scored) -> None:
        """Collect new output, or log probabilities of a prompt, for `whole`."""

    @abstractmethod
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
    """How a choice ended, if it did; called: whether it has called a tool."""
    reason = None if delta.finish_reason is None else delta.finish_reason.value
    if called and reason == "stop":
        reason = "tool_calls"
    return {"finish_reason": reason, "stop_reason": delta.stop_reason}


def _token_ids(delta: Delta, wanted: bool) -> Json:
    """The member with new token ids, where they are asked for and there are any."""
    return {"token_ids": list(delta.token_ids)} if wanted and delta.token_ids else {}


def _draft_member(news: Drafted | Settled) -> Json:
    """The member `kvrail` of a chunk that reports drafts (docs/provisional-streaming.md)."""
    if isinstance(news, Drafted):
        place = {"index": news.index, "position": news.position}
        return {"provisional": {**place, "tokens": len(news.token_ids), "text": news.text}}
    member: Json = {}
    if news.accepted:
        member["confirm"] = {"index": news.index, "position": news.position, "tokens": news.accepted}
    if news.accepted < news.proposed:
        member["retract"] = {"index": news.index, "position": news.position + news.accepted}
    return member


class ChatFormat(Format):
    """chat.completion and chat.completion.chunk."""

    kind = "chat.completion.chunk"
    silent: ClassVar[Json] = {"delta": {}}

    def __init__(
        self,
        head: Head,
        texts: TokenTexts,
        *,
        choices: int,
        logprobs: bool,
        reader: Callable[[], OutputReader] | None = None,
        reasoning: bool = True,
        prompt_ids: Sequence[int] | None = None,
        prompt: ScoredPrompt | None = None,
        prompt_top: int = 0,
    ) -> None:
        """reader: what takes a choice's output apart; None: all of it is content. reasoning: whether it is shown.

        prompt_ids: the prompt's token ids, where those of the output are shown too. prompt: where the whole answer
        has its log probabilities, with those of the `prompt_top` most likely tokens.
        """
        super().__init__(head, simple=reader is None and prompt_ids is None)
        self._texts = texts
        self._logprobs = logprobs
        self._prompt_ids = prompt_ids
        self._prompt = prompt
        self._prompt_top = prompt_top
        self._choices = [Choice() for _ in range(choices)]
        self._readers = [OutputReader(None, None) if reader is None else reader() for _ in range(choices)]
        self._reasoning = reasoning

    def _find_logprobs(self, delta: Delta) -> Json | None:
        return chat_logprobs(self._texts, delta) if self._logprobs and delta.token_ids else None

    def opening(self) -> list[Json]:
        """Each choice's role."""
        delta = {"role": "assistant", "content": ""}
        chunks = [self._chunk(i, {"delta": delta}) for i in range(len(self._choices))]
        if self._prompt_ids is not None:
            chunks[0]["prompt_token_ids"] = list(self._prompt_ids)
        return chunks

    def chunk(self, delta: Delta) -> Json | None:
        """New text; None where it is held back and there is nothing else to send."""
        logprobs = self._find_logprobs(delta)
        ids = _token_ids(delta, self._prompt_ids is not None)
        reader = self._readers[delta.index]
        shown = shown_delta(self._read(delta))
        if not shown and logprobs is None and delta.finish_reason is None and not ids:
            return None
        finish = _finish(delta, called=reader.called)
        return self._chunk(delta.index, {"delta": shown}, logprobs, finish, **ids)

    def _read(self, delta: Delta) -> Said:
        """New output, taken apart."""
        said = self._readers[delta.index].push(delta.text, last=delta.finish_reason is not None)
        return said if self._reasoning else replace(said, reasoning="")

    def scored_chunk(self, scored: Scored) -> Json | None:
        """None: requests that ask for a chat's stream cannot ask for these."""
        return None

    def add(self, update: Delta | Scored) -> None:
        """Collect new output, or log probabilities of the prompt, which all choices share."""
        if isinstance(update, Delta):
            self._add_output(update)
        elif self._prompt is not None and update.index == 0:
            self._prompt.add(update.logprobs)

    def _add_output(self, delta: Delta) -> None:
        choice, reader = self._choices[delta.index], self._readers[delta.index]
        said = self._read(delta)
        choice.add(replace(delta, text=said.content), self._find_logprobs(delta))
        choice.reasoning.append(said.reasoning)
        join_calls(choice.calls, said.calls)
        if reader.called and choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"

    def whole(self) -> Json:
        """The whole response."""
        choices: list[Json] = [
            {
                "index": i,
                "message": whole_message("".join(choice.text), "".join(choice.reasoning), choice.calls),
                "logprobs": _join_lists(choice.logprobs) if choice.logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "token_ids": None if self._prompt_ids is None else choice.token_ids,
            }
            for i, choice in enumerate(self._choices)
        ]
        return {
            **self._head.whole("chat.completion", choices),
            "prompt_token_ids": None if self._prompt_ids is None else list(self._prompt_ids),
            "prompt_logprobs": None if self._prompt is None else self._prompt.entries(self._prompt_top),
        }


class CompletionFormat(Format):
    """text_completion, whole or as chunks; prefixes: text before each choice's output."""

    kind = "text_completion"
    silent: ClassVar[Json] = {"text": ""}

    def __init__(
        self,
        head: Head,
        *,
        prefixes: Sequence[str],
        logprobs: Sequence[CompletionLogprobs] = (),
        prompt_ids: Sequence[Sequence[int]] | None = None,
        prompts: Sequence[ScoredPrompt] = (),
        echo_top: int | None = None,
        prompt_top: int | None = None,
    ) -> None:
        """logprobs: of each choice, where they are asked for.

        prompt_ids: token ids of each choice's prompt, where those of the output are shown too. prompts: each choice's,
        where their log probabilities are asked for. echo_top, prompt_top: how many likely tokens `logprobs` and
        `prompt_logprobs` then list; None: neither is asked for.
        """
        super().__init__(head, simple=prompt_ids is None)
        self._prefixes = prefixes
        self._choices = [Choice() for _ in prefixes]
        self._prompt_ids = prompt_ids
        self._prompts = prompts
        self._echo_top = echo_top
        self._prompt_top = prompt_top
        self._logprobs = logprobs

    def _find_logprobs(self, delta: Delta) -> Json | None:
        return self._logprobs[delta.index].take(delta) if self._logprobs and delta.token_ids else None

    def opening(self) -> list[Json]:
        """Each choice's prompt, where it is to be echoed or its tokens are scored.

        A prompt with log probabilities is echoed as they come.
        """
        prefixes = self._prefixes if self._echo_top is None else [""] * len(self._prefixes)
        return [
            self._chunk(i, {"text": prefix}, **self._prompt(i))
            for i, prefix in enumerate(prefixes)
            if prefix or self._prompt_ids is not None
        ]

    def _prompt(self, index: int) -> Json:
        """The member with the token ids of a choice's prompt, where they are wanted."""
        return {} if self._prompt_ids is None else {"prompt_token_ids": list(self._prompt_ids[index])}

    def chunk(self, delta: Delta) -> Json | None:
        """New text; None where it is held back and there is nothing else to send."""
        logprobs = self._find_logprobs(delta)
        ids = _token_ids(delta, self._prompt_ids is not None)
        if not delta.text and logprobs is None and delta.finish_reason is None and not ids:
            return None
        return self._chunk(delta.index, {"text": delta.text}, logprobs, _finish(delta), **ids)

    def scored_chunk(self, scored: Scored) -> Json | None:
        """The next part of an echoed prompt."""
        if self._echo_top is None:
            return None
        text, logprobs = self._prompts[scored.index].echo(scored.logprobs, self._echo_top)
        return self._chunk(scored.index, {"text": text}, logprobs)

    def add(self, update: Delta | Scored) -> None:
        """Collect new output, or log probabilities of a prompt."""
        if isinstance(update, Delta):
            self._choices[update.index].add(update, self._find_logprobs(update))
        else:
            self._prompts[update.index].add(update.logprobs)

    def _whole_logprobs(self, index: int) -> Json | None:
        """All log probabilities of a choice, of the echoed prompt and of the output."""
        echoed = [] if self._echo_top is None else self._prompts[index].lists(self._echo_top)
        parts = [*echoed, *self._choices[index].logprobs]
        return _join_lists(parts) if parts else None

    def whole(self) -> Json:
        """The whole response."""
        top = self._prompt_top
        return self._head.whole(
            "text_completion",
            [
                {
                    "index": i,
                    "text": prefix + "".join(choice.text),
                    "logprobs": self._whole_logprobs(i),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    "token_ids": None if self._prompt_ids is None else choice.token_ids,
                    "prompt_token_ids": None,
                    **self._prompt(i),
                    "prompt_logprobs": None if top is None else self._prompts[i].entries(top),
                }
                for i, (prefix, choice) in enumerate(zip(self._prefixes, self._choices, strict=True))
            ],
        )
