"""Decode workers that are lost: the request goes on elsewhere, on the same weights, and does not visit them all."""

import json

import pytest

from kvrail.errors import OverloadedError, WorkerUnavailableError
from kvrail.runtime import breaker
from kvrail.services.router.fleet import worker as one_worker
from kvrail.services.router.fleet import workers
from kvrail.services.router.fleet.policy import PlacementRequest
from kvrail.text import Tokenizer
from kvrail.wire.v1 import common_pb2
from tests.router.cluster import CONTEXT, MODEL, OUTPUT, VOCABULARY, run_cluster, status, until, write_output
from tests.router.scripts import able_prefill, dying, error_of, failing, hanging


def of_weights(fingerprint: str) -> common_pb2.WorkerStatus:
    """The answer of a worker that has loaded these."""
    return status(
        model=common_pb2.ModelInfo(name=MODEL, fingerprint=fingerprint, vocab_size=VOCABULARY, max_model_len=CONTEXT)
    )


async def prefer(cluster, first) -> None:
    """Have `first` asked before the other decode workers."""
    for worker in cluster.decode:
        if worker is not first:
            worker.status = status(running=5)
    pool = cluster.service.pool
    others = [worker.target for worker in cluster.decode if worker is not first]
    await until(
        lambda: (
            len(pool.healthy_decode()) == len(cluster.decode)
            and all(pool.decode[target].load().sequences == 5 for target in others)
        )
    )


async def test_failover_to_another_worker(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        broken, sound = cluster.decode
        sound.status = status(running=5)  # so that the broken one is asked first
        await until(lambda: cluster.service.pool.decode[sound.target].load().sequences == 5)
        for error in (WorkerUnavailableError("gone"), OverloadedError("full")):
            await until(lambda: len(cluster.service.pool.healthy_decode()) == 2)
            broken.script = failing(error)
            broken.requests.clear()
            answer = await cluster.chat()
            assert answer.json()["choices"][0]["message"]["content"] == OUTPUT
            assert len(broken.requests) == 1
        assert await cluster.metric("kvrail_failovers_total{}") == 1  # who had no room was not lost
        await until(lambda: not cluster.service.pool.decode[broken.target].refused)


@pytest.mark.parametrize("after", [1, 2])
async def test_a_worker_lost_in_mid_stream_leaves_no_seam(tokenizer: Tokenizer, after: int):
    async with run_cluster(tokenizer, decode=2) as cluster:
        broken, sound = cluster.decode
        sound.status = status(running=5)
        await until(lambda: cluster.service.pool.decode[sound.target].load().sequences == 5)
        broken.script = dying(after)
        answer = await cluster.chat(stream=True, stream_options={"include_usage": True})
        chunks = [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n")[:-2]]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == OUTPUT
        ids = tokenizer.encode(OUTPUT, add_special_tokens=False)
        assert [list(each.token_ids) for each in sound.requests[0].resumed] == [ids[:after]]
        assert chunks[-1]["usage"]["completion_tokens"] == len(ids)
        assert await cluster.metric("kvrail_failovers_total{}") == 1


@pytest.mark.parametrize("after", [1, 2, 5, -1])
async def test_several_sequences_of_a_lost_worker_go_on_where_each_was(tokenizer: Tokenizer, after: int):
    ids = tokenizer.encode(OUTPUT, add_special_tokens=False)
    replies = after % (3 * len(ids))  # of one token each, of the three in turns; -1: all but the last one
    async with run_cluster(tokenizer, decode=2) as cluster:
        broken, sound = cluster.decode
        await prefer(cluster, broken)
        broken.script = dying(replies)
        answer = (await cluster.chat(n=3)).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == [OUTPUT] * 3
        assert answer["usage"]["completion_tokens"] == 3 * len(ids)
        told = [len(range(index, replies, 3)) for index in range(3)]
        (request,) = sound.requests
        assert [list(each.token_ids) for each in request.resumed] == [ids[:count] for count in told]
        assert [each.ended for each in request.resumed] == [count == len(ids) for count in told]
        assert await cluster.metric("kvrail_failovers_total{}") == 1


async def test_a_worker_lost_after_the_last_token_changes_nothing(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        broken, sound = cluster.decode
        sound.status = status(running=5)
        await until(lambda: cluster.service.pool.decode[sound.target].load().sequences == 5)
        count = len(tokenizer.encode(OUTPUT, add_special_tokens=False))
        broken.script = dying(count)
        answer = await cluster.chat()
        assert answer.json()["choices"][0]["message"]["content"] == OUTPUT and not sound.requests


async def test_worker_with_other_weights_is_refused(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture):
    async with run_cluster(tokenizer, decode=2) as cluster:
        odd = cluster.decode[0]
        odd.status = status(
            model=common_pb2.ModelInfo(name=MODEL, fingerprint="0" * 64, vocab_size=VOCABULARY, max_model_len=CONTEXT)
        )
        await until(lambda: cluster.service.pool.decode[odd.target].state == "incompatible")
        assert "fingerprint" in (await cluster.http.get("/health")).json()["decode_workers"][odd.target]["detail"]
        assert any(record.levelname == "ERROR" and odd.target in record.message for record in caplog.records)
        for _ in range(4):
            assert (await cluster.chat()).status_code == 200
        assert odd.requests == []


async def test_who_came_back_meanwhile_can_take_over(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        first, second = cluster.decode
        pool = cluster.service.pool
        second.status = status(draining=True)
        await until(lambda: [worker.target for worker in pool.healthy_decode()] == [first.target])

        async def dies_later(worker, request):
            async for reply in dying(2)(worker, request):
                yield reply
                if first.requests[-1] is request and second.status.draining:
                    second.status = status()
                    await until(lambda: len(pool.healthy_decode()) == 2)

        first.script = dies_later
        answer = await cluster.chat()
        assert answer.json()["choices"][0]["message"]["content"] == OUTPUT
        assert len(second.requests) == 1


async def test_a_request_moves_twice_at_most(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=5) as cluster:
        for worker in cluster.decode:
            worker.script = dying(1)
        error_of(await cluster.chat(), 503, "worker_unavailable")
        assert sum(len(worker.requests) for worker in cluster.decode) == 3


async def test_nothing_is_continued_on_other_weights(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        first, second = cluster.decode
        pool, old, new = cluster.service.pool, "f" * 64, "a" * 64
        await prefer(cluster, first)

        async def upgraded(worker, request):
            async for reply in dying(2)(worker, request):
                yield reply
                if pool.fingerprint == old:
                    first.status = second.status = of_weights(new)
                    await until(lambda: pool.fingerprint == new)

        first.script = upgraded
        assert "other weights" in error_of(await cluster.chat(), 503, "worker_unavailable")
        assert first.requests[0].model_fingerprint == old and not second.requests
        first.script = write_output
        await until(lambda: pool.healthy)
        assert (await cluster.chat()).status_code == 200  # what has not begun goes where it can
        assert [request.model_fingerprint for worker in cluster.decode for request in worker.requests][-1] == new


async def test_new_prefill_workers_do_not_stop_the_cluster(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=1, prefill=3) as cluster:
        for worker in cluster.prefill:
            worker.status = of_weights("a" * 64)
        await until(lambda: able_prefill(cluster.service.pool) == [])
        assert (await cluster.chat()).status_code == 200
        cluster.decode[0].status = of_weights("a" * 64)
        await until(lambda: len(able_prefill(cluster.service.pool)) == 3)
        assert (await cluster.chat()).status_code == 200


async def test_a_prefill_worker_of_other_pages_is_not_asked(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=1, prefill=1) as cluster:
        cluster.prefill[0].status = status(layout=common_pb2.KVLayout(page_size=32))
        cluster.decode[0].status = status(layout=common_pb2.KVLayout(page_size=16))

        async def told() -> dict[str, str]:
            (entry,) = (await cluster.http.get("/health")).json()["prefill_workers"].values()
            return entry

        async def asked_both() -> bool:
            return "page_size 32, decode workers of 16" in (await told()).get("detail", "")

        await until(asked_both)
        assert (await told())["state"] == "incompatible"
        assert able_prefill(cluster.service.pool) == []


async def test_what_runs_on_a_worker_that_hangs_goes_on_elsewhere(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(workers, "GIVEN_UP_S", 0.5)
    monkeypatch.setattr(one_worker, "STATUS_TIMEOUT_S", 0.2)
    async with run_cluster(tokenizer, decode=2) as cluster:
        first, second = cluster.decode
        await prefer(cluster, first)
        began = []

        async def hangs(worker, request):
            first.hung = True
            async for reply in write_output(worker, request):
                yield reply
                began.append(reply)
                if len(began) == 2:
                    async for never in hanging()(worker, request):
                        yield never

        first.script = hangs
        answer = await cluster.chat()
        assert answer.json()["choices"][0]["message"]["content"] == OUTPUT
        assert len(second.requests[0].resumed[0].token_ids) == 2


async def test_a_worker_that_fails_all_it_is_asked_is_left_alone_and_tried_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(breaker, "LONGEST_PAUSE_S", 600.0)
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 600.0)
    async with run_cluster(tokenizer, decode=2) as cluster:
        broken = cluster.decode[0]
        await prefer(cluster, broken)
        broken.script = failing(WorkerUnavailableError("something is wrong here"))
        pool = cluster.service.pool
        for number in range(breaker.FAILURES):
            await until(lambda: pool.policy.rank(PlacementRequest(1), pool.candidates()[0])[0].target == broken.target)
            assert (await cluster.chat()).json()["choices"][0]["message"]["content"] == OUTPUT
            assert len(broken.requests) == number + 1
        await until(lambda: pool.decode[broken.target].state == "failing")
        told = (await cluster.http.get("/health")).json()
        assert told["status"] == "degraded"
        assert "failed 3 requests in a row" in told["decode_workers"][broken.target]["detail"]
        assert (await cluster.chat()).status_code == 200
        assert len(broken.requests) == breaker.FAILURES
        broken.script = write_output
        pool.decode[broken.target].breaker._tries_again_at = 0.0  # the pause is over: half open
        await until(lambda: pool.decode[broken.target].state == "healthy")
        await prefer(cluster, broken)
        assert (await cluster.chat()).status_code == 200
        assert len(broken.requests) == breaker.FAILURES + 1
        assert pool.decode[broken.target].breaker.closed


async def test_a_worker_that_was_started_anew_owes_nothing(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        broken = cluster.decode[0]
        pool = cluster.service.pool
        worker = pool.decode[broken.target]
        for _ in range(9):
            worker.breaker.failed(worker.breaker.begin())
        await until(lambda: worker.state == "failing")
        broken.status = status(instance=7)
        await until(lambda: worker.state == "healthy")
        assert worker.breaker.closed


async def test_the_only_worker_is_asked_though_it_fails(tokenizer: Tokenizer):
    async with run_cluster(tokenizer) as cluster:
        (only,) = cluster.decode
        worker = cluster.service.pool.decode[only.target]
        for _ in range(9):
            worker.breaker.failed(worker.breaker.begin())
        await until(lambda: worker.state == "failing")
        assert (await cluster.chat()).json()["choices"][0]["message"]["content"] == OUTPUT
        assert worker.breaker.closed


async def test_a_request_of_weights_that_are_gone_takes_no_worker_out(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        first, second = cluster.decode
        pool = cluster.service.pool
        await prefer(cluster, first)

        async def dies_on_old_weights(worker, request):
            async for reply in dying(1)(worker, request):
                yield reply
                second.status = of_weights("1" * 64)
                first.status = of_weights("1" * 64)
                await until(lambda: pool.fingerprint == "1" * 64)

        first.script = dies_on_old_weights
        events = (await cluster.chat(stream=True)).text.split("\n\n")
        assert "other weights" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
        assert not second.requests
        assert pool.decode[second.target].state == "healthy"
