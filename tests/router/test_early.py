"""Streams whose headers leave before there is a token: what clients then read, and how a failure is told."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import httpx
import openai
import pytest

from kvrail.errors import OverloadedError, WorkerUnavailableError
from kvrail.text import Tokenizer
from tests.router.cluster import MODEL, OUTPUT, Cluster, run_cluster, until, write_output
from tests.router.naive import sglang_texts, vllm_texts
from tests.router.scripts import error_of, failing, hanging

HI = [{"role": "user", "content": "hi"}]
COMPLETION = {"model": MODEL, "prompt": "hi", "stream": True}


def late(release: asyncio.Event, then=write_output):
    """A worker that says nothing before `release`."""

    async def script(worker, request):
        await release.wait()
        async for reply in then(worker, request):
            yield reply

    return script


@asynccontextmanager
async def opened(cluster: Cluster, path: str = "/v1/chat/completions", **fields: object):
    """A stream's writes as they come, once its headers are here; the client reads no further than it is asked to."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(cluster.url.rpartition(":")[2]))
    asked = {"messages": HI} if path.endswith("chat/completions") else {"prompt": "hi"}
    body = json.dumps({"model": MODEL, "stream": True, **asked, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")

    async def writes() -> AsyncIterator[bytes]:
        while size := int(await reader.readline(), 16):
            yield (await reader.readexactly(size + 2))[:-2]

    yield writes()
    writer.close()


def contents(texts: list[str]) -> str:
    """The output that events bring."""
    assert texts[-1] == "[DONE]"
    choices = [json.loads(text)["choices"][0] for text in texts[:-1]]
    return "".join(each["delta"].get("content") or "" if "delta" in each else each["text"] for each in choices)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_no_byte_of_the_body_comes_before_the_first_event(tokenizer: Tokenizer, path: str):
    release = asyncio.Event()
    async with run_cluster(tokenizer, stream_head_s=0.01) as cluster:
        cluster.decode[0].script = late(release)
        async with opened(cluster, path) as writes:
            release.set()  # the headers are here, without it
            reads = [each async for each in writes]
    assert all(each.startswith(b"data: ") and each.endswith(b"\n\n") for each in reads)  # whole events
    for parse in (vllm_texts, sglang_texts):
        assert contents(parse(reads)) == contents(parse([b"".join(reads)])) == OUTPUT


async def test_a_long_silence_is_broken_by_what_no_parser_takes_for_an_event(tokenizer: Tokenizer):
    release, more = asyncio.Event(), asyncio.Event()

    async def script(worker, request):
        await release.wait()
        replies = write_output(worker, request)
        yield await anext(replies)
        await more.wait()
        async for reply in replies:
            yield reply

    async with run_cluster(tokenizer, stream_head_s=0.01, keep_alive_s=0.02) as cluster:
        cluster.decode[0].script = script
        async with opened(cluster) as writes:
            reads = [await anext(writes) for _ in range(3)]
            assert not b"".join(reads).strip()  # where nothing is to be seen there is no event and no comment
            release.set()
            while len(reads) < 4 or reads[-1].strip():
                reads.append(await anext(writes))
            more.set()
            reads += [each async for each in writes]
    for parse in (vllm_texts, sglang_texts):
        assert contents(parse(reads)) == OUTPUT


async def test_official_clients_read_a_late_stream(tokenizer: Tokenizer):
    release = asyncio.Event()
    async with (
        run_cluster(tokenizer, stream_head_s=0.01, keep_alive_s=0.01) as cluster,
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=cluster.url, api_key="unused", max_retries=0) as claude,
    ):
        cluster.decode[0].script = late(release)
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        message = await claude.messages.create(model=MODEL, messages=HI, max_tokens=50, stream=True)
        async with cluster.http.stream("POST", "/v1/completions", json=COMPLETION) as answer:
            await until(lambda: len(cluster.decode[0].requests) == 3)
            release.set()
            lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
        assert contents(lines) == OUTPUT
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == OUTPUT
        texts = [event.delta.text async for event in message if event.type == "content_block_delta"]
        assert "".join(texts) == OUTPUT


@pytest.mark.usefixtures("few_refusals")
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
            assert (answer.status_code, len(queue)) == (200, 1)
            rest = [line async for line in answer.aiter_lines() if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert len(queue) == 0
        for task in running:
            task.cancel()


@pytest.mark.usefixtures("few_refusals")
async def test_a_failure_before_the_headers_has_a_status(tokenizer: Tokenizer):
    async with run_cluster(tokenizer) as cluster:
        error_of(await cluster.chat(stream=True, logit_bias={"299999": 1}), 400, None)
        cluster.decode[0].script = failing(OverloadedError("full"))
        error_of(await cluster.chat(stream=True), 429, "overloaded")
        cluster.decode[0].script = failing(WorkerUnavailableError("gone"))
        error_of(await cluster.chat(stream=True), 503, "worker_unavailable")


@pytest.mark.usefixtures("few_refusals")
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
