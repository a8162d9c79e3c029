"""What a peer says is checked like a client's input: one function for each message, before anything is made of it.

Each raises IncompatibleError, which names field, value and bound: it fails the request that the message belongs to, and
no other. What the message's types say already (a number of 32 bits, a text in UTF-8) is not checked again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from kvrail.errors import IncompatibleError
from kvrail.values.kv_cache import FORMS, is_exact
from kvrail.wire import PROTOCOL_VERSION
from kvrail.wire.v1 import common_pb2, decode_pb2

MAX_NAME_CHARS = 256
"""Of names that peers tell: models, codecs, workers, digests."""
MAX_NAMES = 1024
"""In one list of them."""
MAX_SECONDS = 7 * 86400.0
"""No request and no part of one takes longer."""
_STATUS_NAMES = ("codecs", "transports", "withheld_codecs", "codec_parameters")


def check_number(what: str, value: float, most: float, least: float = 0) -> None:
    """Refuse NaN and what lies outside [least, most]."""
    if not least <= value <= most:
        raise IncompatibleError(f"the peer says that {what} is {value}; it is at least {least} and at most {most}")


def check_name(what: str, name: str, most: int = MAX_NAME_CHARS) -> None:
    """Refuse a text that is long, or would break a log line."""
    if len(name) > most or not name.isprintable():
        raise IncompatibleError(
            f"the peer says that {what} is {name[:most]!r}, of {len(name)} characters; a name has at most {most}"
            " printable ones"
        )


def check_names(what: str, names: Sequence[str] | Mapping[str, object], most: int = MAX_NAMES) -> None:
    """As above for many, and not too many."""
    check_number(f"the number of {what}", len(names), most)
    for name in names:
        check_name(f"one of {what}", name)


def check_tokens(what: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuse tokens that the vocabulary does not have."""
    if (highest := max(token_ids, default=-1)) >= vocab_size:
        raise IncompatibleError(
            f"the peer says that {what} is token id {highest}; the vocabulary has {vocab_size}, so that ids end at"
            f" {vocab_size - 1}"
        )


def check_logprobs(values: Iterable[float]) -> None:
    """Refuse NaN and what is no log probability; minus infinity is one, and rounding may leave one a little above 0."""
    for value in values:
        check_number("a log probability", value, 1e-3, -math.inf)


def check_output(reply: decode_pb2.GenerateReply, sampling: common_pb2.SamplingParams, vocab_size: int) -> None:
    """Check a reply's tokens, the number of their log probabilities, and why its sequence ends."""
    check_tokens("an output token", reply.token_ids, vocab_size)
    wanted = len(reply.token_ids) if sampling.HasField("logprobs") else 0
    check_number("the number of log probabilities", len(reply.logprobs), wanted, wanted)
    said = reply.stop_reason
    if said and said not in sampling.stop and said not in map(str, sampling.stop_token_ids):
        raise IncompatibleError(
            f"the peer says that {said[:MAX_NAME_CHARS]!r} ended a sequence; it is none of the request's stop strings"
            " and stop tokens"
        )
    if said and not reply.finish_reason:
        raise IncompatibleError(f"the peer says that {said[:MAX_NAME_CHARS]!r} ended a sequence that goes on")


def check_drafts(reply: decode_pb2.GenerateReply, request: decode_pb2.GenerateRequest, vocab_size: int) -> None:
    """Check a reply's news of drafts, if any were asked for."""
    drafted, verified, max_tokens = reply.drafted, reply.verified, request.sampling.max_tokens
    if not request.provisional:
        raise IncompatibleError("the peer sent drafts that were not asked for")
    check_tokens("a draft", drafted.token_ids, vocab_size)
    check_number("the end of drafts", drafted.position + len(drafted.token_ids), max_tokens)
    check_number("the end of verified drafts", verified.position + verified.proposed, max_tokens)
    check_number("the number of accepted drafts", verified.accepted, verified.proposed)


def check_summary(summary: decode_pb2.GenerateSummary, prompt_tokens: int, most_tokens: int) -> None:
    """Check counts, names and times; marks and spans are checked where they are read (convert.py).

    most_tokens: that all sequences of the request may have.
    """
    check_number("prompt_tokens", summary.prompt_tokens, prompt_tokens)
    check_number("completion_tokens", summary.completion_tokens, most_tokens)
    check_number("cached_tokens", summary.cached_tokens, prompt_tokens + most_tokens)  # output that went on elsewhere
    check_number("drafts_accepted", summary.drafts_accepted, summary.drafts_proposed)
    check_number("exposed_s", summary.exposed_s, MAX_SECONDS)
    for name in ("prefill_worker", "codec", "codec_reason", "local_reason", "transport", "numerics"):
        check_name(name, getattr(summary, name))


def check_form(form: str, roles: Sequence[str]) -> None:
    """Refuse a form of pages that is not known, and a lossy one of a worker that never decodes."""
    if form not in FORMS:
        raise IncompatibleError(
            f"the peer says that it keeps KV pages as {form[:MAX_NAME_CHARS]!r}; known forms are {', '.join(FORMS)}"
        )
    if list(roles) == ["prefill"] and not is_exact(form):
        raise IncompatibleError(
            f"the peer says that it only prefills and keeps KV pages as {form!r}; such a worker keeps exact pages"
        )


def check_status(status: common_pb2.WorkerStatus, max_pages: int) -> None:
    """Check what a worker says of itself. max_pages: digests that it was asked for at most.

    A worker of another protocol may leave anything out; what it says all the same is checked.
    """
    model, events = status.model, status.kv_events
    for what, name in (("the model", model.name), ("its fingerprint", model.fingerprint), ("numerics", model.numerics)):
        check_name(what, name)
    check_name("the pages' type", status.layout.dtype)
    for name in _STATUS_NAMES:
        check_names(name, getattr(status, name))
    if status.protocol_version == PROTOCOL_VERSION:
        check_number("vocab_size", model.vocab_size, math.inf, 1)
        check_number("max_model_len", model.max_model_len, math.inf, 1)
    if status.protocol_version == PROTOCOL_VERSION or status.kv_cache:
        check_form(status.kv_cache, status.roles)
    check_number("the number of free and cached pages", status.pages_free + status.pages_cached, status.pages_total)
    check_number("metrics_port", status.metrics_port, 65535)
    for field, seconds in status.step_cost.ListFields():
        check_number(field.name, seconds, MAX_SECONDS)
    check_number("the number of digests of pages", len(events.stored) + len(events.removed), max_pages)
    report = status.report
    check_names("codecs in the report", [each.codec for each in report.received])
    check_names("links in the report", report.link_bytes_per_s)
    check_names("compiling codecs in the report", report.compiling)
    check_name("device in the report", report.device)
    check_number("memory in use", report.memory_used, max(report.memory_total, report.memory_used))
    for rate in report.link_bytes_per_s.values():
        check_number("the rate of a link", rate, 1e18)
