"""The text of /metrics is prometheus_client's own, byte for byte."""

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvrail.exposition import render, render_vllm
from kvrail.metrics import CodecMetrics, EngineMetrics, RouterMetrics, TransferMetrics

AWKWARD = ("", "plain", 'a "quoted" one', "back\\slash", "two\nlines", "é{}", "\\n")


def library(registry: CollectorRegistry) -> bytes:
    """What prometheus_client writes, without the series that double others."""
    blocks, kept = generate_latest(registry).decode().split("# HELP "), []
    for block in blocks[1:]:
        if "_created" not in block.split(" ", 1)[0]:
            kept.append("# HELP " + block)
    return "".join(kept).encode()


def test_awkward_labels_values_and_words():
    registry = CollectorRegistry()
    gauge = Gauge("g", 'A gauge\nof \\ two "lines".', ["b", "a"], registry=registry)
    for number, text in enumerate(AWKWARD):
        gauge.labels(text, AWKWARD[-number]).set(
            (0, -1.5, 1e300, math.inf, -math.inf, math.nan, 12345678901234567890)[number]
        )
    Counter("c", "Counts.", registry=registry).inc(3)
    Gauge("never_set", "None of it.", ["x"], registry=registry)
    histogram = Histogram("h_seconds", "Times.", ["model_name"], registry=registry)
    for seconds in (1e-9, 0.3, 7, 1e9):
        histogram.labels("m").observe(seconds)
    assert render(registry)[0] == library(registry)


def test_everything_that_processes_show():
    registry = CollectorRegistry()
    RouterMetrics(registry, "m")
    assert render(registry)[0] == library(registry)
    registry = CollectorRegistry()
    EngineMetrics(registry, "m"), TransferMetrics(registry, "m", ["raw"]), CodecMetrics(registry, "m", ["raw"])
    assert render(registry)[0] == library(registry)
    assert render_vllm(registry)[0].startswith(b"# HELP vllm:")
