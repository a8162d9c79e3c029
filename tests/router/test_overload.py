"""More than the workers take: the router holds it, in fair turns; nobody is lost, and who leaves is gone."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from kvrail.errors import InvalidRequestError, OverloadedError
from kvrail.runtime.queueing import Ticket
from kvrail.text import Tokenizer
from kvrail.wire.v1 import decode_pb2
from tests.router.cluster import MODEL, OUTPUT, Cluster, run_cluster, status, until, write_output
from tests.router.scripts import error_of, hanging

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


class Bounded:
    """A worker that refuses what goes beyond its bounds, as a real one does. waits: it answers once it has refused."""

    def __init__(self, most: int, *, waits: bool = False) -> None:
        self.most, self.running, self.refused, self.order = most, 0, 0, []
        self.answers = asyncio.Event()
        if not waits:
            self.answers.set()

    async def __call__(self, worker, request) -> AsyncIterator[decode_pb2.GenerateReply]:
        if self.running >= self.most:
            self.refused += 1
            self.answers.set()
            raise OverloadedError("full")
        self.running += 1
        self.order.append(list(request.prompt_token_ids))
        try:
            await self.answers.wait()
            async for reply in write_output(worker, request):
                yield reply
        finally:
            self.running -= 1


@asynccontextmanager
async def two_keys(tokenizer: Tokenizer, **settings: object) -> AsyncIterator[tuple[Cluster, dict, dict]]:
    """A cluster, and the headers of two clients."""
    async with run_cluster(tokenizer, api_keys=("first", "second"), **settings) as cluster:
        yield cluster, *({"Authorization": f"Bearer {key}"} for key in ("first", "second"))


async def test_many_at_once_through_the_official_client(tokenizer: Tokenizer):
    """One of the workers takes fewer than it says, so it refuses some."""
    async with run_cluster(tokenizer, decode=2) as cluster:
        workers = [Bounded(16), Bounded(2, waits=True)]
        for fake, bounded in zip(cluster.decode, workers, strict=True):
            fake.script = bounded
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused") as client:
            asked = [client.chat.completions.create(**CHAT) for _ in range(120)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
        assert Counter(type(answer).__name__ for answer in answers) == {"ChatCompletion": 120}
        assert all(answer.choices[0].message.content == OUTPUT for answer in answers)
        assert [bounded.refused > 0 for bounded in workers] == [False, True]
        assert await cluster.metric('kvrail_requests_total{outcome="stop"}') == 120
        assert await cluster.metric("kvrail_queue_prompts{}") == 0
        assert await cluster.metric("kvrail_queue_seconds_count{}") >= 120


async def test_a_flood_of_one_key_does_not_make_another_wait(tokenizer: Tokenizer):
    async with two_keys(tokenizer, max_concurrent_requests=400) as (cluster, greedy, modest):
        cluster.decode[0].script = hanging()
        body = {"model": MODEL, "prompt": [[number] for number in range(128)], "max_tokens": 5}
        flood = asyncio.create_task(cluster.http.post("/v1/completions", json=body, headers=greedy))
        await until(lambda: len(cluster.decode[0].requests) == 8)  # all places, of which one is lent
        assert await cluster.metric("kvrail_queue_prompts{}") == 120
        cluster.decode[0].script = write_output
        answer = await cluster.http.post("/v1/chat/completions", json=CHAT, headers=modest)
        assert answer.status_code == 200
        assert len(cluster.decode[0].requests) in (9, 10)  # the lent place was taken back, and is lent again
        text = (await cluster.http.get("/metrics")).text
        assert "first" not in text.replace("time_to_first", "").replace("first_token", "").replace("first token", "")
        refused = await cluster.http.post("/v1/completions", json=body | {"n": 2}, headers=greedy)
        error_of(refused, 429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await cluster.http.post("/v1/chat/completions", json=CHAT, headers=modest)).status_code == 200
        flood.cancel()
        await until(lambda: cluster.service.admission.active == 0)
        assert await cluster.metric("kvrail_queue_prompts{}") == 0
        assert len(cluster.service.dispatcher.queue) == 0


async def test_an_answer_whose_lent_place_is_taken_back_goes_on_where_it_stopped(tokenizer: Tokenizer):
    others_end, waiting = asyncio.Event(), []

    async def held(worker, request):
        """Three tokens; the rest when the test says so."""
        said = 0
        async for reply in write_output(worker, request):
            if said == 3 and not request.resumed:
                waiting.append(request)
                await others_end.wait()
            said += 1
            yield reply

    async with two_keys(tokenizer) as (cluster, greedy, modest):
        fake = cluster.decode[0]
        fake.script = held
        asked = [cluster.http.post("/v1/chat/completions", json=CHAT, headers=greedy) for _ in range(8)]
        flood = [asyncio.create_task(each) for each in asked]
        await until(lambda: len(waiting) == 8)
        await until(lambda: cluster.service.dispatcher.queue.borrowed(Ticket("modest", 1, 1)) is not None)
        await asyncio.sleep(0.2)  # all their tokens are here
        fake.script = write_output
        answer = await cluster.http.post("/v1/chat/completions", json=CHAT, headers=modest)
        assert answer.json()["choices"][0]["message"]["content"] == OUTPUT
        await until(lambda: any(task.done() for task in flood))
        [moved] = [task.result() for task in flood if task.done()]
        assert len(fake.requests[-1].resumed[0].token_ids) == 3
        others_end.set()
        answers = [moved, *await asyncio.gather(*(task for task in flood if not task.done()))]
        assert [each.json()["choices"][0]["message"]["content"] for each in answers] == [OUTPUT] * 8
        assert await cluster.metric("kvrail_failovers_total{}") == 0


@pytest.mark.parametrize("lacks_summary", [False, True])
async def test_an_answer_that_is_whole_keeps_its_end_if_its_lent_place_is_taken_back(
    tokenizer: Tokenizer, lacks_summary: bool
):
    """A worker refuses to resume what has ended."""
    go_on = asyncio.Event()

    async def held(worker, request):
        if any(each.ended for each in request.resumed):
            raise InvalidRequestError("1 sequences (1 ended) cannot be resumed with n 1")
        async for reply in write_output(worker, request):
            if lacks_summary and reply.HasField("summary"):
                await go_on.wait()
            yield reply
        await go_on.wait()

    async with two_keys(tokenizer) as (cluster, greedy, modest):
        fake = cluster.decode[0]
        fake.script = held
        asked = [cluster.http.post("/v1/chat/completions", json=CHAT, headers=greedy) for _ in range(8)]
        flood = [asyncio.create_task(each) for each in asked]
        await until(lambda: len(fake.requests) == 8)
        await until(lambda: cluster.service.dispatcher.queue.borrowed(Ticket("modest", 1, 1)) is not None)
        await asyncio.sleep(0.2)  # all their tokens are here
        last = asyncio.create_task(cluster.http.post("/v1/chat/completions", json=CHAT, headers=modest))
        await until(lambda: len(fake.requests) == 9)
        go_on.set()
        for answer in await asyncio.gather(*flood, last):
            assert answer.json()["choices"][0]["message"]["content"] == OUTPUT


async def test_who_leaves_the_queue_is_gone_and_a_deadline_bounds_it(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, newcomer_share=0, request_timeout_s=2.0) as cluster:
        cluster.decode[0].script = hanging()
        running = [asyncio.create_task(cluster.chat()) for _ in range(8)]
        await until(lambda: len(cluster.decode[0].requests) == 8)
        leaving, staying = asyncio.create_task(cluster.chat()), asyncio.create_task(cluster.chat(stream=True))
        queue = cluster.service.dispatcher.queue
        await until(lambda: len(queue) == 2)
        leaving.cancel()
        await until(lambda: len(queue) == 1)
        assert await cluster.metric("kvrail_queue_prompts{}") == 1
        error_of(await staying, 504, "deadline_exceeded")
        assert len(queue) == 0
        assert await cluster.metric("kvrail_queue_prompts{}") == 0
        for task in running:
            error_of(await task, 504, "deadline_exceeded")
        cluster.decode[0].script = write_output
        assert (await cluster.chat()).status_code == 200


async def test_a_drain_serves_what_waits_and_its_end_says_so(tokenizer: Tokenizer):
    go_on = asyncio.Event()

    async def slow(worker, request):
        await go_on.wait()
        async for reply in write_output(worker, request):
            yield reply

    for finishes in (True, False):
        async with run_cluster(tokenizer, newcomer_share=0) as cluster:
            cluster.decode[0].script = slow
            go_on.clear()
            asked = [asyncio.create_task(cluster.chat()) for _ in range(12)]
            await until(lambda: len(cluster.service.dispatcher.queue) == 4)
            cluster.server.stop()
            error_of(await cluster.chat(), 503, "worker_unavailable")
            if finishes:
                go_on.set()
                assert [(await task).status_code for task in asked] == [200] * 12
            else:
                cluster.server.stop()
                for task in asked:
                    error_of(await task, 503, "cancelled")


async def test_without_any_worker_nobody_waits(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, newcomer_share=0) as cluster:
        cluster.decode[0].script = hanging()
        asked = [asyncio.create_task(cluster.chat()) for _ in range(12)]
        await until(lambda: len(cluster.service.dispatcher.queue) == 4)
        pool = cluster.service.pool
        cluster.decode[0].hung = True
        pool.lost(pool.decode[cluster.decode[0].target], "gone")
        await until(lambda: sum(task.done() for task in asked) == 4)
        for task in asked:
            if task.done():
                error_of(task.result(), 503, "worker_unavailable")
            task.cancel()


async def test_priorities_are_for_those_who_may(tokenizer: Tokenizer):
    async with run_cluster(tokenizer) as cluster:
        refused = await cluster.complete(priority=-1)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
        assert (await cluster.complete(priority=0)).status_code == 200
    async with run_cluster(tokenizer, newcomer_share=0, priorities=True) as cluster:
        cluster.decode[0].script = hanging()
        running = [asyncio.create_task(cluster.complete()) for _ in range(8)]
        await until(lambda: len(cluster.decode[0].requests) == 8)
        asked: list[asyncio.Task[httpx.Response]] = []
        for number, priority in enumerate((5, 0, -5, 0)):
            asked.append(asyncio.create_task(cluster.complete(prompt=[number], priority=priority)))
            await until(lambda: len(cluster.service.dispatcher.queue) == len(asked))
        cluster.decode[0].script = bounded = Bounded(8)
        running[0].cancel()  # one place, so one after the other
        assert [(await task).status_code for task in asked] == [200] * 4
        assert bounded.order == [[2], [1], [3], [0]]
        for task in running:
            task.cancel()


async def test_priorities_pass_through_every_api(tokenizer: Tokenizer):
    asked = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": {"model": MODEL, "prompt": "hi"},
        "/v1/responses": {"model": MODEL, "input": "hi"},
        "/v1/messages": CHAT | {"max_tokens": 5},
    }
    async with run_cluster(tokenizer) as cluster:
        for path, body in asked.items():
            refused = await cluster.http.post(path, json=body | {"priority": 3})
            assert refused.status_code == 400, path
            assert refused.json()["error"]["message"].startswith("priority: is 3, but this server takes none"), path
    async with run_cluster(tokenizer, newcomer_share=0, priorities=True) as cluster:
        cluster.decode[0].script = hanging()
        running = [asyncio.create_task(cluster.complete()) for _ in range(8)]
        await until(lambda: len(cluster.decode[0].requests) == 8)
        dispatcher = cluster.service.dispatcher
        for number, (path, body) in enumerate(asked.items()):
            running.append(asyncio.create_task(cluster.http.post(path, json=body | {"priority": -number})))
            await until(lambda: len(dispatcher.queue) == len(running) - 8)
        assert [ticket.priority for ticket in dispatcher._turns] == [0, -1, -2, -3]
        for task in running:
            task.cancel()


async def test_a_key_is_one_client_however_it_comes(tokenizer: Tokenizer):
    async with two_keys(tokenizer, newcomer_share=0) as (cluster, first, second):
        cluster.decode[0].script = hanging()

        def ask(headers: dict) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(cluster.http.post("/v1/chat/completions", json=CHAT, headers=headers))

        asked = [ask(first) for _ in range(8)]
        await until(lambda: len(cluster.decode[0].requests) == 8)
        queue = cluster.service.dispatcher.queue
        asked += [ask(first), ask({"X-Api-Key": "first"})]
        await until(lambda: len(queue) == 2)
        assert queue.clients == 1
        asked += [ask({"X-Api-Key": "second"}), ask(second)]
        await until(lambda: len(queue) == 4)
        assert queue.clients == 2
        for task in asked:
            task.cancel()


async def test_what_a_worker_refuses_goes_before_the_others(tokenizer: Tokenizer):
    async with run_cluster(tokenizer) as cluster:
        fake, seen, refuse = cluster.decode[0], [], asyncio.Event()
        fake.status = status(max_running=1)
        await until(lambda: cluster.service.pool.decode[fake.target].load().max_running == 1)

        async def refuses_once(worker, request):
            seen.append(request.prompt_token_ids[0])
            if seen == [1]:
                await refuse.wait()
                raise OverloadedError("full")
            async for reply in write_output(worker, request):
                yield reply

        fake.script = refuses_once
        asked = [asyncio.create_task(cluster.complete(prompt=[1]))]
        await until(lambda: seen == [1])
        for number in (2, 3):
            asked.append(asyncio.create_task(cluster.complete(prompt=[number])))
            await until(lambda: len(cluster.service.dispatcher.queue) == len(asked) - 1)
        refuse.set()
        assert [(await task).status_code for task in asked] == [200] * 3
        assert seen == [1, 1, 2, 3]


async def test_a_prompt_that_waits_too_long_for_a_prefill_worker_is_computed_by_a_decode_worker(tokenizer: Tokenizer):
    """All at once: one is computed, one that waited is sent without prefill workers; then nobody has time."""
    async with run_cluster(tokenizer, prefill_wait_s=0.2, status_interval_s=60) as cluster:
        for fake in (*cluster.decode, *cluster.prefill):
            fake.status.max_batch_tokens, fake.status.step_cost.prefill_each = 1, 1e-6
        for each in cluster.service.pool.workers:
            await each.ask()
        decode = cluster.decode[0]
        decode.script = hanging()
        began = asyncio.get_running_loop().time()
        asked = [asyncio.create_task(cluster.chat()) for _ in range(3)]
        await until(lambda: len(decode.requests) == 2)
        assert asyncio.get_running_loop().time() - began > 0.19
        assert [bool(request.prefill_workers) for request in decode.requests] == [True, False]
        assert await cluster.metric('kvrail_placements_total{kv_cache="plain",reason="overflow",role="decode"}') == 1
        await asyncio.sleep(0.5)
        assert len(decode.requests) == 2
        for each in asked:
            each.cancel()
        await asyncio.wait(asked)
        await until(lambda: not cluster.service.pool.decode[next(iter(cluster.service.pool.decode))].backlog)
        decode.script = write_output
        assert (await cluster.chat()).status_code == 200
        assert decode.requests[-1].prefill_workers
