"""How metrics are made: with the model's name first among their labels."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

from prometheus_client import CollectorRegistry, ProcessCollector

from kvrail.telemetry import buckets
from kvrail.telemetry.series import Counter, Family, Gauge, Histogram, counters, gauges, histograms


class Make:
    """Makes metrics of one registry. Their first label is the model's name."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self.model_name = model_name

    def counter(self, name: str, documentation: str) -> Counter:
        """A counter."""
        return self.counter_family(name, documentation).labels(self.model_name)

    def gauge(self, name: str, documentation: str) -> Gauge:
        """A gauge."""
        return self.gauge_family(name, documentation).labels(self.model_name)

    def histogram(self, name: str, documentation: str, bounds: Sequence[float]) -> Histogram:
        """A histogram. bounds: of its buckets."""
        return self.histogram_family(name, documentation, bounds).labels(self.model_name)

    def counters(self, name: str, documentation: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        """Counters by the values of one more label."""
        family = self.counter_family(name, documentation, label)
        return {value: family.labels(self.model_name, value) for value in values}

    def gauges(self, name: str, documentation: str, label: str, values: Iterable[str]) -> dict[str, Gauge]:
        """Gauges by the values of one more label."""
        family = self.gauge_family(name, documentation, label)
        return {value: family.labels(self.model_name, value) for value in values}

    def histograms(
        self,
        name: str,
        documentation: str,
        label: str,
        values: Iterable[str],
        bounds: Sequence[float] = buckets.PART,
    ) -> dict[str, Histogram]:
        """Histograms by the values of one more label. bounds: of their buckets."""
        family = self.histogram_family(name, documentation, bounds, label)
        return {value: family.labels(self.model_name, value) for value in values}

    def counter_family(self, name: str, documentation: str, *labels: str) -> Family[Counter]:
        """Counters with these additional labels, whose values are added as they occur."""
        return counters(name, documentation, ["model_name", *labels], self._registry)

    def gauge_family(self, name: str, documentation: str, *labels: str) -> Family[Gauge]:
        """Gauges with these additional labels."""
        return gauges(name, documentation, ["model_name", *labels], self._registry)

    def histogram_family(
        self, name: str, documentation: str, bounds: Sequence[float], *labels: str
    ) -> Family[Histogram]:
        """Histograms with these additional labels. bounds: of their buckets."""
        return histograms(name, documentation, ["model_name", *labels], self._registry, bounds)


def show_process(registry: CollectorRegistry, version: str, protocol: int) -> None:
    """Add what every process shows to `registry`: CPU time, memory, files, version."""
    ProcessCollector(registry=registry)
    build = gauges("kvrail_build_info", "The process's version; always 1.", ["version", "protocol"], registry)
    build.labels(version, protocol).set(1)


def show_worker(registry: CollectorRegistry, model_name: str, **about: str) -> None:
    """Add what a worker is to `registry`: role, device, dtype, kv_cache, torch, cuda."""
    family = gauges(
        "kvrail_worker_info",
        "A worker's role, device, types of weights and of the KV cache, versions of PyTorch and CUDA; always 1.",
        ["model_name", *about],
        registry,
    )
    family.labels(model_name, *about.values()).set(1)


def show_certificates(registry: CollectorRegistry, ends: Mapping[str, Callable[[], datetime]]) -> Callable[[], None]:
    """Add the end of each certificate to `registry`, by its use; call the returned function before each scrape."""
    family = gauges(
        "kvrail_certificate_end_seconds",
        "When a certificate ends, in seconds since 1970: the one between services, or the HTTP port's (door).",
        ["use"],
        registry,
    )
    shown = [(family.labels(use), end) for use, end in ends.items()]

    def bring_up_to_date() -> None:
        for gauge, end in shown:
            gauge.set(end().timestamp())

    return bring_up_to_date
