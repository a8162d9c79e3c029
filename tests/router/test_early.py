"""Streams that speak before there is a token: headers, comments, and how a failure is told before and after."""

import asyncio
import json

import httpx
import openai
import pytest

from kvrail.errors import OverloadedError, WorkerUnavailableError
from kvrail.text import Tokenizer
from tests.router.cluster import MODEL, OUTPUT, run_cluster, until, write_output
from tests.router.scripts import error_of, failing, hanging

HI = [{"role": "user", "content": "hi"}]


def late(release: asyncio.Event, then=write_output):
    """A worker that says nothing before `release`."""

    async def script(worker, request):
        await release.wait()
        async for reply in then(worker, request):
            yield reply

    return script


async def test_headers_and_comments_come_before_the_first_token(tokenizer: Tokenizer):
    release = asyncio.Event()
    async with run_cluster(tokenizer, stream_head_s=0.01, keep_alive_s=0.02) as cluster:
        cluster.decode[0].script = late(release)
        body = {"model": MODEL, "messages": HI, "stream": True}
        async with cluster.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            for _ in range(3):  # one with the headers, the others because nothing is to say
                assert (await anext(lines)).startswith(":")
                assert await anext(lines) == ""
            release.set()
            rest = [line async for line in lines if line and not line.startswith(":")]
        assert rest[-1] == "data: [DONE]"
        texts = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") for line in rest[:-1]]
        assert "".join(text or "" for text in texts) == OUTPUT


async def test_the_official_client_skips_comments(tokenizer: Tokenizer):
    release = asyncio.Event()
    async with (
        run_cluster(tokenizer, stream_head_s=0.01, keep_alive_s=0.01) as cluster,
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        cluster.decode[0].script = late(release)
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        await until(lambda: bool(cluster.decode[0].requests))
        release.set()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == OUTPUT


async def test_a_failure_after_the_headers_is_an_event(tokenizer: Tokenizer):
    release = asyncio.Event()
    async with (
        run_cluster(tokenizer, stream_head_s=0.01) as cluster,
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        cluster.decode[0].script = late(release, failing(OverloadedError("full")))
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        assert stream.response.status_code == 200
        release.set()
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert (caught.value.code, caught.value.type) == ("overloaded", "rate_limit_error")
        assert await cluster.metric('kvrail_requests_total{outcome="overloaded"}') == 1


async def test_headers_do_not_wait_for_a_turn(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, newcomer_share=0, stream_head_s=0.01, request_timeout_s=2.0) as cluster:
        cluster.decode[0].script = hanging()
        running = [asyncio.create_task(cluster.chat()) for _ in range(8)]
        await until(lambda: len(cluster.decode[0].requests) == 8)
        queue = cluster.service.dispatcher.queue
        body = {"model": MODEL, "messages": HI, "stream": True}
        async with cluster.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert (answer.status_code, await anext(lines), len(queue)) == (200, ": waiting", 1)
            rest = [line async for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert len(queue) == 0
        for task in running:
            task.cancel()


async def test_a_failure_before_the_headers_has_a_status(tokenizer: Tokenizer):
    async with run_cluster(tokenizer) as cluster:
        error_of(await cluster.chat(stream=True, logit_bias={"299999": 1}), 400, None)
        cluster.decode[0].script = failing(OverloadedError("full"))
        error_of(await cluster.chat(stream=True), 429, "overloaded")
        cluster.decode[0].script = failing(WorkerUnavailableError("gone"))
        error_of(await cluster.chat(stream=True), 503, "worker_unavailable")


async def test_a_whole_answer_waits(tokenizer: Tokenizer):
    release = asyncio.Event()
    async with run_cluster(tokenizer, stream_head_s=0.001, keep_alive_s=0.001) as cluster:
        cluster.decode[0].script = late(release, failing(OverloadedError("full")))
        asking = asyncio.create_task(cluster.chat())
        await until(lambda: bool(cluster.decode[0].requests))
        await asyncio.sleep(0.05)
        release.set()
        answer: httpx.Response = await asking
        error_of(answer, 429, "overloaded")
