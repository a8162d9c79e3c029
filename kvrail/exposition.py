"""The metrics' two views, as text.

`/metrics` carries our own names, which all begin with `kvrail_`. `/metrics/vllm` carries the same measurements under
the names that dashboards and autoscalers for LLM servers already use; those contain colons, which Prometheus keeps for
recording rules, hence the path of their own. Nothing is counted twice: the second view is computed from the first.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

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


def _families(registry: CollectorRegistry) -> Iterator[Metric]:
    """A registry's metrics without the `_created` series that double them."""
    for family in registry.collect():
        family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        yield family


def _in_vllms_names(registry: CollectorRegistry) -> Iterator[Metric]:
    """A registry's metrics under vLLM's names."""
    families = {family.name: family for family in _families(registry)}
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


@lru_cache(maxsize=1 << 14)
def _series(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    """A series as its lines begin; the same ones are written at each scrape."""
    shown = ",".join(f'{key}="{_escaped(value, quotes=True)}"' for key, value in sorted(labels))
    return f"{name}{{{shown}}}" if shown else name


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _text(families: Iterable[Metric]) -> bytes:
    """Prometheus's text format, version 0.0.4, of counters, gauges and histograms.

    prometheus_client's own function gives the same bytes in twice the time, during which no token leaves.
    """
    lines = []
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"# HELP {name} {_escaped(family.documentation)}\n# TYPE {name} {family.type}\n")
        lines += [f"{_series(s.name, tuple(s.labels.items()))} {floatToGoString(s.value)}\n" for s in family.samples]  # type: ignore[no-untyped-call]
    return "".join(lines).encode()


def render(registry: CollectorRegistry) -> tuple[bytes, str]:
    """Render body and content type of `/metrics`."""
    return _text(_families(registry)), CONTENT_TYPE_PLAIN_0_0_4


def render_vllm(registry: CollectorRegistry) -> tuple[bytes, str]:
    """Render body and content type of `/metrics/vllm`."""
    return _text(_in_vllms_names(registry)), CONTENT_TYPE_PLAIN_0_0_4
