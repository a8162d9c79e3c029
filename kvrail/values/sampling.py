"""What a request asks of the sampler, and what it gets back. Free of torch: the router uses it too."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy, as in vLLM: float32 logits divided by them have no room for noise."""

MAX_GRAMMAR_BYTES = 256 << 10
"""Of one grammar. OpenAI takes schemas of up to 120,000 characters."""


class LogitBias(dict[int, float]):
    """What is added to the logits of tokens; up to a vocabulary of them.

    laid_out: what the engine makes of it once, rather than at each token.
    """

    laid_out: Any = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request, with the meaning that the OpenAI API and vLLM give them.

    `temperature` below GREEDY_BELOW is greedy. `top_k` 0 is off. `logprobs` None asks for none; k asks for the chosen
    token's and the k most likely ones', or those of `logprob_token_ids` where it names some; `prompt_logprobs` asks the
    same of the prompt's tokens. `seed` is always set: the random draw for a token is keyed by (seed, sequence index,
    position, token id), so a run repeats. `grammar` is what the output must match (kvrail.grammar.texts): it says which
    tokens may be drawn and when the output may end, whatever `ignore_eos` says. Before `min_tokens` it ends only where
    the grammar allows nothing else.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    grammar: str = ""
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()

    @property
    def listed_logprobs(self) -> int:
        """Log probabilities that each output token has beside its own."""
        return len(self.logprob_token_ids) or self.logprobs or 0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a random draw."""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of an emitted token, and (token id, log probability) of the most likely ones."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of some of a prompt's tokens, one behind the other; columns, since there can be many.

    first: which token of the prompt is the first of them, from 1 on: token 0 follows nothing. ranks: 1 for the most
    likely token at its place. top: how many of the most likely tokens each one has; top_ids and top_logprobs have
    theirs one behind the other, the most likely first.
    """

    first: int
    logprobs: Sequence[float]
    ranks: Sequence[int]
    top: int = 0
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()

    def most_likely(self, place: int) -> Iterable[tuple[int, float]]:
        """Token ids and log probabilities of the most likely tokens at the place of the token `first` + `place`."""
        begin, end = place * self.top, (place + 1) * self.top
        return zip(self.top_ids[begin:end], self.top_logprobs[begin:end], strict=True)


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
