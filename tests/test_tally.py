"""kvrail's metrics show what prometheus_client's own would."""

import threading

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvrail.telemetry import series as tally

BOUNDS = (0.001, 0.01, 0.25, 5.0)


def shown(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_families_show_what_prometheus_metrics_show():
    own, theirs = CollectorRegistry(), CollectorRegistry()
    counters = [
        tally.counters("c", "Counts.", ["a", "b"], own),
        prometheus_client.Counter("c", "Counts.", ["a", "b"], registry=theirs),
    ]
    gauges = [
        tally.gauges("g", "Rises, falls.", ["a"], own),
        prometheus_client.Gauge("g", "Rises, falls.", ["a"], registry=theirs),
    ]
    histograms = [
        tally.histograms("h_seconds", "Times.", ["a"], own, BOUNDS),
        prometheus_client.Histogram("h_seconds", "Times.", ["a"], registry=theirs, buckets=BOUNDS),
    ]
    assert shown(own) == shown(theirs)
    for counter in counters:
        counter.labels("x", 1).inc()
        counter.labels("x", 2).inc(2.5)
        counter.labels("gone", 1).inc()
        counter.remove("gone", 1)
    for gauge in gauges:
        gauge.labels("x").set(3)
        gauge.labels("x").dec(5)
        gauge.labels("y").inc()
    for value in (0.0, 0.001, 0.0010001, 5.0, 6.0, 0.25):
        for histogram in histograms:
            histogram.labels("x").observe(value)
    histograms[0].labels("x").observe(0.25, 3)
    for _ in range(3):
        histograms[1].labels("x").observe(0.25)
    assert shown(own) == shown(theirs)
    assert own.get_sample_value("c_total", {"a": "x", "b": "2"}) == 2.5


def test_what_prometheus_refuses_is_refused():
    registry = CollectorRegistry()
    family = tally.counters("c", "Counts.", ["a"], registry)
    with pytest.raises(ValueError, match="only rises"):
        family.labels("x").inc(-1)
    with pytest.raises(ValueError, match="labels"):
        family.labels("x", "y")
    with pytest.raises(ValueError, match="Duplicated"):
        tally.counters("c", "Again.", ["a"], registry)


def test_any_thread_may_count():
    counter = tally.counters("c", "Counts.", ["a"], CollectorRegistry())
    histogram = tally.histograms("h", "Times.", [], CollectorRegistry(), BOUNDS)

    def count() -> None:
        for number in range(2000):
            counter.labels(number % 7).inc()
            histogram.labels().observe(number % 3)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(series.value for _, series in counter.series()) == 8000
    counts, total = histogram.labels().read()
    assert (counts[-1], total) == (8000, 4 * sum(number % 3 for number in range(2000)))
