"""Workers that keep pages exactly beside workers that do not: who gets which request, and what the usage says."""

import asyncio
import json
from typing import get_args

import pytest

from kvrail.config.settings import WorkerSettings
from kvrail.runtime.queueing import FairQueue, Ticket
from kvrail.services.router.fleet.policy import WorkerState
from kvrail.text import Tokenizer
from kvrail.values.kv_cache import FORMS, suits
from tests.router.cluster import MODEL, OUTPUT, Cluster, run_cluster, status, until, write_output
from tests.router.scripts import dying, error_of, hanging
from tests.router.test_failover import prefer
from tests.router.test_invariant import computing, saying

HI = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 16},
}


async def keep(cluster: Cluster, *forms: str, **busy: int) -> None:
    """Have the decode workers keep these forms. busy: sequences that run on the worker of a form."""
    for worker, form in zip(cluster.decode, forms, strict=True):
        worker.status = status(kv_cache=form, running=busy.get(form, 0))
    workers = cluster.service.pool.decode
    await until(
        lambda: all(
            workers[each.target].kv_cache == form and workers[each.target].load().sequences == busy.get(form, 0)
            for each, form in zip(cluster.decode, forms, strict=True)
        )
    )


def told(answer) -> tuple[str, bool]:
    """The form of the pages, and whether they are exact."""
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]["kvrail"]
    return usage["kv_cache"], usage["exact"]


def asking(kv_cache: str) -> dict[str, object]:
    return {"kvrail": {"kv_cache": kv_cache}} if kv_cache else {}


def usages(events: str) -> list[dict[str, object]]:
    """Our part of every usage in a stream of any API."""
    data = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: {")]
    found = [json.loads(each) for each in data]
    all_usages = [each.get("usage") or each.get("response", {}).get("usage") for each in found]
    return [usage["kvrail"] for usage in all_usages if usage and "kvrail" in usage]


def test_what_suits_a_request():
    assert [form for form in FORMS if suits(form, "exact")] == ["plain", "lossless"]
    assert [form for form in FORMS if suits(form, "")] == list(FORMS)
    assert [form for form in FORMS if suits(form, "int4")] == ["int4"]
    assert not suits("", "exact")  # of a worker that has not said
    assert set(get_args(WorkerSettings.model_fields["kv_cache"].annotation)) <= set(FORMS)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("form", "exact"), [("lossless", True), ("int4", False)])
async def test_every_usage_says_what_pages_were_and_whether_they_were_exact(
    cluster: Cluster, path: str, form: str, exact: bool
):
    await keep(cluster, form)
    body = {"model": MODEL, **BODIES[path]}
    answer = await cluster.http.post(path, json=body)
    assert told(answer) == (form, exact)
    streamed = {"stream": True} | ({"stream_options": {"include_usage": True}} if "completions" in path else {})
    found = usages((await cluster.http.post(path, json=body | streamed)).text)
    assert [(each["kv_cache"], each["exact"]) for each in found] == [(form, exact)]
    assert {request.kv_cache for request in cluster.decode[0].requests} == {form}
    entry = (await cluster.http.get("/health")).json()["decode_workers"][cluster.decode[0].target]
    assert entry["kv_cache"] == form


@pytest.mark.parametrize("path", BODIES)
async def test_exact_pages_can_be_asked_for_in_every_api(tokenizer: Tokenizer, path: str):
    async with run_cluster(tokenizer, decode=2) as cluster:
        await keep(cluster, "int4", "plain", plain=5)
        lossy, exact = cluster.decode
        for kv_cache, worker in (("", lossy), ("exact", exact), ("plain", exact), ("int4", lossy)):
            worker.requests.clear()
            answer = await cluster.http.post(path, json={"model": MODEL, **BODIES[path], **asking(kv_cache)})
            assert told(answer) == (("plain", True) if worker is exact else ("int4", False))
            [request] = worker.requests
            assert request.exact == (kv_cache == "exact")
        answer = await cluster.http.post(path, json={"model": MODEL, **BODIES[path], **asking("int8")})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error.get("param", "kvrail.kv_cache") == "kvrail.kv_cache"
        assert "'int8' is not served here; decode workers keep their KV pages as int4 or plain" in error["message"]
        answer = await cluster.http.post(path, json={"model": MODEL, **BODIES[path], **asking("int3")})
        assert answer.status_code == 400 and "kvrail.kv_cache" in answer.json()["error"]["message"]


async def test_a_codec_that_loses_bits_is_not_exact_either(cluster: Cluster):
    async def lossy(worker, request):
        async for reply in write_output(worker, request):
            if reply.HasField("summary"):
                reply.summary.lossy = True
            yield reply

    cluster.decode[0].script = lossy
    assert told(await cluster.chat()) == ("plain", False)


@pytest.mark.parametrize(("after", "exact"), [(0, True), (2, False)])
async def test_bits_that_a_lost_workers_codec_took_are_told(tokenizer: Tokenizer, after: int, exact: bool):
    async with run_cluster(tokenizer, decode=2) as cluster:
        first, second = cluster.decode
        await prefer(cluster, first)

        async def lossy(worker, request):
            async for reply in dying(after)(worker, request):
                reply.lossy = True
                yield reply

        first.script = lossy
        answer = await cluster.chat()
        assert len(first.requests) == len(second.requests) == 1
        assert told(answer) == ("plain", exact)
        assert answer.json()["usage"]["kvrail"]["lossy"] is not exact


async def test_exact_and_indifferent_requests_at_once(tokenizer: Tokenizer):
    asked = ["", "exact", "int4", "", "exact", "lossless", "plain", "int8"] * 12
    async with run_cluster(tokenizer, decode=4, max_concurrent_requests=400, newcomer_share=0) as cluster:
        await keep(cluster, "int8", "plain", "int4", "lossless")
        answers = await asyncio.gather(
            *(cluster.chat(n=1 + number % 3, **asking(each)) for number, each in enumerate(asked))
        )
        for each, answer in zip(asked, answers, strict=True):
            form, exact = told(answer)
            assert suits(form, each) and exact == (form in ("plain", "lossless"))
            assert {choice["message"]["content"] for choice in answer.json()["choices"]} == {OUTPUT}
        assert all(
            request.kv_cache == form and (form in ("plain", "lossless") or not request.exact)
            for worker, form in zip(cluster.decode, ("int8", "plain", "int4", "lossless"), strict=True)
            for request in worker.requests
        )
        # Whoever does not mind goes everywhere.
        assert len({told(answer)[0] for each, answer in zip(asked, answers, strict=True) if not each}) > 1
        assert cluster.service.dispatcher.queue._waiting == {} and not cluster.service.dispatcher.queue._held


@pytest.mark.parametrize("kv_cache", ["", "exact"])
async def test_what_began_on_exact_pages_goes_on_on_exact_ones(tokenizer: Tokenizer, kv_cache: str):
    async with run_cluster(tokenizer, decode=3) as cluster:
        await keep(cluster, "plain", "int4", "lossless", int4=3, lossless=5)
        first, lossy, second = cluster.decode
        first.script = dying(2)
        assert told(await cluster.chat(**asking(kv_cache))) == ("plain,lossless", True)
        assert len(second.requests[0].resumed[0].token_ids) == 2 and not lossy.requests
        assert [request.exact for request in second.requests] == [bool(kv_cache)]


async def test_what_began_on_exact_pages_ends_where_there_are_no_more(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        await keep(cluster, "plain", "int4", int4=5)
        first, lossy = cluster.decode
        first.script = dying(2)
        error_of(await cluster.chat(), 503, "worker_unavailable")
        await until(lambda: cluster.service.pool.decode[first.target].state is WorkerState.HEALTHY)
        events = (await cluster.chat(stream=True)).text
        assert json.loads(events.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "worker_unavailable"
        assert not lossy.requests


async def test_what_has_not_begun_goes_anywhere(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        await keep(cluster, "plain", "int4", int4=5)
        first, lossy = cluster.decode
        first.script = dying(0)
        assert told(await cluster.chat()) == ("int4", False)
        assert not lossy.requests[0].resumed and lossy.requests[0].kv_cache == "int4"


async def test_what_began_on_lossy_pages_goes_on_anywhere_and_says_so(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        await keep(cluster, "int4", "plain", plain=5)
        lossy, exact = cluster.decode
        lossy.script = dying(2)
        answer = await cluster.chat()
        assert told(answer) == ("int4,plain", False)
        assert len(exact.requests[0].resumed[0].token_ids) == 2
        await until(lambda: cluster.service.pool.decode[lossy.target].state is WorkerState.HEALTHY)
        error_of(
            await cluster.chat(**asking("int4")), 503, "worker_unavailable"
        )  # but not where its form was asked for
        assert len(exact.requests) == 1


@pytest.mark.parametrize(
    ("forms", "alike"), [(("plain", "lossless"), True), (("int4", "int4"), True), (("int4", "plain"), False)]
)
async def test_bits_of_an_answer_are_any_workers_only_without_a_change_of_form(
    tokenizer: Tokenizer, forms: tuple[str, str], alike: bool
):
    async with run_cluster(tokenizer, decode=2) as cluster:
        for number, (worker, form) in enumerate(zip(cluster.decode, forms, strict=True)):
            worker.status = computing("aa", kv_cache=form, running=number)
        workers = cluster.service.pool.decode
        await until(lambda: all(workers[each.target].numerics == "aa" for each in cluster.decode))
        await until(lambda: workers[cluster.decode[1].target].load().sequences == 1)
        cluster.decode[0].script, cluster.decode[1].script = dying(2), saying("aa")
        usage = (await cluster.complete(prompt="the fox")).json()["usage"]["kvrail"]
        assert usage["kv_cache"] == ",".join(dict.fromkeys(forms)) and usage["invariant"] is alike


async def test_a_worker_dies_amid_a_mix(tokenizer: Tokenizer):
    asked = ["", "exact", "", "lossless", "exact", "int4"] * 8
    async with run_cluster(tokenizer, decode=3, max_concurrent_requests=400, newcomer_share=0) as cluster:
        await keep(cluster, "plain", "int4", "lossless")
        plain, lossy, lossless = cluster.decode
        deaths = []

        async def dies_at_times(worker, request):
            deaths.append(request)
            script = dying(len(deaths) % 4) if len(deaths) <= 6 else write_output
            async for reply in script(worker, request):
                yield reply

        plain.script = dies_at_times
        answers = await asyncio.gather(*(cluster.chat(**asking(each)) for each in asked))
        assert await cluster.metric("kvrail_failovers_total{}") >= 1
        for each, answer in zip(asked, answers, strict=True):
            form, exact = told(answer)
            assert answer.json()["choices"][0]["message"]["content"] == OUTPUT
            assert exact == ("int4" not in form)
            assert exact or each in ("", "int4")
        assert all(not request.resumed and not request.exact for request in lossy.requests)
        assert any(request.resumed for request in lossless.requests)


async def test_a_worker_that_has_come_back_with_other_pages_is_known_by_what_it_keeps(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        await keep(cluster, "plain", "lossless", lossless=5)
        assert told(await cluster.chat(**asking("exact"))) == ("plain", True)
        await keep(cluster, "int4", "lossless", lossless=5)
        assert told(await cluster.chat(**asking("exact"))) == ("lossless", True)
        error = error_of(await cluster.chat(**asking("plain")), 400, None)
        assert "decode workers keep their KV pages as int4 or lossless" in error


async def test_a_form_whose_workers_are_away_can_be_asked_for_again(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        await keep(cluster, "plain", "int4")
        plain = cluster.decode[0]
        plain.status = status(draining=True)
        await until(lambda: cluster.service.pool.decode[plain.target].state is WorkerState.DRAINING)
        error = error_of(await cluster.chat(**asking("exact")), 503, "worker_unavailable")
        assert "no decode worker that keeps KV pages as 'exact' takes requests now" in error
        assert told(await cluster.chat()) == ("int4", False)


async def test_prompts_that_wait_for_exact_pages_hold_up_no_others_of_their_client(tokenizer: Tokenizer):
    go_on = asyncio.Event()

    async def held(worker, request):
        await go_on.wait()
        async for reply in write_output(worker, request):
            yield reply

    async with run_cluster(tokenizer, decode=2, newcomer_share=0) as cluster:
        await keep(cluster, "plain", "int4")
        plain, _ = cluster.decode
        plain.script = held
        exact = [asyncio.create_task(cluster.chat(**asking("exact"))) for _ in range(12)]
        queue = cluster.service.dispatcher.queue
        await until(lambda: len(plain.requests) == 8 and len(queue) == 4)
        for _ in range(80):  # more than may pass one that finds no room where it could go
            assert told(await cluster.chat()) == ("int4", False)
        assert len(queue) == 4 and len(plain.requests) == 8
        go_on.set()
        assert [told(each) for each in await asyncio.gather(*exact)] == [("plain", True)] * 12


async def test_prompts_that_wait_for_exact_pages_end_with_the_last_such_worker(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2, newcomer_share=0) as cluster:
        await keep(cluster, "plain", "int4")
        plain, _ = cluster.decode
        plain.script = hanging()
        exact = [asyncio.create_task(cluster.chat(**asking("exact"))) for _ in range(10)]
        queue = cluster.service.dispatcher.queue
        await until(lambda: len(plain.requests) == 8 and len(queue) == 2)
        plain.status = status(draining=True)
        await until(lambda: sum(task.done() for task in exact) == 2)
        for task in exact:
            if task.done():
                error_of(task.result(), 503, "worker_unavailable")
        assert told(await cluster.chat()) == ("int4", False) and not len(queue)
        for task in exact:
            task.cancel()


async def test_an_unknown_form_takes_its_worker_out_by_name(cluster: Cluster):
    (fake,) = cluster.decode
    fake.status = status(kv_cache="int3")
    worker = cluster.service.pool.decode[fake.target]
    await until(lambda: worker.state is WorkerState.INCOMPATIBLE)
    assert "'int3'; known forms are plain, lossless, int8, int4, kvcomp, rot3" in worker.detail
    fake.status = status(kv_cache="int8")
    await until(lambda: worker.state is WorkerState.HEALTHY)
    assert told(await cluster.chat()) == ("int8", False)


async def test_placements_are_counted_by_form(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        await keep(cluster, "int4", "plain")
        for kv_cache, form, times in (("exact", "plain", 3), ("int4", "int4", 2)):
            for _ in range(times):
                await cluster.chat(**asking(kv_cache))
            series = f'kvrail_placements_total{{kv_cache="{form}",reason="load",role="decode"}}'
            assert await cluster.metric(series) == times


def test_a_lent_place_comes_back_where_it_is_of_use():
    queue = FairQueue(0.1)
    lent = [Ticket("greedy", 1, 1, lent=True) for _ in range(3)]
    for ticket in lent:
        queue.add(ticket)
        ticket.lent = True
        queue.granted(ticket)
    newcomer = Ticket("newcomer", 1, 1, kind="exact")
    assert queue.borrowed(newcomer) is lent[2]
    assert queue.borrowed(newcomer, lambda ticket: ticket is lent[0]) is lent[0]
    assert queue.borrowed(newcomer, lambda ticket: False) is None
