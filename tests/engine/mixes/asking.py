"""Random requests: what each asks, and how it comes to the engine."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLTokenizer

from kvrail.engine.request.requests import EngineRequest, Resumed
from kvrail.grammar import Grammar, texts
from kvrail.grammar.compiling import compile_text
from kvrail.text import Tokenizer, load_tokenizer
from kvrail.values.sampling import LogitBias, SamplingParams
from tests.engine.mixes.machine import EOS, VOCAB
from tests.engine.mixes.site import Answer
from tests.models import tiny_model

MOST_TOKENS = 40
"""Of one sequence's output."""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 6}},
    "required": ["a"],
    "additionalProperties": False,
}
GRAMMARS = tuple(
    texts.whole(part)
    for part in (
        texts.from_schema(SCHEMA, lenient=True),
        texts.from_lark("start: /[a-f]{4,12}/"),
        texts.from_lark('start: ("yes" | "no" | "maybe so") " " /[0-9]+/'),
        texts.from_lark("start: /(.|\\n)*/"),
    )
)
STOPS = ("e", "th", "a", "\x01", "z!", "ab", "o", "�")


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(tiny_model("llama")))


@functools.cache
def grammar(text: str) -> Grammar:
    return compile_text(LLTokenizer(tokenizer().to_json(VOCAB), n_vocab=VOCAB, eos_token=[EOS]), text)


@dataclass
class Ask:
    """One request. alone: its answer when no other is there. leaves: whether its client may leave; gone: it has.

    sent: how many tokens of each sequence another engine has told already.
    """

    name: str
    prompt: list[int]
    params: SamplingParams
    alone: Answer
    kind: str = "local"
    leaves: bool = False
    gone: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)

    def request(self) -> EngineRequest:
        return request(self.name, self.prompt, self.params, **self.options)

    def __str__(self) -> str:
        return f"{self.name}, {self.kind} {self.options}, {len(self.prompt)} tokens of prompt, {self.params}"


def request(name: str, prompt: list[int], params: SamplingParams, **options: Any) -> EngineRequest:
    compiled = grammar(params.grammar) if params.grammar else None
    return EngineRequest(name, tuple(prompt), params, grammar=compiled, **options)


class Asking:
    """Makes requests whose prompts share beginnings; half of them were asked before, and may come in another way.

    alone: answers a request by itself. longest: tokens of a prompt.
    """

    def __init__(
        self, rng: random.Random, longest: int, page_size: int, alone: Callable[[list[int], SamplingParams], Answer]
    ) -> None:
        self._rng, self._longest, self._page_size, self._alone = rng, longest, page_size, alone
        self._shared = rng.choices(range(256), k=longest)
        self._known: list[tuple[list[int], SamplingParams, Answer]] = []

    def ask(self, name: str) -> Ask:
        if not self._known or self._rng.random() < 0.5:
            prompt, params = self._prompt(), params_of(self._rng)
            self._known.append((prompt, params, self._alone(prompt, params)))
        made = Ask(name, *self._rng.choice(self._known[-8:]), leaves=self._rng.random() < 0.25)
        made.sent = [0] * made.params.n
        if made.alone.failed is None:
            self._come_as(made)
        return made

    def _prompt(self) -> list[int]:
        """A beginning that is shared with others, or a chat so far, and tokens of its own; or all of it is shared."""
        rng, longest = self._rng, self._longest
        if self._known and rng.random() < 0.25:
            before, _, answer = rng.choice(self._known)
            return [*before, *answer.tokens[0], *rng.choices(range(256), k=rng.randint(1, 4))][:longest]
        pages = rng.randint(1, max(1, longest // self._page_size))
        length = rng.choice([rng.randint(1, 8), rng.randint(1, longest), min(longest, pages * self._page_size)])
        cut = rng.choice([0, rng.randint(0, length), rng.randint(0, length), length])
        return [*self._shared[:cut], *rng.choices(range(256), k=length - cut)]

    def _come_as(self, made: Ask) -> None:
        rng, draw, scored = self._rng, self._rng.random(), made.params.prompt_logprobs is not None
        length = len(made.prompt)
        if draw < 0.12:
            made.kind, made.options = "prefill", {"prefill_only": True}
        elif draw < 0.24:
            self._resume(made)
        elif draw < 0.65 and not scored:
            local, provisional = rng.choice([0, 0, 0, 10]), rng.random() < 0.7
            made.kind, made.options = "remote", {"remote": True, "local_tokens": local, "provisional": provisional}
        elif scored and rng.random() < 0.3:
            made.options = {"scored": rng.randrange(length)}

    def _resume(self, made: Ask) -> None:
        rng, tokens = self._rng, made.alone.tokens
        sent = [rng.randint(0, len(each)) for each in tokens]
        if all(count == len(each) for count, each in zip(sent, tokens, strict=True)):
            going = rng.randrange(len(sent))  # one at least goes on
            sent[going] = rng.randrange(len(tokens[going]))
        resumed = [Resumed(tuple(each[:count]), count == len(each)) for each, count in zip(tokens, sent, strict=True)]
        made.kind, made.sent, made.options = "resumed", sent, {"resumed": tuple(resumed)}
        if made.params.prompt_logprobs is not None:
            last = len(made.prompt) - 1
            made.options["scored"] = last if any(sent) else rng.randint(0, last)


def params_of(rng: random.Random) -> SamplingParams:
    """Each setting that changes what is drawn, told or ended, now and then."""
    most = rng.choice([1, 2, 3, 5, 8, 13, 24, MOST_TOKENS])
    asked: dict[str, Any] = {"max_tokens": most, "seed": rng.randrange(1 << 31)}
    asked["temperature"] = rng.choice([0.0, 0.0, 0.3, 0.8, 1.0, 1.5])
    few = (
        ("top_k", 0.25, lambda: rng.choice([1, 2, 20, 400])),
        ("top_p", 0.25, lambda: rng.choice([0.1, 0.5, 0.9, 0.99])),
        ("min_p", 0.25, lambda: rng.choice([0.02, 0.3])),
        ("repetition_penalty", 0.1, lambda: rng.choice([1.3, 0.8])),
        ("frequency_penalty", 0.1, lambda: rng.choice([0.7, -0.5])),
        ("presence_penalty", 0.1, lambda: rng.choice([0.5, -0.2])),
        ("logit_bias", 0.15, lambda: LogitBias((rng.randrange(VOCAB), rng.choice([-100.0, 5.0, -3])) for _ in "12345")),
        ("logprobs", 0.25, lambda: rng.choice([0, 1, 5])),
        ("logprob_token_ids", 0.05, lambda: tuple(rng.sample(range(VOCAB), 3))),
        ("n", 0.15, lambda: rng.choice([2, 3, 5])),
        ("ignore_eos", 0.5, lambda: True),
        ("stop", 0.2, lambda: tuple(rng.sample(STOPS, rng.randint(1, 3)))),
        ("stop_token_ids", 0.15, lambda: tuple(rng.sample(range(VOCAB), rng.choice([2, 40, 120])))),
        ("include_stop_in_output", 0.2, lambda: True),
        ("skip_special_tokens", 0.2, lambda: False),
        ("min_tokens", 0.25, lambda: rng.randint(1, most)),
        ("grammar", 0.2, lambda: rng.choice(GRAMMARS)),
        ("prompt_logprobs", 0.15, lambda: rng.choice([0, 1, 4])),
    )
    asked |= {name: value() for name, likely, value in few if rng.random() < likely}
    if "logprob_token_ids" in asked:
        asked.setdefault("logprobs", 0)
    return SamplingParams(**asked)
