"""Requests to the engine, and whether it can ever serve them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvrail.engine.kv.pages import PagePool
from kvrail.errors import ContextLengthError, InvalidRequestError
from kvrail.grammar import Grammar
from kvrail.values.pagehash import page_space
from kvrail.values.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Resumed:
    """The output of one of a request's sequences in another engine. ended: the sequence has ended."""

    token_ids: tuple[int, ...]
    ended: bool = False


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to continue.

    request_id: of this call alone. caller_id: the name that its caller and other workers use. client: the client as the
    router names it. remote: another worker computes the prompt's KV, unless at most local_tokens of it are missing.
    prefill_only: draw the first tokens, compute nothing further. resumed: the output of each of the n sequences in
    another engine; it is continued, and the prompt computed here. provisional: report drafts before they are verified.
    cache_space, cache_salt: pages are shared with requests of the same ones only; a codec that loses bits has a space
    of its own.
    grammar: params.grammar, compiled. scored: see Sequence; more than 0 if another engine has reported log
    probabilities of the prompt.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    remote: bool = False
    local_tokens: int = 0
    prefill_only: bool = False
    resumed: tuple[Resumed, ...] = ()
    provisional: bool = False
    cache_space: str = ""
    caller_id: str = ""
    client: str = ""
    grammar: Grammar | None = None
    scored: int = 0
    cache_salt: str = ""

    @property
    def space(self) -> str:
        """Whose pages it shares, as hashes have it."""
        return page_space(self.cache_space, self.cache_salt)


@dataclass(frozen=True, slots=True)
class WrittenPages:
    """Pages of a prefill-only request that a step completes: logical numbers first_page to end_page - 1."""

    request_id: str
    first_page: int
    end_page: int


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the model that requests are checked against."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


def check_request(request: EngineRequest, limits: ModelLimits, pool: PagePool) -> None:
    """Raise InvalidRequestError or ContextLengthError if the request can never be served."""
    prompt = request.prompt_ids
    if request.params.grammar and request.grammar is None:
        raise InvalidRequestError("the grammar was not compiled; compile it before the request is submitted")
    if not prompt:
        raise InvalidRequestError("the prompt is empty; give at least one token", param="prompt")
    length = len(prompt) + _longest_resumed(request.resumed, request.params)
    tokens = itertools.chain(prompt, *(each.token_ids for each in request.resumed))
    outside = [token for token in tokens if not 0 <= token < limits.vocab_size]
    if outside:
        raise InvalidRequestError(
            f"token id {outside[0]} is outside the vocabulary of {limits.vocab_size}", param="prompt"
        )
    if not 0 <= request.scored < len(prompt):
        raise InvalidRequestError(
            f"{request.scored} tokens of a prompt of {len(prompt)} cannot be scored", param="scored_tokens"
        )
    for name in ("logit_bias", "stop_token_ids", "logprob_token_ids"):
        unknown = [token for token in getattr(request.params, name) if not 0 <= token < limits.vocab_size]
        if unknown:
            raise InvalidRequestError(
                f"{name} names token id {unknown[0]}; the vocabulary has {limits.vocab_size}", param=name
            )
    if length >= limits.max_model_len:
        raise ContextLengthError(
            f"{'the prompt has' if length == len(prompt) else 'prompt and resumed output have'} {length} tokens;"
            f" the model's context is {limits.max_model_len} tokens, with room for at least one more; shorten it",
            param="prompt",
        )
    longest = min(len(prompt) + (0 if request.prefill_only else request.params.max_tokens), limits.max_model_len)
    if -(-longest // pool.page_size) > pool.most_pages:
        raise ContextLengthError(
            f"prompt and max_tokens make up to {longest} tokens; this worker's KV cache holds"
            f" {pool.most_pages * pool.page_size}; shorten the prompt or lower max_tokens",
            param="max_tokens",
        )


def _longest_resumed(resumed: Sequence[Resumed], params: SamplingParams) -> int:
    if not resumed:
        return 0
    if len(resumed) != params.n or all(each.ended for each in resumed):
        ended = sum(each.ended for each in resumed)
        raise InvalidRequestError(
            f"{len(resumed)} sequences ({ended} ended) cannot be resumed with n {params.n}; give all n,"
            " at least one of them not ended",
            param="resumed",
        )
    most = max(len(each.token_ids) for each in resumed if not each.ended)
    if most >= params.max_tokens:
        raise InvalidRequestError(f"{most} tokens cannot be resumed at max_tokens {params.max_tokens}", param="resumed")
    return most
