"""A router's first seconds: what it says and does before its workers are found."""

import asyncio

import pytest

from kvrail.rpc.server import build_server
from kvrail.services.router.fleet import workers
from kvrail.text import Tokenizer
from tests.router.cluster import MODEL, OUTPUT, FakeDecode, FakePrefill, run_cluster, status, until


async def health(cluster) -> tuple[int, str]:
    answer = await cluster.http.get("/health")
    assert ("retry-after" in answer.headers) == (answer.status_code == 503)
    return answer.status_code, answer.json()["status"]


async def serve(worker, port: int):
    rpc = await build_server()
    (rpc.add_decode if isinstance(worker, FakeDecode) else rpc.add_prefill)(worker)
    rpc.bind("127.0.0.1", port)
    await rpc.start()
    return rpc


async def test_a_request_that_comes_first_waits_for_the_decode_worker(tokenizer: Tokenizer, unused_tcp_port: int):
    target = f"127.0.0.1:{unused_tcp_port}"
    async with run_cluster(tokenizer, decode=0, prefill=0, wait_healthy=False, decode_workers=[target]) as cluster:
        early = asyncio.create_task(cluster.chat())
        assert await health(cluster) == (503, "starting")
        models = (await cluster.http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["max_model_len"]) for model in models] == [(MODEL, None)]
        rpc = await serve(FakeDecode(tokenizer), unused_tcp_port)
        try:
            answer = await early
            if answer.status_code == 503:  # the machine was slow: the wait is bounded
                await until(lambda: cluster.service.pool.healthy)
                answer = await cluster.chat()
            assert answer.json()["choices"][0]["message"]["content"] == OUTPUT
            assert await health(cluster) == (200, "ok")
        finally:
            await rpc.stop()


async def test_the_wait_ends_in_a_503_that_says_why(tokenizer: Tokenizer, unused_tcp_port: int, monkeypatch):
    monkeypatch.setattr(workers, "STARTUP_WAIT_S", 0.05)
    target = f"127.0.0.1:{unused_tcp_port}"
    async with run_cluster(tokenizer, decode=0, prefill=0, wait_healthy=False, decode_workers=[target]) as cluster:
        answer = await cluster.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")
        assert target in answer.json()["error"]["message"] and int(answer.headers["retry-after"]) >= 1
        assert await health(cluster) == (503, "starting")


async def test_requests_wait_for_the_prefill_worker_too(tokenizer: Tokenizer, unused_tcp_port: int, monkeypatch):
    monkeypatch.setattr(workers, "STARTUP_WAIT_S", 60.0)
    target = f"127.0.0.1:{unused_tcp_port}"
    async with run_cluster(tokenizer, prefill=0, wait_healthy=False, prefill_workers=[target]) as cluster:
        await until(lambda: cluster.service.pool.healthy)
        assert await health(cluster) == (503, "starting")
        early = asyncio.create_task(cluster.chat())
        await asyncio.sleep(0.2)
        assert not early.done() and not cluster.decode[0].requests
        prefill = FakePrefill()
        rpc = await serve(prefill, unused_tcp_port)
        try:
            assert (await early).status_code == 200
            assert list(cluster.decode[0].requests[0].prefill_workers) == [target]
            assert await health(cluster) == (200, "ok")
            prefill.status = status(draining=True)
            await until(lambda: not cluster.service.pool.complete)
            assert await health(cluster) == (200, "degraded")
        finally:
            await rpc.stop()


@pytest.mark.parametrize("missing", ["prefill_workers", "decode_workers"])
async def test_after_the_grace_it_serves_without_a_worker_that_never_came(
    tokenizer: Tokenizer, unused_tcp_port: int, monkeypatch, missing: str
):
    monkeypatch.setattr(workers, "STARTUP_GRACE_S", 0.2)
    lost = f"127.0.0.1:{unused_tcp_port}"
    counts = {"decode": 1, "prefill": 0}
    async with run_cluster(tokenizer, **counts, wait_healthy=False, **{missing: [lost]}) as cluster:
        if missing == "decode_workers":  # named instead of the one that runs: none is ever heard of
            await asyncio.sleep(0.3)
            assert await health(cluster) == (503, "starting")
        else:

            async def degraded() -> bool:
                return await health(cluster) == (200, "degraded")

            await until(degraded)
            assert (await cluster.chat()).status_code == 200
