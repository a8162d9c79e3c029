"""The two older APIs of OpenAI: what their chunks and whole responses hold."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import ClassVar

from kvrail.services.router.openai.logprobs import CompletionLogprobs, chat_logprobs
from kvrail.services.router.openai.scored import ScoredPrompt
from kvrail.services.router.openai.writers import ChunkWriter, Head
from kvrail.services.router.plan.tools.forms import Said
from kvrail.services.router.plan.tools.shown import join_calls, shown_delta, whole_message
from kvrail.services.router.plan.translate import Plan
from kvrail.services.router.schema import ChatRequest, CompletionRequest
from kvrail.services.router.values import Delta, Json, Scored
from kvrail.text import Tokenizer


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


class ChatWriter(ChunkWriter):
    """chat.completion and chat.completion.chunk."""

    kind = "chat.completion.chunk"
    silent: ClassVar[Json] = {"delta": {}}

    def __init__(self, head: Head, tokenizer: Tokenizer, request: ChatRequest, plan: Plan) -> None:
        super().__init__(head, tokenizer, request, plan, simple=plan.reader is None)
        prompt = plan.prompts[0]
        self._logprobs = bool(request.logprobs)
        self._prompt_ids = prompt if request.return_token_ids else None
        self._prompt = ScoredPrompt(self._texts, prompt) if plan.scores else None
        self._prompt_top = request.prompt_logprobs or 0
        self._choices = [Choice() for _ in range(plan.n)]
        self._readers = [plan.new_reader() for _ in range(plan.n)]
        self._reasoning = request.include_reasoning is not False

    def _find_logprobs(self, delta: Delta) -> Json | None:
        return chat_logprobs(self._texts, delta) if self._logprobs and delta.token_ids else None

    def first_chunks(self) -> list[Json]:
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

    def add(self, update: Delta | Scored) -> None:
        """Collect new output, or log probabilities of the prompt, which all choices share."""
        if isinstance(update, Scored):
            if self._prompt is not None and update.index == 0:
                self._prompt.add(update.logprobs)
            return
        choice, said = self._choices[update.index], self._read(update)
        choice.add(replace(update, text=said.content), self._find_logprobs(update))
        choice.reasoning.append(said.reasoning)
        join_calls(choice.calls, said.calls)
        if self._readers[update.index].called and choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"

    def whole(self, usage: Json) -> Json:
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
            "usage": usage,
        }


class CompletionWriter(ChunkWriter):
    """text_completion, whole or as chunks; prefixes of the plan: text before each choice's output."""

    kind = "text_completion"
    silent: ClassVar[Json] = {"text": ""}

    def __init__(self, head: Head, tokenizer: Tokenizer, request: CompletionRequest, plan: Plan) -> None:
        super().__init__(head, tokenizer, request, plan)
        prompts = [ids for ids in plan.prompts for _ in range(plan.n)]
        self._prefixes = [prefix for prefix in plan.prefixes for _ in range(plan.n)]
        self._choices = [Choice() for _ in prompts]
        self._prompt_ids = prompts if request.return_token_ids else None
        self._prompts = list(map(ScoredPrompt, repeat(self._texts), prompts, self._prefixes)) if plan.scores else []
        self._echo_top = request.logprobs if request.echo else None
        self._prompt_top = request.prompt_logprobs
        skip, echoed = plan.sampling[0].skip_special_tokens, self._echo_top is not None
        self._logprobs = [
            CompletionLogprobs(self._texts, len(prefix) if echoed else 0, ids, skip_special=skip)
            for prefix, ids in zip(self._prefixes, prompts, strict=True)
            if request.logprobs is not None
        ]

    def _find_logprobs(self, delta: Delta) -> Json | None:
        return self._logprobs[delta.index].take(delta) if self._logprobs and delta.token_ids else None

    def first_chunks(self) -> list[Json]:
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

    def whole(self, usage: Json) -> Json:
        """The whole response."""
        top = self._prompt_top
        choices: list[Json] = [
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
        ]
        return {**self._head.whole("text_completion", choices), "usage": usage}
