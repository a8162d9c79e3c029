"""Every metric's name, and the few objects through which processes record them.

`/metrics` carries our own names, which all begin with `kvrail_`. `/metrics/vllm` carries the same measurements under
the names that dashboards and autoscalers for LLM servers already use; those contain colons, which Prometheus keeps for
recording rules, hence the path of their own. Nothing is counted twice: the second view is computed from the first.

Router and workers both say how many requests run and wait: aggregate them by job, not over all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from kvrail.lifecycle import PARTS

REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
"""Buckets from a short local answer to the default deadline."""
FIRST_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
"""Buckets from a cached prompt on a fast GPU to a long prompt on a busy one."""
TOKEN_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
)
"""Buckets of one decode step; fine around the 10 to 50 ms that readers notice."""
PART_SECONDS = (
    0.0001,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    60.0,
    300.0,
)
"""Buckets of parts of a request, which may be far shorter than a token."""
TOKENS = tuple(float(1 << power) for power in range(0, 18))
"""Buckets of token counts: powers of two up to 131072."""

OUTCOMES = ("stop", "length", "cancelled", "invalid", "overloaded", "unavailable", "deadline", "error")
"""How a request can end at the router; the first two are successes."""
PHASES = ("queue", "prefill", "decode")
DIRECTIONS = ("sent", "received")
PAGE_STATES = ("free", "used", "cached")


class _Family:
    """Makes metrics of one registry that carry the model's name, and at most one label more."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model = model_name

    def counter(self, name: str, documentation: str) -> Counter:
        return Counter(name, documentation, ["model_name"], registry=self._registry).labels(self._model)

    def histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(name, documentation, ["model_name"], registry=self._registry, buckets=buckets)
        return family.labels(self._model)

    def counters(self, name: str, documentation: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        family = Counter(name, documentation, ["model_name", label], registry=self._registry)
        return {value: family.labels(self._model, value) for value in values}

    def gauges(self, name: str, documentation: str, label: str, values: Iterable[str]) -> dict[str, Gauge]:
        family = Gauge(name, documentation, ["model_name", label], registry=self._registry)
        return {value: family.labels(self._model, value) for value in values}

    def histograms(self, name: str, documentation: str, label: str, values: Iterable[str]) -> dict[str, Histogram]:
        labels = ["model_name", label]
        family = Histogram(name, documentation, labels, registry=self._registry, buckets=PART_SECONDS)
        return {value: family.labels(self._model, value) for value in values}


class RouterMetrics:
    """What the router measures of each request."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model = model_name
        make = _Family(registry, model_name)
        self.outcomes = make.counters("kvrail_requests", "Requests by how they ended.", "outcome", OUTCOMES)
        in_flight = make.gauges(
            "kvrail_requests_in_flight",
            "Admitted requests: waiting for their first token, or running.",
            "state",
            ("waiting", "running"),
        )
        self.waiting, self.running = in_flight["waiting"], in_flight["running"]
        self.request_seconds = make.histogram(
            "kvrail_request_seconds", "Time from request to last byte.", REQUEST_SECONDS
        )
        self.stage_seconds = make.histograms(
            "kvrail_request_stage_seconds",
            "Parts of a request's time; they add up to kvrail_request_seconds.",
            "stage",
            [name for name, _, _ in PARTS],
        )
        self.phase_seconds = make.histograms(
            "kvrail_request_phase_seconds",
            "Time until prefill began, from there to the first token, and from there to the last.",
            "phase",
            PHASES,
        )
        self.time_to_first_token = make.histogram(
            "kvrail_time_to_first_token_seconds", "Time from request to first token.", FIRST_TOKEN_SECONDS
        )
        self.inter_token = make.histogram(
            "kvrail_inter_token_seconds", "Time between two tokens of one sequence.", TOKEN_SECONDS
        )
        self.request_prompt_tokens = make.histogram(
            "kvrail_request_prompt_tokens", "Prompt tokens of a request.", TOKENS
        )
        self.request_generation_tokens = make.histogram(
            "kvrail_request_generation_tokens", "Generated tokens of a request, over all its sequences.", TOKENS
        )
        self.prompt_tokens = make.counter("kvrail_prompt_tokens", "Prompt tokens of answered requests.")
        self.cached_tokens = make.counter("kvrail_cached_prompt_tokens", "Prompt tokens whose KV was held already.")
        self.generation_tokens = make.counter("kvrail_generation_tokens", "Generated tokens that reached the router.")
        self.failovers = make.counter("kvrail_failovers", "Streams moved to another decode worker before a token.")
        self._workers = Gauge(
            "kvrail_worker_up",
            "Whether a worker answers, fits this model and is not draining.",
            ["model_name", "role", "worker"],
            registry=registry,
        )

    def worker_up(self, role: str, worker: str, up: bool) -> None:
        """Record whether requests can be sent to `worker`."""
        self._workers.labels(self._model, role, worker).set(float(up))


class EngineMetrics:
    """What an engine measures of its steps and pages."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        make = _Family(registry, model_name)
        sequences = make.gauges(
            "kvrail_engine_sequences", "Sequences that run or wait.", "state", ("running", "waiting")
        )
        self.running, self.waiting = sequences["running"], sequences["waiting"]
        self.pages = make.gauges("kvrail_engine_pages", "KV pages by state.", "state", PAGE_STATES)
        self.preemptions = make.counter("kvrail_engine_preemptions", "Sequences that gave up their pages to others.")
        self.prefix_queried_tokens = make.counter(
            "kvrail_engine_prefix_cache_queried_tokens", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hit_tokens = make.counter(
            "kvrail_engine_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache."
        )
        self.prompt_tokens = make.counter("kvrail_engine_prompt_tokens", "Prompt tokens computed.")
        self.generation_tokens = make.counter("kvrail_engine_generation_tokens", "Tokens sampled.")
        self.step_seconds = make.histogram("kvrail_engine_step_seconds", "Time of one engine step.", TOKEN_SECONDS)
        self.step_tokens = make.histogram("kvrail_engine_step_tokens", "Tokens computed in one engine step.", TOKENS)

    def set_pages(self, *, free: int, used: int, cached: int) -> None:
        """Record the pages in each state; the three add up to the pool."""
        for state, count in zip(PAGE_STATES, (free, used, cached), strict=True):
            self.pages[state].set(count)


class TransferMetrics:
    """What a worker measures of KV that leaves or reaches it.

    `codecs` are those whose series exist before their first transfer.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, codecs: Iterable[str] = ("raw",)) -> None:
        self._model = model_name
        make = _Family(registry, model_name)
        labels = ["model_name", "direction", "codec"]
        self._raw = Counter(
            "kvrail_kv_raw_bytes", "KV bytes transferred, as they were before encoding.", labels, registry=registry
        )
        self._payload = Counter(
            "kvrail_kv_payload_bytes", "KV bytes transferred, as they crossed the wire.", labels, registry=registry
        )
        self._frames = Counter("kvrail_kv_frames", "KV frames transferred.", labels, registry=registry)
        self.seconds = make.histograms(
            "kvrail_kv_transfer_seconds", "Time from a transfer's first frame to its last.", "direction", DIRECTIONS
        )
        transfers = Counter(
            "kvrail_kv_transfers",
            "Transfers by how they ended: committed, aborted by an end on purpose, or failed.",
            ["model_name", "direction", "outcome"],
            registry=registry,
        )
        self.transfers = {
            (way, outcome): transfers.labels(model_name, way, outcome)
            for way in DIRECTIONS
            for outcome in ("committed", "aborted", "failed")
        }
        self.fallbacks = make.counters(
            "kvrail_prefill_fallbacks",
            "Prefills that were repeated on an alternate worker, or locally.",
            "reason",
            ("alternate", "local"),
        )
        for codec in codecs:
            for way in DIRECTIONS:
                self._count(way, codec, 0, 0, 0)

    def sent(self, codec: str, *, raw_bytes: int, payload_bytes: int, frames: int = 1) -> None:
        """Count frames that left, with their KV's size before encoding."""
        self._count("sent", codec, raw_bytes, payload_bytes, frames)

    def received(self, codec: str, *, raw_bytes: int, payload_bytes: int, frames: int = 1) -> None:
        """Count frames that came, with their KV's size after decoding."""
        self._count("received", codec, raw_bytes, payload_bytes, frames)

    def _count(self, way: str, codec: str, raw_bytes: int, payload_bytes: int, frames: int) -> None:
        self._raw.labels(self._model, way, codec).inc(raw_bytes)
        self._payload.labels(self._model, way, codec).inc(payload_bytes)
        self._frames.labels(self._model, way, codec).inc(frames)


Derivation = Callable[[Sequence[Sample]], Iterable[Sample]]


@dataclass(frozen=True, slots=True)
class VllmMetric:
    """One metric of vLLM's, and how its samples follow from a metric of ours.

    source: our metric, a counter's without its `_total`. name: vLLM's, likewise.
    """

    name: str
    source: str
    documentation: str
    derive: Derivation


def _keep(samples: Sequence[Sample]) -> Iterable[Sample]:
    """Take the samples as they are."""
    return samples


def _select(label: str, value: str) -> Derivation:
    """Take the samples whose `label` is `value`, and drop that label."""

    def derive(samples: Sequence[Sample]) -> Iterator[Sample]:
        for sample in samples:
            if sample.labels[label] == value:
                yield sample._replace(labels={k: v for k, v in sample.labels.items() if k != label})

    return derive


def _finished_reason(samples: Sequence[Sample]) -> Iterator[Sample]:
    """Outcomes in vLLM's words; requests that were refused or failed are no successes."""
    reasons = {"stop": "stop", "length": "length", "cancelled": "abort"}
    for sample in samples:
        reason = reasons.get(sample.labels["outcome"])
        if reason is not None:
            yield sample._replace(labels={"model_name": sample.labels["model_name"], "finished_reason": reason})


def _usage(samples: Sequence[Sample]) -> Iterator[Sample]:
    """Share of the pages that no new request could take; cached pages can be evicted."""
    for model in sorted({sample.labels["model_name"] for sample in samples}):
        pages = {s.labels["state"]: s.value for s in samples if s.labels["model_name"] == model}
        total = sum(pages.values())
        yield samples[0]._replace(labels={"model_name": model}, value=pages["used"] / total if total else 0.0)


VLLM_METRICS: tuple[VllmMetric, ...] = (
    VllmMetric("vllm:request_success", "kvrail_requests", "Requests that ended well.", _finished_reason),
    VllmMetric(
        "vllm:num_requests_running", "kvrail_requests_in_flight", "Running requests.", _select("state", "running")
    ),
    VllmMetric(
        "vllm:num_requests_waiting", "kvrail_requests_in_flight", "Waiting requests.", _select("state", "waiting")
    ),
    VllmMetric("vllm:e2e_request_latency_seconds", "kvrail_request_seconds", "Time of a request.", _keep),
    VllmMetric("vllm:time_to_first_token_seconds", "kvrail_time_to_first_token_seconds", "Time to first token.", _keep),
    VllmMetric("vllm:inter_token_latency_seconds", "kvrail_inter_token_seconds", "Time between tokens.", _keep),
    VllmMetric("vllm:time_per_output_token_seconds", "kvrail_inter_token_seconds", "The same, its older name.", _keep),
    VllmMetric("vllm:request_prompt_tokens", "kvrail_request_prompt_tokens", "Prompt tokens of a request.", _keep),
    VllmMetric(
        "vllm:request_generation_tokens", "kvrail_request_generation_tokens", "Generated tokens of a request.", _keep
    ),
    VllmMetric("vllm:prompt_tokens", "kvrail_prompt_tokens", "Prompt tokens.", _keep),
    VllmMetric("vllm:generation_tokens", "kvrail_generation_tokens", "Generated tokens.", _keep),
    VllmMetric(
        "vllm:request_queue_time_seconds", "kvrail_request_phase_seconds", "Time in queue.", _select("phase", "queue")
    ),
    VllmMetric(
        "vllm:request_prefill_time_seconds",
        "kvrail_request_phase_seconds",
        "Time in prefill.",
        _select("phase", "prefill"),
    ),
    VllmMetric(
        "vllm:request_decode_time_seconds",
        "kvrail_request_phase_seconds",
        "Time in decode.",
        _select("phase", "decode"),
    ),
    VllmMetric(
        "vllm:num_requests_running", "kvrail_engine_sequences", "Running requests.", _select("state", "running")
    ),
    VllmMetric(
        "vllm:num_requests_waiting", "kvrail_engine_sequences", "Waiting requests.", _select("state", "waiting")
    ),
    VllmMetric("vllm:kv_cache_usage_perc", "kvrail_engine_pages", "Share of KV pages in use; 1 is all.", _usage),
    VllmMetric("vllm:num_preemptions", "kvrail_engine_preemptions", "Preemptions.", _keep),
    VllmMetric(
        "vllm:prefix_cache_queries",
        "kvrail_engine_prefix_cache_queried_tokens",
        "Tokens looked up in the cache.",
        _keep,
    ),
    VllmMetric("vllm:prefix_cache_hits", "kvrail_engine_prefix_cache_hit_tokens", "Tokens found in the cache.", _keep),
    VllmMetric("vllm:iteration_tokens_total", "kvrail_engine_step_tokens", "Tokens of one engine step.", _keep),
)
"""What `/metrics/vllm` shows: the rows whose source a process has, the first of two with one name."""


class _OwnView:
    """A registry's metrics without the `_created` series that double them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class _VllmView:
    """A registry's metrics under vLLM's names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._own = _OwnView(registry)

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in self._own.collect()}
        shown: set[str] = set()
        for row in VLLM_METRICS:
            source = families.get(row.source)
            if source is None or row.name in shown:
                continue
            shown.add(row.name)
            family = Metric(row.name, row.documentation, source.type)
            for sample in row.derive(source.samples):
                family.samples.append(sample._replace(name=row.name + sample.name.removeprefix(row.source)))
            yield family


def render(registry: CollectorRegistry) -> tuple[bytes, str]:
    """Render body and content type of `/metrics`."""
    return generate_latest(_OwnView(registry)), CONTENT_TYPE_PLAIN_0_0_4


def render_vllm(registry: CollectorRegistry) -> tuple[bytes, str]:
    """Render body and content type of `/metrics/vllm`."""
    return generate_latest(_VllmView(registry)), CONTENT_TYPE_PLAIN_0_0_4
