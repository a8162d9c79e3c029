"""A client that asks for a stream and does not read it: its request ends, others do not notice."""

import asyncio
import json

import pytest

from kvrail.rpc import events
from kvrail.wire.v1 import decode_pb2
from tests.router.cluster import MODEL, OUTPUT, Cluster, until, write_output


async def flood(worker, request):
    if request.sampling.max_tokens != 99:
        async for reply in write_output(worker, request):
            yield reply
        return
    yield decode_pb2.GenerateReply(token_ids=[10], text="x")
    while True:
        yield decode_pb2.GenerateReply(text="x" * 4000)
        await asyncio.sleep(0)


async def test_a_client_that_does_not_read_is_given_up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events, "MAX_UNREAD_BYTES", 400_000)
    worker = cluster.decode[0]
    worker.script = flood
    port = int(cluster.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 99}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    reader._transport.pause_reading()
    while not worker.cancelled.is_set():
        answer = await cluster.chat()
        assert answer.json()["choices"][0]["message"]["content"] == OUTPUT
    await until(lambda: cluster.service.admission.active == 0)
    assert await cluster.metric('kvrail_requests_total{outcome="cancelled"}') == 1
    writer.close()
