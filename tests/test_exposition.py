"""The text of /metrics: prometheus_client's own, under our names and under vLLM's."""

import asyncio
import math
import random
import threading
from functools import partial

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

import kvrail.telemetry.exposition
from kvrail.telemetry import buckets, series
from kvrail.telemetry.exposition import Exposition
from kvrail.telemetry.making import show_process
from kvrail.telemetry.router import RouterMetrics
from kvrail.telemetry.series import Registry
from kvrail.telemetry.worker import CodecMetrics, EngineMetrics, TransferMetrics

AWKWARD = ("", "plain", 'a "quoted" one', "back\\slash", "two\nlines", "é{}", "\\n")
NUMBERS = (0, -1.5, 1e300, math.inf, -math.inf, math.nan, 12345678901234567890)


def histograms(name, labels, registry, bounds):
    new = partial(series.Histogram, bounds)
    return series.Family(name, "Times.", labels, registry, kind="histogram", new=new, bounds=bounds)


def test_awkward_labels_values_and_words():
    registry = Registry()
    exposition = Exposition(registry)
    gauge = series.gauges("g", 'A gauge\nof \\ two "lines".', ["b", "a"], registry)
    for number, text in enumerate(AWKWARD):
        gauge.labels(text, AWKWARD[-number]).set(NUMBERS[number])
    series.Family("c", "Counts.", [], registry, kind="counter", new=series.Counter).labels().inc(3)
    series.gauges("never_set", "None of it.", ["x"], registry)
    histogram = histograms("h_seconds", ["zone", "kind"], registry, buckets.PART)
    for seconds in (1e-9, 0.3, 7, 1e9):
        histogram.labels("z", "k").observe(seconds, 400_000)
    assert exposition.render()[0] == generate_latest(registry)


def test_series_come_and_go():
    """As a registry goes on, with series that come and go, the text stays the library's."""
    draw = random.Random(7)
    registry = Registry()
    exposition = Exposition(registry)
    families = [
        series.Family("c", "Counts.", ["x"], registry, kind="counter", new=series.Counter),
        series.gauges("g", "A gauge.", ["x"], registry),
        histograms("h", ["x"], registry, (0.1, 1.0)),
    ]
    for number in range(200):
        family, label = draw.choice(families), draw.choice("abc")
        if draw.random() < 0.1:
            family.remove(label)
        elif family.type == "histogram":
            family.labels(label).observe(draw.choice((0.0, 0.05, 3)))
        else:
            family.labels(label).inc(draw.choice((0, 1, 0.5)))
        if number == 100:
            families.append(series.gauges("later", "Came later.", ["x"], registry))
        assert exposition.render()[0] == generate_latest(registry)


def test_a_collector_of_the_library_is_shown_too():
    class Own:
        def collect(self):
            family = GaugeMetricFamily("own", "Its\nown.", labels=["a"])
            family.add_metric(['"x"'], 2.5)
            yield family

    registry = Registry()
    registry.register(Own())
    assert Exposition(registry).render()[0] == generate_latest(registry)


def everything() -> Registry:
    """A registry with every metric of router and workers, and all series that need a use."""
    registry = Registry()
    router = RouterMetrics(registry, "m")
    router.placed("decode", "decode", "d:1", "load", "plain")
    router.show_worker("decode", "d:1", state="healthy", states=["healthy", "down"], requests=1, backlog=20)
    router.worker_up("decode", "d:1", True)
    router.show_cache(64, 100)
    router.answered("/v1/models", "GET", 200, 0.25)
    EngineMetrics(registry, "m").show_cache(
        page_size=64, pages=100, cache_bytes=1 << 20, kv_dtype="bfloat16", prefix_cache=True
    )
    transfers = TransferMetrics(registry, "m", ["raw"])
    transfers.codec_chosen("raw", "no_gain")
    transfers.link_measured("p:1", 1e9)
    coding = CodecMetrics(registry, "m")
    coding.encoded("raw", 0.1, values=10, escapes=1, raw_tensors=0)
    coding.decoded("raw", 0.1)
    return registry


def test_everything_that_processes_show():
    registry = everything()
    assert Exposition(registry).render()[0] == generate_latest(registry)


def test_each_path_has_its_own_names():
    registry = everything()
    show_process(registry, "1.2.3", 5)
    exposition = Exposition(registry)
    ours, theirs = (
        {family.name for family in text_string_to_metric_families(exposition.render(path)[0].decode())}
        for path in ("/metrics", "/metrics/vllm")
    )
    assert {name.partition("_")[0] for name in ours} == {"kvrail", "process"}
    assert theirs and all(name.startswith(("vllm:", "http_")) for name in theirs)
    assert Exposition(registry, vllm=False).render("/metrics/vllm")[0] == b""


async def test_a_scrape_leaves_the_loop_free(monkeypatch):
    """The text is written in a thread: the loop lets it go on, which it could not if it wrote itself."""
    goes_on = threading.Event()
    monkeypatch.setattr(kvrail.telemetry.exposition, "generate_latest", lambda _: goes_on.wait(30) and b"m 1\n")
    scrape = asyncio.create_task(Exposition(Registry()).answer("/metrics"))
    await asyncio.sleep(0)
    goes_on.set()
    assert (await scrape)[0] == b"m 1\n"


def test_the_process_is_shown():
    registry = CollectorRegistry()
    show_process(registry, "1.2.3", 5)
    assert registry.get_sample_value("kvrail_build_info", {"version": "1.2.3", "protocol": "5"}) == 1
    assert registry.get_sample_value("process_open_fds") > 0
