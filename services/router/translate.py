"""From an API request to what workers understand: token ids and sampling parameters."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrail.errors import ContextLengthError, InvalidRequestError
from kvrail.sampling import SamplingParams
from kvrail.text import Tokenizer
from kvrail.wire.convert import UINT64_MAX
from services.router.schema import ChatRequest, CompletionRequest, KvrailOptions, Message, Request, TokenizeRequest

log = logging.getLogger("kvrail.router.translate")

REFUSED_EXTRAS = (
    "allowed_token_ids",
    "bad_words",
    "documents",
    "guided_choice",
    "guided_decoding_backend",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "logits_processors",
    "prompt_embeds",
    "prompt_logprobs",
    "structured_outputs",
    "truncate_prompt_tokens",
    "use_beam_search",
    "web_search_options",
)
"""Fields of OpenAI's or vLLM's that change the answer and are not supported."""

TEMPLATE_ARGUMENTS = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message")
"""Names in chat_template_kwargs that would shadow what the server passes itself."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to generate: one stream for each prompt.

    prompts: token ids. sampling: one for each prompt. prefixes: text that goes before each prompt's output (echo).
    provisional: whether drafts are shown. traced: whether the usage tells what each process did when.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sequence[SamplingParams]
    prefixes: Sequence[str]
    codec: str
    provisional: bool
    traced: bool = False

    @property
    def n(self) -> int:
        """Sequences of each prompt."""
        return self.sampling[0].n

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt) for prompt in self.prompts)


def _refuse(param: str, message: str) -> None:
    raise InvalidRequestError(f"{param}: {message}", param=param)


def refuse_unsupported(request: Request) -> None:
    """Raise InvalidRequestError for what would change the answer but is not supported; ignore other unknown fields."""
    if request.stream_options is not None and not request.stream:
        _refuse("stream_options", "only for streams; set stream to true or leave it out")
    if request.kvrail is not None and request.kvrail.provisional and not request.stream:
        _refuse("kvrail.provisional", "only for streams; set stream to true or leave it out")
    if request.response_format is not None and request.response_format.get("type") != "text":
        _refuse("response_format", 'this server only writes {"type": "text"}; leave it out')
    extras = request.model_extra or {}
    for name in REFUSED_EXTRAS:
        if extras.get(name):
            _refuse(name, "not supported by this server; leave it out")
    if extras:
        log.debug("ignoring unknown fields: %s", ", ".join(sorted(extras)))
    if isinstance(request, ChatRequest):
        _refuse_in_chat(request)
    elif isinstance(request, CompletionRequest):
        _refuse_in_completion(request)


def _refuse_in_chat(request: ChatRequest) -> None:
    for name in ("tools", "functions", "audio"):
        if getattr(request, name):
            _refuse(name, "not supported by this server; leave it out")
    for name in ("tool_choice", "function_call"):
        if getattr(request, name) not in (None, "none", "auto"):
            _refuse(name, "this server calls no tools; leave it out")
    if request.modalities not in (None, [], ["text"]):
        _refuse("modalities", 'this server only writes ["text"]; leave it out')
    if request.top_logprobs is not None and not request.logprobs:
        _refuse("top_logprobs", "only with logprobs; set logprobs to true")


def _refuse_in_completion(request: CompletionRequest) -> None:
    if request.suffix:
        _refuse("suffix", "not supported by this server; leave it out")
    if request.best_of is not None and request.best_of != (request.n or 1):
        _refuse("best_of", f"is {request.best_of}, but n is {request.n or 1}; only best_of = n is supported")
    if request.echo and request.logprobs is not None:
        _refuse("echo", "cannot be combined with logprobs, because prompts have none here; leave one of them out")


def plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages for the chat template; raises InvalidRequestError for one without text."""
    for i, message in enumerate(messages):
        if message.tool_calls:
            _refuse(f"messages.{i}.tool_calls", "not supported by this server; leave it out")
        if message.content is None:
            _refuse(f"messages.{i}.content", "field required; send the message's text")
    return [message.plain() for message in messages]


def template_arguments(kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Checked chat_template_kwargs."""
    for name in TEMPLATE_ARGUMENTS:
        if kwargs and name in kwargs:
            _refuse("chat_template_kwargs", f"{name} is not taken here; send it as a field of the request, if at all")
    return kwargs or {}


async def encode_chat(tokenizer: Tokenizer, request: ChatRequest | TokenizeRequest) -> list[int]:
    """Token ids of a chat; in a thread, because a long one would hold up every other request."""
    continued = bool(request.continue_final_message)
    opened = request.add_generation_prompt
    messages = plain_messages(request.messages or [])
    arguments = template_arguments(request.chat_template_kwargs)
    return await asyncio.to_thread(
        tokenizer.apply_chat_template,
        messages,
        add_generation_prompt=not continued if opened is None else opened,
        continue_final_message=continued,
        **arguments,
    )


async def encode_prompts(tokenizer: Tokenizer, request: CompletionRequest) -> tuple[list[list[int]], list[str]]:
    """Token ids of each prompt, and the text that `echo` puts before its output."""
    special = request.add_special_tokens is not False

    def encode(prompt: str | list[int]) -> tuple[list[int], str]:
        if isinstance(prompt, str):
            return tokenizer.encode(prompt, add_special_tokens=special), prompt if request.echo else ""
        return prompt, tokenizer.decode(prompt, skip_special_tokens=False) if request.echo else ""

    def encode_all() -> list[tuple[list[int], str]]:
        return [encode(prompt) for prompt in request.prompt]

    pairs = await asyncio.to_thread(encode_all)
    return [ids for ids, _ in pairs], [text for _, text in pairs]


@dataclass(frozen=True, slots=True)
class Limits:
    """What every worker that takes requests now can do; context: tokens, prompt and output together."""

    context: int
    vocabulary: int
    codecs: frozenset[str]
    withheld_codecs: frozenset[str]  # lossy ones that the operator has not allowed


class Planner:
    """Turns validated requests into plans; `limits` tells those of the workers, or raises WorkerUnavailableError."""

    def __init__(self, tokenizer: Tokenizer, limits: Callable[[], Limits]) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    async def chat(self, request: ChatRequest) -> Plan:
        """Plan a chat; raises InvalidRequestError naming the parameter."""
        refuse_unsupported(request)
        limits = self._limits()
        prompts = [await encode_chat(self._tokenizer, request)]
        top = (request.top_logprobs or 0) if request.logprobs else None
        wanted = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        return self._plan(request, "messages", prompts, [""], limits, wanted, top)

    async def completion(self, request: CompletionRequest) -> Plan:
        """Plan completions; raises InvalidRequestError naming the parameter."""
        refuse_unsupported(request)
        limits = self._limits()
        prompts, prefixes = await encode_prompts(self._tokenizer, request)
        return self._plan(request, "prompt", prompts, prefixes, limits, request.max_tokens, request.logprobs)

    def _plan(
        self,
        request: Request,
        field: str,
        prompts: Sequence[list[int]],
        prefixes: Sequence[str],
        limits: Limits,
        max_tokens: int | None,
        logprobs: int | None,
    ) -> Plan:
        _check_ids("logit_bias", [int(key) for key in request.logit_bias or {}], limits.vocabulary)
        _check_ids("stop_token_ids", request.stop_token_ids or [], limits.vocabulary)
        codec = request.kvrail.codec if request.kvrail else ""
        if codec and codec not in limits.codecs:
            why = "does not suit the workers' KV pages"
            if codec in limits.withheld_codecs:
                why = "is lossy, and this server's operator has not allowed such codecs (--allow-lossy)"
            _refuse("kvrail.codec", f"{codec!r} {why}; choose one of {', '.join(sorted(limits.codecs))}")
        sampling = []
        for prompt in prompts:
            _check_ids(field, prompt, limits.vocabulary)
            budget = _budget(field, len(prompt), max_tokens, limits.context)
            if (request.min_tokens or 0) > budget:
                _refuse("min_tokens", f"is {request.min_tokens}, but at most {budget} tokens can be generated")
            sampling.append(_sampling(request, budget, logprobs))
        ours = request.kvrail or KvrailOptions()
        return Plan(prompts, sampling, prefixes, codec, ours.provisional, ours.trace)


def _check_ids(param: str, token_ids: Sequence[int], vocabulary: int) -> None:
    largest = max(token_ids, default=0)
    if largest >= vocabulary:
        _refuse(param, f"token id {largest} is not in the model's vocabulary of {vocabulary}")


def _budget(field: str, prompt: int, max_tokens: int | None, context: int) -> int:
    """Tokens that may be generated after a prompt of `prompt` tokens."""
    if prompt == 0:
        _refuse(field, "has no tokens; send some text")
    wanted = 1 if max_tokens is None else max_tokens
    if prompt + wanted > context:
        raise ContextLengthError(
            f"this model's context holds {context} tokens; {field} has {prompt} and {wanted} are to be generated; "
            "shorten one of them",
            param=field,
        )
    return context - prompt if max_tokens is None else max_tokens


def _sampling(request: Request, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """Sampling parameters; without a seed of the client's each prompt draws its own."""
    seed = secrets.randbits(64) if request.seed is None else request.seed & UINT64_MAX

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=given(request.temperature, 1.0),
        top_p=given(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=given(request.min_p, 0.0),
        repetition_penalty=given(request.repetition_penalty, 1.0),
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        logit_bias={int(key): bias for key, bias in (request.logit_bias or {}).items()},
        seed=seed,
        logprobs=logprobs,
        stop=tuple(request.stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        include_stop_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        n=request.n or 1,
    )
