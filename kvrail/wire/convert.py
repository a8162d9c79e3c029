"""The project's types to protobuf messages and back. What comes from the network is checked here."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from kvrail.errors import IncompatibleError, InvalidRequestError
from kvrail.telemetry.moments import Moment
from kvrail.telemetry.spans import MAX_SIZES, MAX_SPANS, Span
from kvrail.values.layout import DTYPE_BYTES, KVLayout
from kvrail.values.sampling import (
    MAX_GRAMMAR_BYTES,
    FinishReason,
    LogitBias,
    PromptLogprobs,
    SamplingParams,
    TokenLogprobs,
)
from kvrail.wire.checks import (
    MAX_NAME_CHARS,
    MAX_NAMES,
    MAX_SECONDS,
    check_logprobs,
    check_names,
    check_number,
    check_tokens,
)
from kvrail.wire.v1 import common_pb2, decode_pb2, prefill_pb2

UINT32_MAX = (1 << 32) - 1
UINT64_MAX = (1 << 64) - 1
MAX_N = 128  # the OpenAI API's bounds
MAX_LOGPROBS = 20
MAX_PENALTY = 2.0
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
"""Bounds of the repetition penalty: far beyond what is of use, and far from where float32 logits would overflow."""
MAX_TEMPERATURE = 100.0
"""Bound on what a worker is asked; above it a draw is as good as uniform."""
MAX_LOGIT_BIAS = 100.0
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 256
MAX_LOGPROB_TOKENS = 128
MAX_BIASES = 1 << 18

_FINISH_REASONS = {
    FinishReason.STOP: decode_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: decode_pb2.FINISH_REASON_LENGTH,
}
MAX_REQUEST_ID_CHARS = 64
_SIZES = ("num_layers", "num_kv_heads", "key_dim", "value_dim", "page_size")  # of a KVLayout


def _named(source: object, kind: Any) -> dict[str, Any]:
    """By name, what `source` has of the fields of `kind`: a type of ours and its message name them alike."""
    return {field.name: getattr(source, field.name) for field in fields(kind)}


def check_request_id(request_id: str) -> None:
    """Raise InvalidRequestError where an id is empty, long, or holds what would break a log line."""
    if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS or not request_id.isprintable():
        raise InvalidRequestError(
            f"request_id {request_id[:MAX_REQUEST_ID_CHARS]!r} has {len(request_id)} characters; give 1 to"
            f" {MAX_REQUEST_ID_CHARS} printable ones",
            param="request_id",
        )


def check_workers(addresses: Sequence[str]) -> None:
    """Raise InvalidRequestError where a request names too many prefill workers, or one by no name."""
    _check("the number of prefill_workers", len(addresses), 0, MAX_NAMES)
    for address in addresses:
        if not 0 < len(address) <= MAX_NAME_CHARS or not address.isprintable():
            raise InvalidRequestError(
                f"prefill worker {address[:MAX_NAME_CHARS]!r} has {len(address)} characters; give host:port, of"
                f" {MAX_NAME_CHARS} printable ones at most",
                param="prefill_workers",
            )


def _check(param: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Refuse NaN and what lies outside [low, high], or (low, high] where `above`."""
    if not low <= value <= high or (above and value == low):
        bound = f"above {low}" if above else f"at least {low}"
        raise InvalidRequestError(f"{param} is {value}; it must be {bound} and at most {high}", param=param)


def check_sampling(params: SamplingParams) -> None:
    """Raise InvalidRequestError, naming the parameter, where a value is outside its range."""
    _check("max_tokens", params.max_tokens, 1, UINT32_MAX)
    _check("min_tokens", params.min_tokens, 0, params.max_tokens)
    _check("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    _check("top_p", params.top_p, 0.0, 1.0, above=True)
    _check("top_k", params.top_k, 0, UINT32_MAX)
    _check("min_p", params.min_p, 0.0, 1.0)
    _check("repetition_penalty", params.repetition_penalty, MIN_REPETITION, MAX_REPETITION)
    _check("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check("seed", params.seed, 0, UINT64_MAX)
    _check("n", params.n, 1, MAX_N)
    if params.logprobs is not None:
        _check("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    if params.prompt_logprobs is not None:
        _check("prompt_logprobs", params.prompt_logprobs, 0, MAX_LOGPROBS)
    _check("the number of logprob_token_ids", len(params.logprob_token_ids), 0, MAX_LOGPROB_TOKENS)
    _check("the number of logit_bias", len(params.logit_bias), 0, MAX_BIASES)
    _check("the number of stop_token_ids", len(params.stop_token_ids), 0, MAX_STOP_TOKENS)
    _check("the number of stop", len(params.stop), 0, MAX_STOPS)
    _check("the length of a stop", max(map(len, params.stop), default=0), 0, MAX_STOP_CHARS)
    for token_id, bias in params.logit_bias.items():
        if not (0 <= token_id <= UINT32_MAX and -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS):  # for many in little time
            _check("logit_bias", token_id, 0, UINT32_MAX)
            _check("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    for name in ("stop_token_ids", "logprob_token_ids"):
        for token_id in getattr(params, name):
            _check(name, token_id, 0, UINT32_MAX)
    if len(params.grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"grammar has more than {MAX_GRAMMAR_BYTES} bytes; send a smaller one", param="grammar"
        )
    if "" in params.stop:
        raise InvalidRequestError("stop contains an empty string, which matches everywhere; leave it out", param="stop")


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Write a request's parameters; raises InvalidRequestError where a value is outside its range."""
    check_sampling(params)
    return common_pb2.SamplingParams(**_named(params, SamplingParams))


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Read a request's parameters; raises InvalidRequestError, naming the one that is outside its range."""
    given = _named(message, SamplingParams) | {
        "logit_bias": LogitBias(message.logit_bias),
        "logprobs": message.logprobs if message.HasField("logprobs") else None,
        "prompt_logprobs": message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        "stop": tuple(message.stop),
        "stop_token_ids": tuple(message.stop_token_ids),
        "logprob_token_ids": tuple(message.logprob_token_ids),
    }
    params = SamplingParams(**given)
    check_sampling(params)
    return params


def logprobs_to_proto(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    """One token's log probabilities, rounded to float32."""
    top = [common_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprobs.top]
    return common_pb2.TokenLogprobs(logprob=logprobs.logprob, top=top)


def logprobs_from_proto(message: common_pb2.TokenLogprobs, top: int, vocab_size: int) -> TokenLogprobs:
    """One token's log probabilities, where `top` likely ones were asked for.

    Raises IncompatibleError where others came, a token is outside the vocabulary or a value no log probability.
    """
    check_number("the number of likely tokens", len(message.top), top)
    check_tokens("a likely token", (entry.token_id for entry in message.top), vocab_size)
    check_logprobs((message.logprob, *(entry.logprob for entry in message.top)))
    return TokenLogprobs(message.logprob, tuple((entry.token_id, entry.logprob) for entry in message.top))


def output_logprobs_from_proto(
    found: Iterable[common_pb2.TokenLogprobs], asked: common_pb2.SamplingParams, vocab_size: int
) -> list[TokenLogprobs]:
    """The log probabilities of some output tokens; raises IncompatibleError where others came than were asked for."""
    top = len(asked.logprob_token_ids) or asked.logprobs
    return [logprobs_from_proto(each, top, vocab_size) for each in found]


def first_tokens_from_proto(
    message: prefill_pb2.FirstToken, params: SamplingParams, vocab_size: int
) -> list[tuple[int, TokenLogprobs | None]]:
    """The first token of each of a request's sequences, with its log probabilities where these are asked for.

    Raises IncompatibleError where the numbers of them are wrong, or a value is.
    """
    wanted = 0 if params.logprobs is None else params.n
    if len(message.token_ids) != params.n or len(message.logprobs) != wanted:
        raise IncompatibleError(
            f"{len(message.token_ids)} first tokens with {len(message.logprobs)} log probabilities came; asked were"
            f" {params.n} with {wanted}"
        )
    check_tokens("a first token", message.token_ids, vocab_size)
    if params.logprobs is None:
        return [(token_id, None) for token_id in message.token_ids]
    found = [logprobs_from_proto(each, params.listed_logprobs, vocab_size) for each in message.logprobs]
    return list(zip(message.token_ids, found, strict=True))


def prompt_logprobs_to_proto(found: PromptLogprobs) -> decode_pb2.PromptLogprobs:
    """Log probabilities of some of a prompt's tokens, rounded to float32."""
    return decode_pb2.PromptLogprobs(**_named(found, PromptLogprobs))


def prompt_logprobs_from_proto(message: decode_pb2.PromptLogprobs, vocab_size: int) -> PromptLogprobs:
    """Read them, into arrays.

    Raises IncompatibleError where the columns' lengths do not fit each other, or a value is wrong.
    """
    count = len(message.logprobs)
    lengths = (len(message.ranks), len(message.top_ids), len(message.top_logprobs))
    if not count or lengths != (count, count * message.top, count * message.top):
        raise IncompatibleError(
            f"the peer sent {count} log probabilities of a prompt with {lengths[0]} ranks, {lengths[1]} ids and"
            f" {lengths[2]} log probabilities of the {message.top} most likely tokens"
        )
    check_tokens("a likely token", message.top_ids, vocab_size)
    check_number("the lowest rank", min(message.ranks), vocab_size, 1)
    check_number("the highest rank", max(message.ranks), vocab_size, 1)
    check_logprobs(message.logprobs)
    check_logprobs(message.top_logprobs)
    return PromptLogprobs(
        message.first,
        array("f", message.logprobs),
        array("I", message.ranks),
        message.top,
        array("I", message.top_ids),
        array("f", message.top_logprobs),
    )


def layout_to_proto(layout: KVLayout) -> common_pb2.KVLayout:
    """How pages lie, for the handshake."""
    return common_pb2.KVLayout(**{name: getattr(layout, name) for name in (*_SIZES, "dtype")})


def layout_from_proto(message: common_pb2.KVLayout) -> KVLayout:
    """Read a peer's layout; raises IncompatibleError where a size is 0 or the element type unknown."""
    for name in _SIZES:
        if getattr(message, name) == 0:
            raise IncompatibleError(f"the peer's KV layout has {name} 0; it must be at least 1")
    if message.dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise IncompatibleError(f"the peer's KV pages have dtype {message.dtype!r}; this build knows {known}")
    return KVLayout(**{name: getattr(message, name) for name in (*_SIZES, "dtype")})


def marks_to_proto(marks: Iterable[tuple[Moment, float]]) -> list[common_pb2.Mark]:
    """Moments of a request's life, in seconds since the hop began."""
    return [common_pb2.Mark(moment=moment.value, seconds=seconds) for moment, seconds in marks]


def marks_from_proto(messages: Sequence[common_pb2.Mark]) -> list[tuple[Moment, float]]:
    """Read a peer's marks; raises IncompatibleError for too many, an unknown moment or a time that no request has."""
    check_number("the number of marks", len(messages), len(Moment))
    marks = []
    for message in messages:
        try:
            moment = Moment(message.moment)
        except ValueError:
            known, said = ", ".join(Moment), message.moment[:MAX_NAME_CHARS]
            raise IncompatibleError(f"the peer marks the unknown moment {said!r}; known are {known}") from None
        check_number(f"the time of {moment}", message.seconds, MAX_SECONDS)
        marks.append((moment, message.seconds))
    return marks


def finish_reason_to_proto(reason: FinishReason | None) -> decode_pb2.FinishReason:
    """None, a sequence that goes on, is UNSPECIFIED."""
    return decode_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS[reason]


def finish_reason_from_proto(value: decode_pb2.FinishReason) -> FinishReason | None:
    """None where the sequence goes on; raises IncompatibleError for an unknown value."""
    if value == decode_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    for reason, known in _FINISH_REASONS.items():
        if value == known:
            return reason
    raise IncompatibleError(f"the peer finished a sequence for the unknown reason {value}")


def spans_to_proto(spans: Iterable[Span]) -> list[common_pb2.Span]:
    """What a process did for a request."""
    return [common_pb2.Span(**_named(span, Span)) for span in spans]


def spans_from_proto(messages: Sequence[common_pb2.Span]) -> list[Span]:
    """Read a peer's spans; raises IncompatibleError for too many, a bad name, or a time that no request has."""
    check_number("the number of spans", len(messages), MAX_SPANS)
    for message in messages:
        check_names("a span's names", (message.process, message.track, message.name))
        check_names("a span's sizes", message.sizes, MAX_SIZES)
        check_number("a span's begin", message.begin, MAX_SECONDS)
        check_number("a span's time", message.seconds, MAX_SECONDS)
    return [Span(m.process, m.track, m.name, m.begin, m.seconds, dict(m.sizes)) for m in messages]
