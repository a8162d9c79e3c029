"""vLLM's names for what kvrail measures, with the meaning that vLLM (0.26) gives them.

Each name comes from one kind of process, so that sums over a cluster count nothing twice: what belongs to requests from
the router, what belongs to an engine from decode workers. Prefill workers show nothing: to vLLM's dashboards a prompt
that is computed elsewhere is a part of its request. What waits in the router waits nowhere else, so that the two
numbers of waiting requests add up.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvrail.telemetry.series import Family

ENGINE = {"engine": "0"}
"""The label of vLLM's data-parallel engines; a worker here has one engine."""
FINISHED = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "unavailable": "error",
    "deadline": "error",
    "error": "error",
}
"""vLLM's words for how requests end. It does not count those that it refuses before they reach its engine."""
REJECTED = {"overloaded": "max_num_queued_reqs"}
"""vLLM's word for why a request is not admitted."""
SOURCES = {"computed": "local_compute", "cached": "local_cache_hit", "transferred": "external_kv_transfer"}
UNCOUNTED_HANDLERS = frozenset(
    {"/health", "/live", "/ready", "/version", "/metrics", "/metrics/vllm", "/metrics/targets"}
)
"""Probes and scrapes, which vLLM's HTTP metrics leave out."""


Row = tuple[dict[str, str], Any]
"""Labels of a series, and the series of ours that it shows, or its value."""


def _keep(family: Family[Any]) -> Iterator[Row]:
    """All series as they are."""
    return ((labels | ENGINE, series) for labels, series in family.series())


@dataclass(frozen=True, slots=True)
class Renamed:
    """One metric of vLLM's, and how its series follow from families of ours; as they are, where nothing else is said.

    sources: our names, a counter's without its `_total`. name: vLLM's, also without it. kind: its type, where it is not
    the first source's.
    """

    name: str
    sources: tuple[str, ...]
    documentation: str
    derive: Callable[..., Iterable[Row]] = _keep
    kind: str = ""


def _select(label: str, value: str) -> Callable[[Family[Any]], Iterator[Row]]:
    """The series whose `label` is `value`, without that label."""

    def derive(family: Family[Any]) -> Iterator[Row]:
        for labels, series in family.series():
            if labels.pop(label) == value:
                yield labels | ENGINE, series

    return derive


def _grouped(
    label: str, words: Mapping[str, str], theirs: str, *, engine: dict[str, str] = ENGINE
) -> Callable[[Family[Any]], Iterator[Row]]:
    """Series added up where vLLM has one word for several values of `label`; those that it has no word for are left."""

    def derive(family: Family[Any]) -> Iterator[Row]:
        found: defaultdict[tuple[tuple[str, str], ...], float] = defaultdict(float)
        for labels, series in family.series():
            word = words.get(labels.pop(label))
            if word is not None:
                found[tuple((labels | engine | {theirs: word}).items())] += series.value
        return ((dict(labels), value) for labels, value in found.items())

    return derive


def _statuses(family: Family[Any]) -> Iterator[Row]:
    """HTTP requests by class of status, without the model's name; as prometheus-fastapi-instrumentator has them."""
    classes = {str(status): f"{status // 100}xx" for status in range(100, 600)}
    for labels, series in _grouped("status", classes, "status", engine={})(family):
        if labels["handler"] not in UNCOUNTED_HANDLERS:
            yield {key: value for key, value in labels.items() if key != "model_name"}, series


def _durations(family: Family[Any]) -> Iterator[Row]:
    for labels, series in family.series():
        if labels["handler"] not in UNCOUNTED_HANDLERS:
            yield {"handler": labels["handler"]}, series


def _usage(pages: Family[Any]) -> Iterator[Row]:
    """Share of the pages that no new request could take; cached pages can be evicted."""
    found = {labels["state"]: (labels, series) for labels, series in pages.series()}
    if "used" in found:
        labels, used = found["used"]
        whole = sum(series.value for _, series in found.values())
        yield {"model_name": labels["model_name"]} | ENGINE, used.value / whole if whole else 0.0


def _running(sequences: Family[Any], receiving: Family[Any]) -> Iterator[Row]:
    """Sequences that the engine's steps compute: ours that run, less those that only wait for their KV."""
    receive = sum(series.value for _, series in receiving.series())
    for labels, series in _select("state", "running")(sequences):
        yield labels, series.value - receive


def _waiting(sequences: Family[Any], receiving: Family[Any]) -> Iterator[Row]:
    """Sequences that wait, for pages or for their KV."""
    receive = sum(series.value for _, series in receiving.series())
    for labels, series in _select("state", "waiting")(sequences):
        yield labels, series.value + receive


def _waiting_by_reason(sequences: Family[Any], receiving: Family[Any]) -> Iterator[Row]:
    for labels, series in _select("state", "waiting")(sequences):
        yield labels | {"reason": "capacity"}, series
    for labels, series in receiving.series():
        yield labels | ENGINE | {"reason": "deferred"}, series


def _by_capacity(queue: Family[Any]) -> Iterator[Row]:
    return ((labels | {"reason": "capacity"}, series) for labels, series in _keep(queue))


def _cache_config(info: Family[Any]) -> Iterator[Row]:
    """The labels that are read of vLLM's, among the many that it has."""
    names = {"page_size": "block_size", "pages": "num_gpu_blocks", "kv_dtype": "cache_dtype"}
    names["prefix_cache"] = "enable_prefix_caching"
    for labels, series in info.series():
        yield {names.get(key, key): value for key, value in labels.items() if key != "model_name"} | ENGINE, series


def _counts(family: Family[Any]) -> Iterator[Row]:
    return ((labels, series.count) for labels, series in _keep(family))


_PHASES = "kvrail_request_phase_seconds"
_SEQUENCES = ("kvrail_engine_sequences", "kvrail_engine_receiving_sequences")

VLLM_METRICS: tuple[Renamed, ...] = (
    Renamed(
        "vllm:request_success",
        ("kvrail_requests",),
        "Requests that ended.",
        _grouped("outcome", FINISHED, "finished_reason"),
    ),
    Renamed(
        "vllm:admission_rejections",
        ("kvrail_requests",),
        "Requests that were refused because a queue was full.",
        _grouped("outcome", REJECTED, "reason", engine={}),
    ),
    Renamed("vllm:num_requests_waiting", ("kvrail_queue_prompts",), "Requests that wait in the router."),
    Renamed(
        "vllm:num_requests_waiting_by_reason",
        ("kvrail_queue_prompts",),
        "Requests that wait in the router, by why.",
        _by_capacity,
    ),
    Renamed("vllm:e2e_request_latency_seconds", ("kvrail_request_seconds",), "Time of a request."),
    Renamed("vllm:time_to_first_token_seconds", ("kvrail_time_to_first_token_seconds",), "Time to first token."),
    Renamed("vllm:inter_token_latency_seconds", ("kvrail_inter_token_seconds",), "Time between tokens."),
    Renamed("vllm:time_per_output_token_seconds", ("kvrail_inter_token_seconds",), "The same, its older name."),
    Renamed(
        "vllm:request_time_per_output_token_seconds",
        ("kvrail_request_time_per_token_seconds",),
        "Mean time between a request's tokens.",
    ),
    Renamed("vllm:request_prompt_tokens", ("kvrail_request_prompt_tokens",), "Prompt tokens of a request."),
    Renamed("vllm:request_generation_tokens", ("kvrail_request_generation_tokens",), "Generated tokens of a request."),
    Renamed(
        "vllm:request_max_num_generation_tokens",
        ("kvrail_request_longest_generation_tokens",),
        "Generated tokens of a request's longest choice.",
    ),
    Renamed("vllm:request_params_n", ("kvrail_request_sequences",), "The parameter n."),
    Renamed("vllm:request_params_max_tokens", ("kvrail_request_max_tokens",), "The parameter max_tokens."),
    Renamed("vllm:prompt_tokens", ("kvrail_prompt_tokens",), "Prompt tokens."),
    Renamed(
        "vllm:prompt_tokens_by_source",
        ("kvrail_prompt_tokens_by_source",),
        "Prompt tokens by where their KV came from.",
        _grouped("source", SOURCES, "source"),
    ),
    Renamed("vllm:generation_tokens", ("kvrail_generation_tokens",), "Generated tokens."),
    Renamed("vllm:request_queue_time_seconds", (_PHASES,), "Time in queue.", _select("phase", "queue")),
    Renamed("vllm:request_prefill_time_seconds", (_PHASES,), "Time in prefill.", _select("phase", "prefill")),
    Renamed("vllm:request_decode_time_seconds", (_PHASES,), "Time in decode.", _select("phase", "decode")),
    Renamed(
        "vllm:request_inference_time_seconds", ("kvrail_request_inference_seconds",), "Time in prefill and decode."
    ),
    Renamed("http_requests", ("kvrail_http_requests",), "HTTP requests by class of status.", _statuses),
    Renamed("http_request_duration_seconds", ("kvrail_http_request_seconds",), "Time of an HTTP request.", _durations),
    Renamed("vllm:num_requests_running", _SEQUENCES, "Sequences that steps compute.", _running),
    Renamed("vllm:num_requests_waiting", _SEQUENCES, "Sequences that wait for pages or KV.", _waiting),
    Renamed("vllm:num_requests_waiting_by_reason", _SEQUENCES, "Sequences that wait, by why.", _waiting_by_reason),
    Renamed("vllm:kv_cache_usage_perc", ("kvrail_engine_pages",), "Share of KV pages in use; 1 is all.", _usage),
    Renamed("vllm:num_preemptions", ("kvrail_engine_preemptions",), "Preemptions."),
    Renamed("vllm:request_num_preemptions", ("kvrail_engine_sequence_preemptions",), "Preemptions of a sequence."),
    Renamed(
        "vllm:prefix_cache_queries", ("kvrail_engine_prefix_cache_queried_tokens",), "Tokens looked up in the cache."
    ),
    Renamed("vllm:prefix_cache_hits", ("kvrail_engine_prefix_cache_hit_tokens",), "Tokens found in the cache."),
    Renamed("vllm:iteration_tokens_total", ("kvrail_engine_step_tokens",), "Tokens of one engine step."),
    Renamed(
        "vllm:spec_decode_num_drafts",
        ("kvrail_engine_accepted_drafts",),
        "Verifications of drafts.",
        _counts,
        kind="counter",
    ),
    Renamed("vllm:spec_decode_num_draft_tokens", ("kvrail_engine_drafts_proposed",), "Tokens drafted."),
    Renamed("vllm:spec_decode_num_accepted_tokens", ("kvrail_engine_drafts_accepted",), "Drafts accepted."),
    Renamed(
        "vllm:cache_config_info", ("kvrail_engine_cache_info",), "The KV cache; the value is always 1.", _cache_config
    ),
)
"""What a process shows of vLLM's names: the rows whose sources it has, the first of two with one name."""

CLUSTER_METRICS: tuple[Renamed, ...] = (
    Renamed(
        "vllm:num_requests_running",
        ("kvrail_cluster_requests_running",),
        "Sum over decode workers: sequences that run.",
    ),
    Renamed(
        "vllm:num_requests_waiting",
        ("kvrail_cluster_requests_waiting",),
        "Sum over router and decode workers: requests that wait.",
    ),
    Renamed(
        "vllm:num_requests_waiting_by_reason",
        ("kvrail_cluster_requests_waiting",),
        "Sum over router and decode workers: requests that wait, by why.",
        _by_capacity,
    ),
    Renamed(
        "vllm:kv_cache_usage_perc",
        ("kvrail_cluster_kv_usage_ratio",),
        "Over all decode workers: share of their KV pages in use; 1 is all.",
    ),
    Renamed(
        "vllm:prefix_cache_queries",
        ("kvrail_cluster_prefix_cache_queried_tokens",),
        "Sum over decode workers: tokens looked up in their caches.",
    ),
    Renamed(
        "vllm:prefix_cache_hits",
        ("kvrail_cluster_prefix_cache_hit_tokens",),
        "Sum over decode workers: tokens found in their caches.",
    ),
    Renamed(
        "vllm:cache_config_info",
        ("kvrail_cluster_cache_info",),
        "Sum over decode workers: their KV pages; the value is always 1.",
        _cache_config,
    ),
)
"""What a router shows beside these, for who scrapes it alone: what its decode workers show, summed up."""
