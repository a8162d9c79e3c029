"""What the router's metrics say of HTTP and of its workers, and where it tells Prometheus to look."""

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvrail.services.router.fleet.policy import WorkerState
from kvrail.text import Tokenizer
from kvrail.wire.v1 import common_pb2
from tests.router.cluster import MODEL, Cluster, FakeDecode, run_cluster, status, until, write_output
from tests.router.scripts import hanging

KEY = {"x-api-key": "k"}


@pytest.fixture
async def guarded(tokenizer: Tokenizer) -> AsyncIterator[Cluster]:
    async with run_cluster(tokenizer, prefill=1, api_keys=["k"], max_body_bytes=1000) as cluster:
        yield cluster


async def samples(cluster: Cluster, family: str, path: str = "/metrics") -> dict[tuple[str, ...], float]:
    """Values of a family by those of its labels, without the model's name."""
    text = (await cluster.http.get(path)).text
    found = {}
    for each in text_string_to_metric_families(text):
        for sample in each.samples:
            if sample.name == family:
                found[tuple(v for k, v in sorted(sample.labels.items()) if k != "model_name")] = sample.value
    return found


async def test_http_requests_by_route_and_status(guarded: Cluster):
    http = guarded.http
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    assert (await http.post("/v1/chat/completions", json=chat, headers=KEY)).status_code == 200
    assert (await http.post("/v1/chat/completions", json=chat)).status_code == 401
    assert (await http.post("/v1/chat/completions", content=b"x" * 2000, headers=KEY)).status_code == 413
    assert (await http.post("/v1/chat/completions", json={}, headers=KEY)).status_code == 400
    assert (await http.get("/v1/chat/completions", headers=KEY)).status_code == 405
    assert (await http.get("/v1/responses/none", headers=KEY)).status_code == 404
    assert (await http.get("/v1/responses/none")).status_code == 401
    assert (await http.get("/nowhere", headers=KEY)).status_code == 404
    assert (await http.get("/health")).status_code == 200
    host, port = guarded.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"this is no HTTP\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()
    door = "/v1/chat/completions"
    assert await samples(guarded, "kvrail_http_requests_total") == {
        (door, "POST", "200"): 1,
        (door, "POST", "401"): 1,
        (door, "POST", "413"): 1,
        (door, "POST", "400"): 1,
        (door, "GET", "405"): 1,
        ("/v1/responses/{response_id}", "GET", "404"): 1,
        ("/v1/responses/{response_id}", "GET", "401"): 1,
        ("none", "GET", "404"): 1,
        ("/health", "GET", "200"): 1,
        ("none", "none", "400"): 1,
    }
    # Itself seen: the first reading has been counted by now. vLLM counts neither probes nor scrapes.
    assert (await samples(guarded, "kvrail_http_requests_total"))["/metrics", "GET", "200"] == 1
    theirs = await samples(guarded, "http_requests_total", "/metrics/vllm")
    assert theirs[door, "POST", "4xx"] == 3 and theirs[door, "POST", "2xx"] == 1
    assert not {handler for handler, *_ in theirs} & {"/metrics", "/health"}
    seconds = await samples(guarded, "http_request_duration_seconds_count", "/metrics/vllm")
    assert seconds[door,] == 5


async def test_a_client_that_leaves_before_an_answer(cluster: Cluster):
    cluster.decode[0].script = hanging()
    asked = asyncio.create_task(cluster.complete(prompt=[1]))
    await until(lambda: bool(cluster.decode[0].requests))
    asked.cancel()
    await until(lambda: cluster.service.admission.active == 0)
    found = await samples(cluster, "kvrail_http_requests_total")
    assert found["/v1/completions", "POST", "499"] == 1


async def test_workers_as_the_router_sees_them(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2, prefill=1) as cluster:
        decode = [worker.target for worker in cluster.decode]
        prefill = cluster.prefill[0].target
        gate = asyncio.Event()

        async def gated(worker, request):
            await gate.wait()
            async for reply in write_output(worker, request):
                yield reply

        for worker in cluster.decode:
            worker.script = gated
        asked = [asyncio.create_task(cluster.complete(prompt=[1, number])) for number in range(2)]
        await until(lambda: all(bool(worker.requests) for worker in cluster.decode))
        in_flight = await samples(cluster, "kvrail_worker_requests_in_flight")
        assert in_flight == {("decode", decode[0]): 1, ("decode", decode[1]): 1, ("prefill", prefill): 2}
        gate.set()
        await asyncio.gather(*asked)
        assert set((await samples(cluster, "kvrail_worker_requests_in_flight")).values()) == {0}
        assert (await samples(cluster, "kvrail_worker_requests_total"))["prefill", prefill] == 2
        cluster.decode[0].status = status(draining=True, running=5)
        report = common_pb2.WorkerReport(prefix_queried_tokens=70, prefix_hit_tokens=64)
        cluster.decode[1].status = status(
            running=2, waiting=3, pages_total=100, pages_free=40, pages_cached=35, report=report
        )
        cluster.prefill[0].status = status(protocol_version=1)
        pool = cluster.service.pool
        await until(lambda: [worker.state for worker in pool.workers] == ["draining", "healthy", "incompatible"])
        await until(lambda: pool.decode[decode[1]].answer.waiting == 3)
        states = await samples(cluster, "kvrail_worker_state")
        assert {key for key, shown in states.items() if shown} == {
            ("decode", "draining", decode[0]),
            ("decode", "healthy", decode[1]),
            ("prefill", "incompatible", prefill),
        }
        assert len(states) == 3 * len(WorkerState)
        assert await samples(cluster, "kvrail_cluster_requests_waiting") == {(): 3}
        assert await samples(cluster, "kvrail_cluster_requests_running") == {(): 2}
        assert await samples(cluster, "kvrail_cluster_kv_usage_ratio") == {(): 0.25}
        assert await samples(cluster, "kvrail_cluster_cache_info") == {("0", "100"): 1}


SUMS = {
    "vllm:num_requests_running": (("0",), 6),
    "vllm:num_requests_waiting": (("0",), 4),
    "vllm:num_requests_waiting_by_reason": (("0", "capacity"), 4),
    "vllm:kv_cache_usage_perc": (("0",), 0.25),
    "vllm:prefix_cache_queries_total": (("0",), 170),
    "vllm:prefix_cache_hits_total": (("0",), 64),
    "vllm:cache_config_info": (("16", "0", "200"), 1),
}


async def test_who_scrapes_the_router_alone_gets_sums_over_decode_workers(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        report = common_pb2.WorkerReport(prefix_queried_tokens=70, prefix_hit_tokens=64)
        shared = {"layout": common_pb2.KVLayout(page_size=16), "pages_total": 100, "pages_cached": 35}
        cluster.decode[0].status = status(running=4, waiting=1, pages_free=40, report=report, **shared)
        report = common_pb2.WorkerReport(prefix_queried_tokens=100)
        cluster.decode[1].status = status(running=2, waiting=3, pages_free=40, report=report, **shared)
        cluster.prefill[0].status = status(layout=common_pb2.KVLayout(page_size=16), running=9)
        pool = cluster.service.pool
        await until(lambda: sum(worker.answer.running for worker in pool.decode.values()) == 6)
        for name, (labels, value) in SUMS.items():
            assert await samples(cluster, name, "/metrics/vllm") == {labels: value}, name
        text = (await cluster.http.get("/metrics/vllm")).text
        for family in text_string_to_metric_families(text):
            if family.name.removesuffix("_total") in {name.removesuffix("_total") for name in SUMS}:
                assert re.match("Sum over|Over all decode", family.documentation), family.name
        # Where the workers are scraped too, nothing is counted twice.
        without = (await cluster.http.get("/metrics/vllm?sums=off")).text
        found = {family.name for family in text_string_to_metric_families(without)}
        assert found & {name.removesuffix("_total") for name in SUMS} == {
            "vllm:num_requests_waiting",
            "vllm:num_requests_waiting_by_reason",
        }
        assert await samples(cluster, "vllm:num_requests_waiting", "/metrics/vllm?sums=off") == {("0",): 0}
        assert (await cluster.http.get("/metrics/vllm?sums=maybe")).status_code == 400


async def test_sums_of_counters_never_fall(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        first, second = cluster.decode
        pool = cluster.service.pool
        told: dict[str, float] = {}

        async def total(worker: FakeDecode, queried: int, instance: int = 7) -> float:
            report = common_pb2.WorkerReport(prefix_queried_tokens=queried, prefix_hit_tokens=queried // 2)
            worker.status = status(instance=instance, report=report)
            known = pool.decode[worker.target]
            await until(lambda: known.answer is not None and known.answer.report == report)
            (found,) = (await samples(cluster, "vllm:prefix_cache_queries_total", "/metrics/vllm")).values()
            (hits,) = (await samples(cluster, "vllm:prefix_cache_hits_total", "/metrics/vllm")).values()
            assert found == 2 * hits and found >= told.get("last", 0)
            told["last"] = found
            return found

        assert await total(first, 10**6) == 0  # what it had looked up before this router came
        assert await total(second, 10**6, instance=8) == 0
        assert await total(first, 10**6 + 100) == 100
        pool.lost(pool.decode[first.target], "no answer")
        assert await total(second, 10**6 + 30, instance=8) == 130
        assert await total(first, 10**6 + 110) == 140
        assert await total(first, 40, instance=9) == 140  # a new process
        assert await total(first, 50, instance=9) == 150
        await total(second, 46, instance=9)  # the same one at another address
        await until(lambda: pool.decode[second.target].state is WorkerState.DUPLICATE)
        assert await total(second, 60, instance=9) == 150


async def test_refusals_for_want_of_room(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, max_concurrent_requests=1) as cluster:
        cluster.decode[0].script = hanging()
        asked = asyncio.create_task(cluster.complete(prompt=[1]))
        await until(lambda: bool(cluster.decode[0].requests))
        assert (await cluster.complete(prompt=[1])).status_code == 429
        asked.cancel()
        assert await samples(cluster, "vllm:admission_rejections_total", "/metrics/vllm") == {
            ("max_num_queued_reqs",): 1
        }


async def test_prometheus_finds_all_metrics(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=1, prefill=2) as cluster:
        decode, prefill = cluster.decode[0], cluster.prefill[0]  # the other says no port
        decode.status, prefill.status = status(metrics_port=9102, metrics_tls=True), status(metrics_port=9101)
        pool = cluster.service.pool
        await until(lambda: pool.decode[decode.target].answer.metrics_port == 9102)
        await until(lambda: any(bool(each.answer.metrics_port) for each in pool.prefill.values()))
        router = cluster.url.removeprefix("http://")
        assert (await cluster.http.get("/metrics/targets")).json() == [
            {"targets": [router], "labels": {"service": "router", "__param_sums": "off"}},
            {
                "targets": ["127.0.0.1:9102"],
                "labels": {"__scheme__": "https", "service": "decode", "worker": decode.target},
            },
            {"targets": ["127.0.0.1:9101"], "labels": {"service": "prefill", "worker": prefill.target}},
        ]
        theirs = (await cluster.http.get("/metrics/targets", params={"names": "vllm"})).json()
        assert [group["targets"] for group in theirs] == [[router], ["127.0.0.1:9102"]]
        assert {group["labels"]["__metrics_path__"] for group in theirs} == {"/metrics/vllm"}
        assert {group["labels"]["instance"] for group in theirs} == {router}
        assert (await cluster.http.get("/metrics/targets", params={"names": "ours"})).status_code == 400
