"""One request is one trace over router, decode and prefill worker, as an OTLP collector gets it."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics

from benchmarks.link import once_compiled
from kvrail.errors import ConfigError
from kvrail.services.prefill import trace
from kvrail.services.router.answer import trace as router_trace
from kvrail.telemetry.moments import Moment, Timeline
from kvrail.telemetry.spans import Span, SpanLog
from kvrail.telemetry.tracing import MAX_GROUPS, Tracing
from kvrail.wire.v1 import prefill_pb2
from tests.e2e.processes import Processes
from tests.models import tiny_model
from tests.tracing.collector import Collector

ROOT = Path(__file__).parents[2]
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
STAGED = {"codec": "lynx-exact"}
PROMPT = "A window covers a run of exponents; what lies outside is repaired. " * 20


@pytest.fixture(scope="module")
def collector():
    running = Collector()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def cluster(collector, tmp_path_factory):
    """The three real services, each a process; the collector is named by OpenTelemetry's own variable."""
    before = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.endpoint
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "100"
    os.environ["KVRAIL_ROUTER_LOG_FORMAT"] = "json"
    flags = ("--kv-memory-gib", "0.001", "--dtype", "float32", "--page-size", "16")
    running = Processes(tmp_path_factory.mktemp("cluster"), tiny_model("llama"), *flags, prefills=1, decodes=1)
    if before is None:
        del os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
    del os.environ["OTEL_BSP_SCHEDULE_DELAY"], os.environ["KVRAIL_ROUTER_LOG_FORMAT"]
    yield running
    running.close()


def ask(cluster, headers=None, **body):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True, **body}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)


def trace_of(collector, trace_id, services):
    """Spans of a trace once each of `services` has told its own and all hang together: they come in batches."""
    deadline = time.monotonic() + 30
    while True:
        found = [span for span in collector.spans if span.trace_id == trace_id]
        ids = {span.span_id for span in found} | {CALLER}
        if {span.service for span in found} >= services and all(span.parent in ids for span in found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


SERVICES = {"kvrail-router", "kvrail-decode", "kvrail-prefill"}


def check_log_line(cluster, span):
    """The router's line about the request has the ids of its span, and its numbers as fields."""
    lines = [json.loads(line) for path in cluster.folder.glob("router-*") for line in path.read_text().splitlines()]
    (line,) = [each for each in lines if each.get("trace_id") == TRACE and "outcome" in each]
    assert (line["span_id"], line["outcome"], line["completion_tokens"]) == (span.span_id, "length", 5)
    assert 0 < line["first_token_s"] <= line["total_s"]
    assert sum(line["parts_s"].values()) == pytest.approx(line["total_s"], abs=0.05)


def test_one_trace_over_the_three_services(cluster, collector):
    before = time.time_ns()
    answer = ask(cluster, {"traceparent": f"00-{TRACE}-{CALLER}-01"}, kvrail={"codec": "raw"})
    assert answer.status_code == 200, answer.text
    spans = trace_of(collector, TRACE, SERVICES)
    by_id = {span.span_id: span for span in spans}
    (router,) = (span for span in spans if span.parent == CALLER)
    hops = {span.name: span for span in spans if span.parent and span.service != by_id.get(span.parent, span).service}
    assert (router.service, router.name) == ("kvrail-router", "text_completion tiny")
    check_log_line(cluster, router)
    assert (hops["decode"].service, hops["decode"].parent) == ("kvrail-decode", router.span_id)
    assert (hops["prefill"].service, hops["prefill"].parent) == ("kvrail-prefill", hops["decode"].span_id)
    for span in spans:
        assert before <= span.begin <= span.end
        if span is not router:
            parent = by_id[span.parent]
            assert parent.begin <= span.begin and span.end <= parent.end, (span, parent)
    names = {service: {s.name for s in spans if s.service == service} for service in SERVICES}
    assert {"admit", "tokenise", "queue"} <= names["kvrail-router"]
    assert {"admit", "decode"} <= names["kvrail-decode"]
    assert {"queue", "prefill"} <= names["kvrail-prefill"]
    assert {name.split()[0] for name in names["kvrail-prefill"] if name[-1].isdigit()} == {"encode", "send"}
    usage = answer.json()["usage"]
    told = usage["kvrail"]
    assert router.attributes["gen_ai.operation.name"] == "text_completion"
    assert router.attributes["gen_ai.request.model"] == "tiny"
    assert router.attributes["gen_ai.request.max_tokens"] == 5
    assert router.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert router.attributes["gen_ai.usage.output_tokens"] == 5
    assert router.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert hops["decode"].attributes["kvrail.kv_bytes"] == told["kv_bytes"] > 0
    sent = [span for span in spans if span.name.startswith("send ")]
    assert sum(span.attributes["kvrail.bytes"] for span in sent) == told["kv_bytes"]


def slowest_exemplar(cluster, name):
    """Labels of the exemplar in the bucket that holds the p99 of a histogram of the router's metrics."""
    accept = {"Accept": "application/openmetrics-text"}
    text = httpx.get(f"{cluster.url}/metrics", headers=accept, timeout=60).raise_for_status().text
    (family,) = (each for each in openmetrics.text_string_to_metric_families(text) if each.name == name)
    buckets = sorted((float(each.labels["le"]), each) for each in family.samples if each.name.endswith("_bucket"))
    rank = 0.99 * buckets[-1][1].value
    return next(each.exemplar.labels for _, each in buckets if each.value >= rank)


@pytest.mark.parametrize("name", ["kvrail_time_to_first_token_seconds", "kvrail_request_seconds"])
def test_the_exemplar_of_a_p99_bucket_leads_to_its_trace(cluster, collector, name):
    assert ask(cluster, prompt="slowly " + PROMPT, max_tokens=20).status_code == 200
    trace, deadline = slowest_exemplar(cluster, name)["trace_id"], time.monotonic() + 30
    while "text_completion tiny" not in {span.name for span in collector.spans if span.trace_id == trace}:
        assert time.monotonic() < deadline, trace
        time.sleep(0.05)


def test_drafts_and_their_verification_are_told(cluster, collector):
    trace = "1" * 32
    headers = {"traceparent": f"00-{trace}-{CALLER}-01"}
    fresh = (f"{number} {PROMPT}" for number in itertools.count())  # what is cached does not cross
    once_compiled(
        lambda: ask(cluster, kvrail=STAGED, prompt=next(fresh)).json(), lambda answer: answer["usage"]["kvrail"]
    )
    assert ask(cluster, headers, kvrail=STAGED, prompt="other " + PROMPT).status_code == 200
    spans = trace_of(collector, trace, SERVICES)
    assert "verify" in {span.name for span in spans if span.service == "kvrail-decode"}


def test_a_request_that_is_refused_is_told_with_its_error(cluster, collector):
    trace = "2" * 32
    answer = ask(cluster, {"traceparent": f"00-{trace}-{CALLER}-01"}, model="another")
    assert answer.status_code == 404
    (span, *_) = sorted(trace_of(collector, trace, {"kvrail-router"}), key=lambda span: span.parent != CALLER)
    assert span.failed and span.attributes["error.type"]


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": f"00-{'3' * 32}-{CALLER}-00"},  # whoever asks does not want it sampled
        {"traceparent": "00-nonsense"},
        {},
    ],
)
def test_what_the_client_says_of_traces_never_hurts_its_request(cluster, collector, headers):
    number = len(collector.spans)
    assert ask(cluster, headers).status_code == 200
    if headers.get("traceparent", "").endswith("-00"):
        time.sleep(0.5)
        assert not [span for span in collector.spans if span.trace_id == "3" * 32]
    else:
        deadline = time.monotonic() + 30
        while not any(span.parent == "" and span.service == "kvrail-router" for span in collector.spans[number:]):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_collector_that_is_away_holds_up_nothing():
    tracing = Tracing.start("http://127.0.0.1:9", "router")
    begin = time.monotonic()
    for _ in range(5000):  # more than the queue holds
        tracing.hop("chat", {}, Timeline(), {}).end({})
    assert time.monotonic() - begin < 30
    begin = time.monotonic()
    tracing.close()
    assert time.monotonic() - begin < 10


def test_groups_of_layers_are_few_and_nothing_is_lost(collector):
    tracing = Tracing.start(collector.endpoint, "prefill")
    hop = tracing.hop("prefill", {}, Timeline(), {})
    _, trace, parent, _ = hop.context["traceparent"].split("-")
    spans = [Span("p", "send", f"layers {n}-{n}, pages 0-{n}", n / 1e6, 1e-6, {"bytes": n}) for n in range(80)]
    others = [Span("p", "tokens", "step", 0.0, 1.0, {}), Span("q", "send", "layers 0-0, pages 0-0", 0.0, 1.0, {})]
    hop.transfer("p", [*spans, *others])
    hop.end({})
    tracing.close()
    sent = [span for span in collector.spans if (span.trace_id, span.parent) == (trace, parent)]
    assert 0 < len(sent) <= MAX_GROUPS
    assert sum(span.attributes["kvrail.frames"] for span in sent) == 80
    assert sum(span.attributes["kvrail.bytes"] for span in sent) == sum(range(80))
    assert sent[0].name == "send 0-2"


@pytest.mark.parametrize("sent", [2.0, 3.0])
def test_a_prefill_ends_with_its_last_part(collector, sent):
    """Frames may have left before the loop hears that the prompt is computed."""
    tracing, now = Tracing.start(collector.endpoint, "prefill"), 0.0
    timeline = Timeline(lambda: now)
    spans = SpanLog(trace.PROCESS, timeline)
    hop = trace.begin(tracing, "m", prefill_pb2.PrefillRequest(request_id=f"{sent}"), timeline)
    with hop.following(lambda hop, error: trace.end(hop, spans, error)):
        now = 1.0
        timeline.mark(Moment.PREFILL_STARTED)
        for now in (2.0, 3.0):
            if now == sent:
                spans.add("send", "layers 0-0, pages 0-0", 0.5)
            else:
                timeline.mark(Moment.PREFILL_FINISHED)
        now = 9.0
    tracing.close()
    (whole,) = (span for span in collector.spans if span.attributes.get("kvrail.request_id") == f"{sent}")
    parts = [span for span in collector.spans if span.parent == whole.span_id]
    assert len(parts) == 3 and whole.end == max(part.end for part in parts)
    assert whole.end - whole.begin == pytest.approx(3e9, rel=1e-3)


def test_a_seed_that_no_span_has_room_for_is_told_as_text(collector):
    tracing = Tracing.start(collector.endpoint, "router")
    for seed in (7, 2**63, 2**64 - 1):
        request = SimpleNamespace(stream=False, n=1, seed=seed)
        router_trace.end(router_trace.begin(tracing, "chat", request, "seeds", {}, "id", Timeline()), "stop", None, 1)
    tracing.close()
    told = [span.attributes for span in collector.spans if span.name == "chat seeds"]
    assert [each["gen_ai.request.seed"] for each in told] == [7, str(2**63), str(2**64 - 1)]


def test_without_an_endpoint_no_exporter_is_imported():
    code = (
        "import sys, kvrail.services.router.answer.service, kvrail.telemetry.tracing;"
        "assert kvrail.telemetry.tracing.Tracing.start('', 'router') is None;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=environment)


def test_what_is_not_installed_or_not_spoken_is_said(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL is 'http/protobuf'; .* set it to grpc"):
        Tracing.start("http://127.0.0.1:4318", "router")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.delitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc", None)  # as with opentelemetry-api alone
    with pytest.raises(ConfigError, match=r"pip install 'kvrail\[otel\]'"):
        Tracing.start("http://127.0.0.1:4317", "router")
