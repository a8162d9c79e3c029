"""What /metrics says after known requests, under our names and under vLLM's."""

import os
import shutil
import subprocess

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvrail.telemetry.exposition import Exposition
from kvrail.telemetry.making import show_process
from kvrail.telemetry.moments import PARTS
from kvrail.telemetry.router import RouterMetrics
from kvrail.telemetry.series import Registry
from kvrail.telemetry.worker import CodecMetrics, EngineMetrics, TransferMetrics
from kvrail.text import Tokenizer
from tests.router.cluster import MODEL, OUTPUT, Cluster


def series(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    common = {"model_name": MODEL, "engine": "0"} if name.startswith("vllm:") else {"model_name": MODEL}
    return series(text)[name, frozenset((common | labels).items())]


async def test_counts_of_known_requests(cluster: Cluster, tokenizer: Tokenizer):
    await cluster.complete(prompt=[1, 2, 3], n=2)
    await cluster.complete(prompt=[1, 2], max_tokens=1, stream=True)
    await cluster.complete(prompt="")
    await cluster.complete(temperature="hot")
    generated = len(tokenizer.encode(OUTPUT, add_special_tokens=False))
    answer = await cluster.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    ours, theirs = answer.text, (await cluster.http.get("/metrics/vllm")).text
    assert value(ours, "kvrail_requests_total", outcome="stop") == 1
    assert value(ours, "kvrail_requests_total", outcome="length") == 1
    assert value(ours, "kvrail_requests_total", outcome="invalid") == 2
    expected = {
        ("kvrail_prompt_tokens_total", "vllm:prompt_tokens_total"): 5,
        ("kvrail_generation_tokens_total", "vllm:generation_tokens_total"): 2 * generated + 1,
        ("kvrail_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count"): 2,
        ("kvrail_inter_token_seconds_count", "vllm:inter_token_latency_seconds_count"): 2 * (generated - 1),
        ("kvrail_request_seconds_count", "vllm:e2e_request_latency_seconds_count"): 2,
        ("kvrail_request_prompt_tokens_sum", "vllm:request_prompt_tokens_sum"): 5,
        ("kvrail_request_generation_tokens_count", "vllm:request_generation_tokens_count"): 2,
    }
    for (own, vllm), count in expected.items():
        assert value(ours, own) == count, own
        assert value(theirs, vllm) == count, vllm
    assert value(ours, "kvrail_cached_prompt_tokens_total") == 5
    assert value(theirs, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(theirs, "vllm:request_success_total", finished_reason="length") == 1
    assert value(theirs, "vllm:request_success_total", finished_reason="abort") == 0
    assert value(theirs, "vllm:request_success_total", finished_reason="error") == 0
    sources = {"local_compute": 0, "local_cache_hit": 5, "external_kv_transfer": 0}  # workers say they held 3 tokens
    for source, count in sources.items():
        assert value(theirs, "vllm:prompt_tokens_by_source_total", source=source) == count
    assert value(theirs, "vllm:request_max_num_generation_tokens_sum") == generated + 1
    assert value(theirs, "vllm:request_params_n_sum") == 3
    assert value(theirs, "vllm:request_time_per_output_token_seconds_count") == 3  # one of each choice
    assert value(theirs, "vllm:request_inference_time_seconds_sum") == pytest.approx(2 * 0.004)
    assert value(theirs, "vllm:request_prefill_time_seconds_sum") == pytest.approx(2 * 0.002)
    assert value(theirs, "vllm:request_decode_time_seconds_sum") == pytest.approx(2 * 0.002)


@pytest.mark.parametrize("stream", [False, True])
async def test_parts_of_a_request_add_up_to_its_total(cluster: Cluster, stream: bool):
    await cluster.chat(stream=stream)
    text = (await cluster.http.get("/metrics")).text
    total = value(text, "kvrail_request_seconds_sum")
    parts = {name: value(text, "kvrail_request_stage_seconds_sum", stage=name) for name, _, _ in PARTS}
    assert all(value(text, "kvrail_request_stage_seconds_count", stage=name) == 1 for name in parts)
    assert sum(parts.values()) == pytest.approx(total, rel=0.05)
    assert parts["prefill"] == pytest.approx(0.001)  # as the worker said
    assert total > 0.007


def filled_registry() -> Registry:
    registry = Registry()
    router = RouterMetrics(registry, MODEL)
    router.worker_up("decode", "d:1", True)
    router.show_worker("decode", "d:1", state="healthy", states=["healthy", "down"], requests=1, backlog=20)
    router.placed("decode", "decode", "d:1", "load", "plain")
    router.show_cache(64, 100)
    router.answered("/v1/models", "GET", 200, 0.25)
    router.time_to_token(1, "provisional")
    engine = EngineMetrics(registry, MODEL)
    engine.show_cache(page_size=64, pages=100, cache_bytes=1 << 20, kv_dtype="bfloat16", prefix_cache=True)
    engine.set_pages(free=50, used=25, cached=25)
    engine.running.set(3)
    engine.preemptions.inc(2)
    engine.prefix_queried_tokens.inc(100)
    engine.prefix_hit_tokens.inc(40)
    engine.step_tokens.observe(17)
    transfer = TransferMetrics(registry, MODEL, codecs=("raw", "splitzip"))
    transfer.crossed("received", "splitzip", raw_bytes=300, payload_bytes=200, frames=2)
    coding = CodecMetrics(registry, MODEL)
    coding.encoded("splitzip", 0.25, values=1000, escapes=3, raw_tensors=1)
    coding.encoded("splitzip", 0.5, values=1000, escapes=0, raw_tensors=0)
    coding.decoded("splitzip", 0.125)
    show_process(registry, "1.2.3", 5)
    return registry


def text_of(registry: Registry, path: str = "/metrics") -> str:
    return Exposition(registry).render(path)[0].decode()


def test_transfer_counts():
    text = text_of(filled_registry())
    labels = {"direction": "received", "codec": "splitzip"}
    assert value(text, "kvrail_kv_raw_bytes_total", **labels) == 300
    assert value(text, "kvrail_kv_payload_bytes_total", **labels) == 200
    assert value(text, "kvrail_kv_frames_total", **labels) == 2
    assert value(text, "kvrail_kv_raw_bytes_total", direction="sent", codec="raw") == 0  # exists before its first use


def test_codec_measurements():
    text = text_of(filled_registry())
    expected = {
        "encode_seconds_sum": 0.75,
        "encode_seconds_count": 2,
        "decode_seconds_sum": 0.125,
        "encoded_values_total": 2000,
        "escaped_values_total": 3,
        "raw_tensors_total": 1,
    }
    assert {name: value(text, f"kvrail_kv_{name}", codec="splitzip") for name in expected} == expected
    assert not any(("codec", "raw") in labels for name, labels in series(text) if "code_seconds" in name)  # never used


def test_names():
    registry = filled_registry()
    own = {name for name, _ in series(text_of(registry))}
    theirs = {name for name, _ in series(text_of(registry, "/metrics/vllm"))}
    assert all(name.startswith(("kvrail_", "process_")) for name in own)
    assert not any(name.endswith("_created") for name in own)
    assert all(name.startswith(("vllm:", "http_request")) for name in theirs)
    text = text_of(registry, "/metrics/vllm")
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))  # one process may be router and engine; no metric comes twice


def test_promtool_finds_nothing_to_lint():
    promtool = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if promtool is None:
        assert not os.environ.get("CI"), "promtool is not installed; set PROMTOOL to where it is"
        pytest.skip("promtool is not installed; it comes with Prometheus")
    body = text_of(filled_registry()).encode()
    done = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


async def test_metrics_answer_while_no_worker_is_up(cluster: Cluster):
    cluster.service.pool.lost(cluster.service.pool.decode[cluster.decode[0].target], "gone")
    answer: httpx.Response = await cluster.http.get("/metrics")
    assert answer.status_code == 200


async def test_openmetrics_has_exemplars_where_it_is_asked_for(cluster: Cluster):
    """Of first tokens and of whole requests, each with the id of the request, as the official parser reads them."""
    await cluster.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "hi"}, headers={"x-request-id": "the-slow-one"}
    )
    answer = await cluster.http.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = {each.name: each for each in openmetrics.text_string_to_metric_families(answer.text)}
    for name in ("kvrail_time_to_first_token_seconds", "kvrail_request_seconds"):
        found = [sample for sample in families[name].samples if sample.exemplar]
        assert [sample.exemplar.labels for sample in found] == [{"request_id": "the-slow-one"}]
        assert found[0].exemplar.value <= float(found[0].labels["le"])
    plain = await cluster.http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain") and "the-slow-one" not in plain.text
    theirs = await cluster.http.get("/metrics/vllm", headers={"accept": "application/openmetrics-text"})
    assert theirs.headers["content-type"].startswith("text/plain")
