"""From an API request to what workers understand: token ids and sampling parameters."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from kvrail.errors import ContextLengthError
from kvrail.services.router.errors import refuse
from kvrail.services.router.plan import fields
from kvrail.services.router.plan.defaults import Defaults
from kvrail.services.router.plan.encoding import MAX_COUNTED_CHARS, Encoder
from kvrail.services.router.plan.reading import OutputReader
from kvrail.services.router.plan.shaping import Shape, Shaper
from kvrail.services.router.plan.tools.offered import offer_of
from kvrail.services.router.schema import (
    MAX_PROMPT_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    KvrailOptions,
    Request,
    named,
)
from kvrail.values.sampling import SamplingParams
from kvrail.wire.convert import MAX_LOGPROBS, UINT64_MAX, sampling_to_proto
from kvrail.wire.v1 import common_pb2

T = TypeVar("T")

MANY_BIASES = 4096
"""Beyond, a plan is made beside the event loop: a bias may be as wide as a vocabulary."""
MAX_SENT_BIASES = 1 << 20
"""Over all prompts of a request: seven times a vocabulary of 150,000, some 16 MB on their way to workers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to generate: one stream for each prompt.

    prompts: token ids. sampling: one for each prompt; wire: the same for workers. prefixes: text that goes before each
    prompt's output (echo). provisional: whether drafts are shown. traced: whether the usage shows what each process did
    when. priority: among the client's own requests; lower is earlier. reader: takes one output apart; None: it is shown
    as it is. silent: what is generated is not shown. special_stops: stop strings that are special tokens, by token id.
    kv_cache: the pages that decode workers have to keep (kvrail.values.kv_cache.Asked).
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sequence[SamplingParams]
    wire: Sequence[common_pb2.SamplingParams]
    prefixes: Sequence[str]
    codec: str
    provisional: bool
    special_stops: Mapping[int, str]
    traced: bool = False
    priority: int = 0
    reader: Callable[[], OutputReader] | None = None
    silent: bool = False
    cache_salt: str = ""
    kv_cache: str = ""

    @property
    def n(self) -> int:
        """Sequences of each prompt."""
        return self.sampling[0].n

    def new_reader(self) -> OutputReader:
        """What takes one output apart."""
        return OutputReader(None, None) if self.reader is None else self.reader()

    @property
    def scores(self) -> int:
        """Log probabilities of prompts that the answer has, over all choices."""
        return sum(
            self.n * len(prompt) * (1 + sampling.prompt_logprobs)
            for prompt, sampling in zip(self.prompts, self.sampling, strict=True)
            if sampling.prompt_logprobs is not None
        )

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt) for prompt in self.prompts)


def refuse_unsupported(request: ChatRequest | CompletionRequest) -> None:
    """Raise InvalidRequestError for what would change the answer but is not supported; ignore other unknown fields."""
    if request.stream_options is not None and not request.stream:
        refuse("stream_options", "only for streams; set stream to true or leave it out")
    if request.kvrail is not None and request.kvrail.provisional and not request.stream:
        refuse("kvrail.provisional", "only for streams; set stream to true or leave it out")
    if request.prompt_logprobs is not None and request.stream:
        refuse(
            "prompt_logprobs", "only for whole answers; set stream to false, or send logprobs and echo to completions"
        )
    if request.prompt_logprobs == -1:
        refuse("prompt_logprobs", f"-1 asks for the whole vocabulary at each token; ask for at most {MAX_LOGPROBS}")
    if request.logprob_token_ids and (request.logprobs is None or request.logprobs is False):
        refuse("logprob_token_ids", "only with logprobs; send logprobs too")
    own = fields.CHAT if isinstance(request, ChatRequest) else fields.COMPLETION
    fields.refuse_extras(request.model_extra or {}, {**fields.BOTH, **own})
    if isinstance(request, ChatRequest):
        _refuse_in_chat(request)
    else:
        _refuse_in_completion(request)


def _refuse_in_chat(request: ChatRequest) -> None:
    if request.functions:
        refuse("functions", "not supported by this server; send them as tools")
    if request.function_call not in (None, "none", "auto"):
        refuse("function_call", "not supported by this server; send tools and tool_choice")
    if request.audio:
        refuse("audio", "not supported by this server; leave it out")
    if request.modalities not in (None, [], ["text"]):
        refuse("modalities", 'this server only writes ["text"]; leave it out')
    if request.top_logprobs is not None and not request.logprobs:
        refuse("top_logprobs", "only with logprobs; set logprobs to true")


def _refuse_in_completion(request: CompletionRequest) -> None:
    if request.suffix:
        refuse("suffix", "not supported by this server; leave it out")
    if request.best_of is not None and request.best_of != (request.n or 1):
        refuse("best_of", f"is {request.best_of}, but n is {request.n or 1}; only best_of = n is supported")
    if request.max_tokens == 0 and not request.echo:
        refuse("max_tokens", "0 only with echo, which then shows the prompt alone; ask for at least 1")
    if request.truncate_prompt_tokens is not None and request.echo:
        refuse("truncate_prompt_tokens", "cannot be combined with echo, which shows the whole prompt; send one of them")


@dataclass(frozen=True, slots=True)
class Limits:
    """What every worker that takes such requests now can do; context: tokens, prompt and output together."""

    context: int
    vocabulary: int
    codecs: frozenset[str]
    withheld_codecs: frozenset[str]  # lossy ones that the operator has not allowed


class _Found(NamedTuple):
    """What chats and completions differ in; field: of the prompts. One of each prefix and of token ids for a prompt."""

    field: str
    prompts: Sequence[list[int]]
    prefixes: Sequence[str]
    max_tokens: int | None
    logprobs: int | None
    shape: Shape


class Planner:
    """Turns validated requests into plans.

    limits: gives those of the workers whose pages serve what a request asks for; raises WorkerUnavailableError without
    one, InvalidRequestError where none will come.
    """

    def __init__(
        self,
        encoder: Encoder,
        shaper: Shaper,
        limits: Callable[[str], Limits],
        defaults: Defaults,
        *,
        priorities: bool = False,
    ) -> None:
        """priorities: whether requests may name theirs."""
        self.defaults = defaults
        self._encoder = encoder
        self._shaper = shaper
        self._limits = limits
        self._priorities = priorities

    async def plan(self, request: ChatRequest | CompletionRequest, client: str) -> Plan:
        """Plan a request of a client's; raises InvalidRequestError naming the parameter."""
        refuse_unsupported(request)
        limits = self._limits(request.kvrail.kv_cache if request.kvrail else "")
        if isinstance(request, ChatRequest):
            found = await self._chat(request, client, limits)
        else:
            found = await self._completion(request, client, limits)
        if len(request.logit_bias or ()) <= MANY_BIASES:
            return self._plan(request, limits, found)
        return await asyncio.to_thread(self._plan, request, limits, found)

    async def _chat(self, request: ChatRequest, client: str, limits: Limits) -> _Found:
        offer = offer_of(request)
        shown = () if offer is None else offer.shown
        wanted = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        keep = _kept(request, limits.context, wanted)
        prompts = [await self._encoder.chat(request, client, limits.context, tools=shown, keep=keep)]
        shape = await self._shaper.chat(request, client, offer, prompts[0])
        top = (request.top_logprobs or 0) if request.logprobs else None
        return _Found("messages", prompts, [""], wanted, top, shape)

    async def count(self, request: ChatRequest, client: str) -> int:
        """Tokens of a chat's prompt; raises InvalidRequestError naming the parameter."""
        refuse_unsupported(request)
        offer = offer_of(request)
        shown = () if offer is None else offer.shown
        return len(await self._encoder.chat(request, client, most_chars=MAX_COUNTED_CHARS, tools=shown))

    async def _completion(self, request: CompletionRequest, client: str, limits: Limits) -> _Found:
        shape = await self._shaper.completion(request, client)
        keep = _kept(request, limits.context, request.max_tokens)
        prompts, prefixes = await self._encoder.prompts(request, client, limits.context, keep)
        return _Found("prompt", prompts, prefixes, request.max_tokens, request.logprobs, shape)

    def _plan(self, request: Request, limits: Limits, found: _Found) -> Plan:
        field, prompts, prefixes, max_tokens, logprobs, shape = found
        if request.priority and not self._priorities:
            refuse("priority", f"is {request.priority}, but this server takes none (--priorities); leave it out")
        bias = _bias_of(request, len(prompts), limits.vocabulary)
        _check_ids("stop_token_ids", request.stop_token_ids or [], limits.vocabulary)
        _check_ids("logprob_token_ids", request.logprob_token_ids or [], limits.vocabulary)
        codec = request.kvrail.codec if request.kvrail else ""
        if codec and codec not in limits.codecs:
            why = "does not suit the workers' KV pages"
            if codec in limits.withheld_codecs:
                why = "is lossy, and this server's operator has not allowed such codecs (--allow-lossy)"
            refuse("kvrail.codec", f"{codec!r} {why}; choose one of {', '.join(sorted(limits.codecs))}")
        stops = self._encoder.special_stops(request.stop or ())
        stops = {token_id: text for token_id, text in stops.items() if token_id < limits.vocabulary}
        sampling = []
        for prompt in prompts:
            budget = _budget(field, len(prompt), max_tokens, limits.context)
            if max_tokens is None:
                budget = self.defaults.output_tokens(budget, request.min_tokens or 0)
            _check_ids(field, prompt, limits.vocabulary)
            if (request.min_tokens or 0) > budget:
                refuse("min_tokens", f"is {request.min_tokens}, but at most {budget} tokens can be generated")
            sampling.append(_sampling(request, self.defaults, budget, logprobs, shape, bias, stops))
        ours = request.kvrail or KvrailOptions()
        plan = Plan(
            prompts,
            sampling,
            [sampling_to_proto(each) for each in sampling],
            prefixes,
            codec,
            ours.provisional,
            stops,
            ours.trace,
            priority=request.priority or 0,
            reader=shape.reader,
            silent=max_tokens == 0,
            cache_salt=request.cache_salt or "",
            kv_cache=ours.kv_cache,
        )
        _check_scores(request, plan)
        return plan


def _bias_of(request: Request, prompts: int, vocabulary: int) -> dict[int, float]:
    """By token id. Every key that is no token of the model's is named, as far as they fit into a message."""
    biases = {int(key): value for key, value in (request.logit_bias or {}).items()}
    if outside := [f"{key}" for key in biases if key >= vocabulary]:
        refuse("logit_bias", f"{named(outside)} not in the model's vocabulary of {vocabulary}")
    if prompts * len(biases) > MAX_SENT_BIASES:  # workers get them with each prompt
        refuse(
            "logit_bias",
            f"{len(biases)} biases for each of {prompts} prompts are more than the {MAX_SENT_BIASES} that one "
            "request may have; send the prompts in several requests",
        )
    return biases


def _check_ids(param: str, token_ids: Sequence[int], vocabulary: int) -> None:
    largest = max(token_ids, default=0)
    if largest >= vocabulary:
        refuse(param, f"token id {largest} is not in the model's vocabulary of {vocabulary}")


def _kept(request: Request, context: int, max_tokens: int | None) -> int | None:
    """How many of a prompt's last tokens are kept; None: all. -1 asks for as many as the context has room for."""
    keep = request.truncate_prompt_tokens
    if keep is None or 0 <= keep <= context:
        return keep
    if keep > context:
        refuse("truncate_prompt_tokens", f"is {keep}, but this model's context holds {context} tokens; ask for fewer")
    return max(1, context - (max_tokens or 1))


def _budget(field: str, prompt: int, max_tokens: int | None, context: int) -> int:
    """Tokens that may be generated after a prompt of `prompt` tokens."""
    if prompt == 0:
        refuse(field, "has no tokens; send some text")
    wanted = max_tokens or 1  # where none is to be shown, one is drawn all the same
    if prompt + wanted > context:
        raise ContextLengthError(
            f"this model's context holds {context} tokens; {field} has {prompt} and {wanted} are to be generated; "
            "shorten one of them",
            param=field,
        )
    return context - prompt if max_tokens is None else wanted


def _check_scores(request: Request, plan: Plan) -> None:
    """Refuse more log probabilities of prompts than one answer may have."""
    if plan.scores > MAX_PROMPT_LOGPROBS:
        top = plan.sampling[0].prompt_logprobs
        refuse(
            "logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
            f"{plan.prompt_tokens} tokens of prompts, each with {top} likely ones and for {plan.n} choices, have "
            f"{plan.scores} log probabilities, more than the {MAX_PROMPT_LOGPROBS} that one answer may have; ask for "
            "fewer likely tokens, or send the prompts in several requests",
        )


def _scored_tokens(request: Request) -> int | None:
    """How many likely tokens each of a prompt's tokens has: as many as `prompt_logprobs` or `echo` asks for."""
    asked = [] if request.prompt_logprobs is None else [request.prompt_logprobs]
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        asked.append(request.logprobs)
    return max(asked, default=None)


def _sampling(
    request: Request,
    defaults: Defaults,
    max_tokens: int,
    logprobs: int | None,
    shape: Shape,
    bias: dict[int, float],
    special_stops: Mapping[int, str],
) -> SamplingParams:
    """Sampling parameters; without a seed of the client's each prompt draws its own."""
    seed = secrets.randbits(64) if request.seed is None else request.seed & UINT64_MAX

    def given(value: T | None, default: T) -> T:
        return default if value is None else value

    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=given(request.temperature, defaults.temperature),
        top_p=given(request.top_p, defaults.top_p),
        top_k=max(0, given(request.top_k, defaults.top_k)),
        min_p=given(request.min_p, defaults.min_p),
        repetition_penalty=given(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=given(request.presence_penalty, defaults.presence_penalty),
        frequency_penalty=given(request.frequency_penalty, defaults.frequency_penalty),
        logit_bias=bias,
        seed=seed,
        logprobs=logprobs,
        stop=tuple(request.stop or ()),
        stop_token_ids=tuple(dict.fromkeys((*(request.stop_token_ids or ()), *special_stops))),
        ignore_eos=bool(request.ignore_eos),
        include_stop_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False and not shape.special,
        n=request.n or 1,
        grammar=shape.grammar,
        prompt_logprobs=_scored_tokens(request),
        logprob_token_ids=tuple(dict.fromkeys(request.logprob_token_ids or ())),
    )
