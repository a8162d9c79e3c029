"""Overload, lost and slow workers, failures in mid-stream, clients that leave, and an orderly end."""

import asyncio
import json
from collections.abc import AsyncIterator

import openai
import pytest

from kvrail.errors import InvalidRequestError, KvrailError, OverloadedError, WorkerUnavailableError
from kvrail.rpc.server import build_server
from kvrail.services.router.answer.service import RouterService
from kvrail.text import Tokenizer
from kvrail.wire.v1 import common_pb2, decode_pb2
from tests.router.cluster import (
    CONTEXT,
    MODEL,
    VOCABULARY,
    Cluster,
    FakeDecode,
    Script,
    run_cluster,
    status,
    summary,
    until,
    write_output,
)
from tests.router.scripts import able_prefill, error_of, failing, hanging

APIS = ("chat", "complete")


async def ends_early(worker, request) -> AsyncIterator[decode_pb2.GenerateReply]:
    yield decode_pb2.GenerateReply(token_ids=[10], text="x")


async def in_flight(cluster: Cluster) -> float:
    states = ("waiting", "running")
    return sum([await cluster.metric(f'kvrail_requests_in_flight{{state="{state}"}}') for state in states])


async def test_a_fault_of_the_routers_own_is_told_with_the_requests_id(cluster: Cluster, monkeypatch):
    """The connection ends with the answer, and says so."""

    def faulty(*_):
        raise RuntimeError("a fault")

    monkeypatch.setattr(RouterService, "cards", faulty)
    answer = await cluster.http.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert error_of(answer, 500, "internal_error")
    assert (answer.headers["x-request-id"], answer.headers["connection"]) == ("mine-1", "close")


@pytest.mark.usefixtures("few_refusals")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status_code", "code"),
    [
        (OverloadedError("full", retry_after=2.5), 429, "overloaded"),
        (WorkerUnavailableError("gone"), 503, "worker_unavailable"),
        (InvalidRequestError("bad prompt", param="prompt"), 400, None),
        (KvrailError("broken"), 500, "internal_error"),
    ],
)
async def test_failure_before_the_first_token(
    cluster: Cluster, stream: bool, error: KvrailError, status_code: int, code
):
    cluster.decode[0].script = failing(error)
    for api in APIS:
        await until(lambda: cluster.service.pool.healthy)
        answer = await getattr(cluster, api)(stream=stream)
        assert str(error) in error_of(answer, status_code, code)
    if status_code == 429:
        assert answer.headers["retry-after"] == "3"
    if status_code == 503:
        assert int(answer.headers["retry-after"]) >= 1
    outcome = {429: "overloaded", 503: "unavailable", 400: "invalid", 500: "error"}[status_code]
    assert await cluster.metric(f'kvrail_requests_total{{outcome="{outcome}"}}') == 2
    assert await in_flight(cluster) == 0


@pytest.mark.parametrize("script", [failing(WorkerUnavailableError("gone"), after=2), ends_early])
async def test_failure_in_mid_stream(cluster: Cluster, client: openai.AsyncOpenAI, script: Script):
    cluster.decode[0].script = script
    answer = await cluster.chat(stream=True)
    assert answer.status_code == 200
    events = answer.text.split("\n\n")
    assert "[DONE]" not in answer.text
    assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "service_unavailable_error"
    await until(lambda: cluster.service.pool.healthy)
    texts = []
    with pytest.raises(openai.APIError):
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
        ):
            texts.append(chunk.choices[0].delta.content)
    assert "x" in texts
    await until(lambda: cluster.service.pool.healthy)
    error_of(await cluster.chat(), 503, "worker_unavailable")  # whole answers are never cut short


async def test_replies_that_break_the_contract(cluster: Cluster):
    async def wrong_index(worker, request):
        yield decode_pb2.GenerateReply(index=1, token_ids=[10], text="x")

    async def no_logprobs(worker, request):
        yield decode_pb2.GenerateReply(token_ids=[10], text="x")

    for script, fields, why in (
        (wrong_index, {}, "sequence 1"),
        (no_logprobs, {"logprobs": 1}, "log probabilities is 0"),
    ):
        cluster.decode[0].script = script
        assert why in error_of(await cluster.complete(**fields), 500, "internal_error")


@pytest.mark.usefixtures("few_refusals")
async def test_one_prompt_of_several_fails(cluster: Cluster):
    async def one_hangs(worker, request):
        if request.prompt_token_ids[0] == 1:
            raise OverloadedError("full")
        await asyncio.Event().wait()
        yield

    cluster.decode[0].script = one_hangs
    error_of(await cluster.complete(prompt=[[0], [1], [2]]), 429, "overloaded")
    await asyncio.wait_for(cluster.decode[0].cancelled.wait(), 10)


async def test_deadline(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, request_timeout_s=0.3) as cluster:
        cluster.decode[0].script = hanging()
        for api in APIS:
            error_of(await getattr(cluster, api)(), 504, "deadline_exceeded")
        cluster.decode[0].script = hanging(after=1)
        events = (await cluster.chat(stream=True)).text.split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert await cluster.metric('kvrail_requests_total{outcome="deadline"}') == 3


async def test_admission_bound(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, max_concurrent_requests=2) as cluster:
        cluster.decode[0].script = hanging()
        first = asyncio.create_task(cluster.chat())
        await until(lambda: len(cluster.decode[0].requests) == 1)
        full = await cluster.complete(prompt=["a", "b"])
        error_of(full, 429, "overloaded")
        assert int(full.headers["retry-after"]) >= 1
        error_of(await cluster.chat(n=2), 429, "overloaded")  # each of n sequences counts
        for fields, param in (({"prompt": ["a", "b", "c"]}, "prompt"), ({"n": 3}, "n")):
            too_many = await cluster.complete(**fields)  # waiting would not help
            assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, param)
        second = asyncio.create_task(cluster.complete())
        await until(lambda: len(cluster.decode[0].requests) == 2)
        error_of(await cluster.chat(), 429, "overloaded")
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [40]})):
            error_of(await cluster.http.post(path, json=body), 429, "overloaded")
        for task in (first, second):
            task.cancel()
        await until(lambda: cluster.service.admission.active == 0)
        cluster.decode[0].script = write_output
        assert (await cluster.chat()).status_code == 200


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2])
async def test_client_that_leaves_cancels_the_worker(cluster: Cluster, api: str, stream: bool, after: int):
    cluster.decode[0].script = hanging(after)
    task = asyncio.create_task(getattr(cluster, api)(stream=stream, n=2, max_tokens=9))
    await until(lambda: len(cluster.decode[0].requests) == 1)
    if after:
        await until(lambda: running(cluster))
    task.cancel()
    await asyncio.wait_for(cluster.decode[0].cancelled.wait(), 10)
    await until(lambda: cluster.service.admission.active == 0)
    assert await in_flight(cluster) == 0
    assert await cluster.metric('kvrail_requests_total{outcome="cancelled"}') == 1


async def running(cluster: Cluster) -> bool:
    return await cluster.metric('kvrail_requests_in_flight{state="running"}') == 1


async def test_requests_spread_over_workers(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2, prefill=2, status_interval_s=60) as cluster:
        for worker in cluster.decode:
            worker.script = hanging()
        tasks = [asyncio.create_task(cluster.chat()) for _ in range(6)]
        await until(lambda: sum(len(worker.requests) for worker in cluster.decode) == 6)
        assert [len(worker.requests) for worker in cluster.decode] == [3, 3]
        firsts = [request.prefill_workers[0] for worker in cluster.decode for request in worker.requests]
        assert sorted(map(firsts.count, set(firsts))) == [3, 3]
        assert all(len(request.prefill_workers) == 2 for worker in cluster.decode for request in worker.requests)
        for task in tasks:
            task.cancel()


async def test_health_follows_the_workers(cluster: Cluster):
    async def state() -> tuple[int, str]:
        answer = await cluster.http.get("/health")
        entry = answer.json()["decode_workers"][cluster.decode[0].target]
        return answer.status_code, entry["state"]

    async def becomes(expected: tuple[int, str]) -> None:
        async def reached() -> bool:
            return await state() == expected

        await until(reached)

    await becomes((200, "healthy"))
    other_model = common_pb2.ModelInfo(name="other", fingerprint="f" * 64, vocab_size=VOCABULARY, max_model_len=CONTEXT)
    for changed, name in (
        (status(draining=True), "draining"),
        (status(model=other_model), "incompatible"),
        (status(protocol_version=99), "incompatible"),
    ):
        cluster.decode[0].status = changed
        await becomes((503, name))
        error_of(await cluster.chat(), 503, "worker_unavailable")
        assert await cluster.metric(f'kvrail_worker_up{{role="decode",worker="{cluster.decode[0].target}"}}') == 0
    cluster.decode[0].status = status()
    await becomes((200, "healthy"))
    assert (await cluster.chat()).status_code == 200


async def test_prefill_workers_that_are_down_are_not_named(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, prefill=1) as cluster:
        cluster.prefill[0].status = status(draining=True)
        await until(lambda: able_prefill(cluster.service.pool) == [])
        assert (await cluster.chat()).status_code == 200
        assert list(cluster.decode[0].requests[0].prefill_workers) == []


async def test_starts_before_its_workers(tokenizer: Tokenizer, unused_tcp_port: int):

    target = f"127.0.0.1:{unused_tcp_port}"
    async with run_cluster(tokenizer, decode=0, prefill=0, decode_workers=[target]) as cluster:
        answer = await cluster.http.get("/health")
        assert (answer.status_code, answer.json()["decode_workers"][target]["state"]) == (503, "starting")
        error_of(await cluster.chat(), 503, "worker_unavailable")
        rpc, worker = await build_server(), FakeDecode(tokenizer)
        rpc.add_decode(worker)
        rpc.bind("127.0.0.1", unused_tcp_port)
        await rpc.start()
        try:
            await until(lambda: cluster.service.pool.healthy)
            assert (await cluster.chat()).status_code == 200
        finally:
            await rpc.stop()


async def test_drain_finishes_what_runs_and_admits_no_more(cluster: Cluster):
    go_on = asyncio.Event()

    async def slow(worker, request):
        yield decode_pb2.GenerateReply(token_ids=[10], text="slow")
        await go_on.wait()
        yield decode_pb2.GenerateReply(token_ids=[11], text="ly", finish_reason=decode_pb2.FINISH_REASON_STOP)
        yield decode_pb2.GenerateReply(summary=summary(1, 2))

    cluster.decode[0].script = slow
    task = asyncio.create_task(cluster.chat(stream=True))
    await until(lambda: running(cluster))
    cluster.server.stop()
    health = await cluster.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    refused = await cluster.chat()
    error_of(refused, 503, "worker_unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    go_on.set()
    answer = await task
    assert "slow" in answer.text
    assert "ly" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_end_of_the_grace_period_is_an_error(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, grace_period_s=0.2) as cluster:
        cluster.decode[0].script = hanging(after=1)
        stream, whole = (asyncio.create_task(cluster.chat(stream=stream)) for stream in (True, False))
        await until(lambda: len(cluster.decode[0].requests) == 2)
        cluster.server.stop()
        events = (await stream).text.split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "cancelled"
        error_of(await whole, 503, "cancelled")


async def test_the_end_of_the_grace_period_ends_requests_that_are_still_planned(tokenizer: Tokenizer, monkeypatch):
    async with run_cluster(tokenizer, grace_period_s=0.2) as cluster:
        planning = asyncio.Event()

        async def endless(*_):
            planning.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(cluster.service.planner, "plan", endless)
        task = asyncio.create_task(cluster.chat())
        await planning.wait()
        cluster.server.stop()
        error_of(await asyncio.wait_for(task, 10), 503, "cancelled")
