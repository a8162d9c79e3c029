"""Clients that stop in the middle, or say where a request ends in two ways: refused, and nobody else notices."""

import asyncio
import json
import socket

import pytest

from kvrail.services.router.http import bodies
from kvrail.services.router.http.connection import MAX_PIPELINED, PIECE_BYTES
from kvrail.text import Tokenizer
from kvrail.wire.v1 import decode_pb2
from tests.router.cluster import MODEL, OUTPUT, Cluster, run_cluster, until
from tests.router.scripts import hanging

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = json.dumps({"model": MODEL, "prompt": "x"}).encode()
LENGTH = b"content-length: %d\r\n\r\n" % len(BODY)
CHUNKED_HEAD = b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"
LORIS = 200


async def connect(cluster: Cluster):
    return await asyncio.open_connection("127.0.0.1", int(cluster.url.rpartition(":")[2]))


async def said(cluster: Cluster, *parts: bytes) -> tuple[int, dict]:
    """What a client is answered that sends these parts and waits until the connection ends: status and error."""
    reader, writer = await connect(cluster)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.02)
    answer = await reader.read()
    writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(content)["error"]


@pytest.mark.parametrize(
    ("parts", "status", "told"),
    [
        ([b""], 408, "headers"),
        ([HEAD], 408, "headers"),
        ([b"\r\n\r\n", b"\r\n"], 408, "headers"),
        ([HEAD + LENGTH], 408, "body"),
        ([HEAD + LENGTH, BODY[:9], BODY[9:12]], 408, "body"),
        ([HEAD + b"transfer-encoding: chunked\r\n\r\n", b"9\r\n" + BODY[:9] + b"\r\n"], 408, "body"),
        ([HEAD + b"x: " + b"y" * 90_000, b"y" * 90_000], 431, "headers"),
        ([HEAD + b"x: " + b"y" * 70_000 + b"\r\n" + LENGTH + BODY], 431, "headers"),  # in one piece
        ([HEAD + CHUNKED_HEAD + b"0\r\nx: ", *[b"y" * 22_000] * 3], 431, "headers"),
        ([HEAD + CHUNKED_HEAD + b"0\r\n", *[b"x: yyyy\r\n" * 2_444] * 3], 431, "headers"),
        ([HEAD + CHUNKED_HEAD + b"1;x=", *[b"y" * 22_000] * 3], 431, "headers"),
        ([HEAD + b"content-length: 1000000000000\r\n\r\n"], 413, "larger"),
        ([HEAD + b"expect: 100-continue\r\ncontent-length: 9000000\r\n\r\n"], 413, "larger"),
        ([HEAD + b"transfer-encoding: chunked\r\n" + LENGTH + b"0\r\n\r\n"], 400, "Content-Length can't be present"),
        (
            [HEAD + b"content-length: 12\r\ntransfer-encoding: chunked\r\n\r\n"],
            400,
            "Transfer-Encoding can't be present",
        ),
        ([HEAD + b"content-length: 12\r\n" + LENGTH + BODY], 400, "Duplicate Content-Length"),
        ([HEAD + b"content-length: 1e2\r\n\r\n" + BODY], 400, "HTTP"),
        ([HEAD + b"content-length: -1\r\n\r\n" + BODY], 400, "HTTP"),
        ([HEAD + b"transfer-encoding: gzip\r\n\r\n" + BODY], 400, "HTTP"),
        ([b"\x16\x03\x01 this is TLS\r\n\r\n"], 400, "HTTP"),
        ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], 400, "HTTP"),
        ([b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n"], 400, "HTTP"),
        ([b"GET http://[bad HTTP/1.1\r\nhost: x\r\n\r\n"], 400, "invalid url"),
        ([b"GET /v1/\x00models HTTP/1.1\r\nhost: x\r\n\r\n"], 400, "HTTP"),
    ],
)
async def test_what_is_unfinished_or_ambiguous_is_refused(tokenizer: Tokenizer, parts, status, told):
    async with run_cluster(tokenizer, client_timeout_s=0.3 if status == 408 else 5) as cluster:
        found, error = await said(cluster, *parts)
        assert (found, error["type"]) == (status, "invalid_request_error")
        assert told in error["message"]
        await until(lambda: not cluster.server.server_state.connections)
        assert (await cluster.chat()).status_code == 200


@pytest.mark.parametrize("version", [b"1.0", b"0.9"])
@pytest.mark.parametrize("stream", [True, False])
async def test_http_before_1_1_gets_no_chunks(cluster: Cluster, version: bytes, stream: bool):
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": stream}).encode()
    reader, writer = await connect(cluster)
    writer.write(HEAD.replace(b"1.1", version) + b"content-length: %d\r\n\r\n" % len(body) + body)
    head, _, content = (await reader.read()).partition(b"\r\n\r\n")  # until the connection ends
    writer.close()
    assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head.lower()
    assert b"transfer-encoding" not in head.lower()
    if stream:
        events = [event.removeprefix(b"data: ") for event in content.split(b"\n\n")]
        assert events[-2:] == [b"[DONE]", b""]
        texts = [json.loads(event)["choices"][0]["text"] for event in events[:-2]]
        assert "".join(texts) == OUTPUT
    else:
        assert b"content-length: %d" % len(content) in head.lower()
        assert json.loads(content)["choices"][0]["text"] == OUTPUT


async def test_a_slow_body_that_goes_on_is_waited_for(tokenizer: Tokenizer):
    body = json.dumps({"model": MODEL, "prompt": "x", "user": "a" * 1000, "metadata": "b" * 90_000}).encode()
    async with run_cluster(tokenizer, client_timeout_s=0.3) as cluster:
        reader, writer = await connect(cluster)
        writer.write(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
        for begin in range(0, len(body), 8192):  # 91 KB bring another second and a half
            writer.write(body[begin : begin + 8192])
            await asyncio.sleep(0.05)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_request_that_waits_for_its_answer_has_no_deadline_of_a_connection(tokenizer: Tokenizer):
    async def slow(worker, request):
        await asyncio.sleep(1)
        yield decode_pb2.GenerateReply(token_ids=[10], text="x", finish_reason=decode_pb2.FINISH_REASON_STOP)
        yield decode_pb2.GenerateReply(summary=decode_pb2.GenerateSummary(prompt_tokens=1, completion_tokens=1))

    async with run_cluster(tokenizer, client_timeout_s=0.2) as cluster:
        cluster.decode[0].script = slow
        reader, writer = await connect(cluster)
        writer.write(HEAD + LENGTH + BODY + b"POST /v1")  # the next request has begun already
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_client_that_reads_nothing_loses_its_place(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture):
    async def much(worker, request):
        for _ in range(request.sampling.max_tokens):
            yield decode_pb2.GenerateReply(token_ids=[10], text="x" * 80_000)
            await asyncio.sleep(0.001)

    async with run_cluster(tokenizer, client_timeout_s=0.3) as cluster:
        worker = cluster.decode[0]
        worker.script = much
        reading = socket.create_connection(("127.0.0.1", int(cluster.url.rpartition(":")[2])))
        body = json.dumps({"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 500}).encode()
        reading.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: cluster.service.admission.active == 1)
        await until(lambda: cluster.service.admission.active == 0)
        await worker.cancelled.wait()
        await until(lambda: not cluster.server.server_state.connections)
        assert "a client read too little in " in caplog.text
        reading.close()


async def test_a_client_that_reads_slowly_gets_all_of_a_long_answer(tokenizer: Tokenizer):
    async def long(worker, request):
        for _ in range(199):
            yield decode_pb2.GenerateReply(token_ids=[10], text="x" * 80_000)
            await asyncio.sleep(0.001)
        yield decode_pb2.GenerateReply(token_ids=[10], text="y", finish_reason=decode_pb2.FINISH_REASON_STOP)
        yield decode_pb2.GenerateReply(summary=decode_pb2.GenerateSummary(prompt_tokens=1, completion_tokens=200))

    async with run_cluster(tokenizer, client_timeout_s=0.3) as cluster:
        cluster.decode[0].script = long
        with socket.create_connection(("127.0.0.1", int(cluster.url.rpartition(":")[2]))) as reading:
            body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 200}).encode()
            reading.sendall(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            reading.setblocking(False)
            got = b""
            while part := await asyncio.get_running_loop().sock_recv(reading, 1 << 18):
                got += part
                await asyncio.sleep(0.02)
        assert json.loads(got.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == "x" * 199 * 80_000 + "y"


async def test_beside_many_that_never_finish_others_are_answered(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, client_timeout_s=1) as cluster:
        slow = [asyncio.create_task(said(cluster, HEAD if i % 2 else HEAD + LENGTH)) for i in range(LORIS)]
        for _ in range(20):
            answer = await cluster.chat()
            assert answer.json()["choices"][0]["message"]["content"] == OUTPUT
        assert {status for status, _ in await asyncio.gather(*slow)} == {408}


async def test_connections_are_bounded(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, max_concurrent_requests=1) as cluster:
        connections = cluster.server.server_state.connections
        held = [await connect(cluster) for _ in range(4)]
        await until(lambda: len(connections) == 4)
        status, error = await said(cluster)
        assert (status, error["type"], error["code"]) == (503, "service_unavailable_error", "overloaded")
        held[0][1].close()
        await until(lambda: len(connections) == 3)
        reader, writer = await connect(cluster)
        writer.write(HEAD + LENGTH + BODY)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        for _, each in held[1:]:
            each.close()


async def test_an_idle_connection_stays_and_makes_room(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, max_concurrent_requests=1) as cluster:
        connections, now = cluster.server.server_state.connections, asyncio.get_running_loop().time()
        first, second = await connect(cluster), await connect(cluster)
        for reader, writer in (first, second):
            writer.write(HEAD + LENGTH + BODY)
            assert OUTPUT.encode() in await reader.readuntil(b"}}}")
        await until(lambda: all(each.idle_until and each.idle_until > now + 60 for each in connections))
        held = [await connect(cluster) for _ in range(2)]
        await until(lambda: len(connections) == 4)
        assert (await cluster.chat()).status_code == 200  # by a fifth connection
        assert b"HTTP" not in await first[0].read()  # it has ended
        second[1].write(HEAD + LENGTH + BODY)
        assert b"HTTP/1.1 200" in await second[0].readline()
        for _, each in (first, second, *held):
            each.close()


async def test_half_received_bodies_take_so_much_memory_and_no_more(tokenizer: Tokenizer, monkeypatch):
    monkeypatch.setattr(bodies, "HELD_BODIES", 2)
    large = HEAD + b"content-length: 900\r\n\r\n" + b"x" * 850
    async with run_cluster(tokenizer, max_body_bytes=900) as cluster:
        held = [await connect(cluster) for _ in range(2)]
        for _, writer in held:
            writer.write(large)
        await asyncio.sleep(0.1)
        reader, writer = await connect(cluster)
        writer.write(large)
        assert (await reader.readline()).startswith(b"HTTP/1.1 429")
        writer.close()
        for _, other in held:
            other.close()
        await until(lambda: not cluster.server.server_state.connections)
        assert (await cluster.complete()).status_code == 200


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff garbage\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nno length\r\n",
        HEAD + b"x: " + b"y" * 90_000 + b"\r\n\r\n",
    ],
)
async def test_garbage_behind_a_request_ends_that_connection_once_it_is_answered(cluster: Cluster, garbage: bytes):
    async def slow(worker, request):
        for number in range(15):
            yield decode_pb2.GenerateReply(token_ids=[10], text=f"{number} ")
            await asyncio.sleep(0.02)
        yield decode_pb2.GenerateReply(token_ids=[10], text="x", finish_reason=decode_pb2.FINISH_REASON_STOP)
        yield decode_pb2.GenerateReply(summary=decode_pb2.GenerateSummary(prompt_tokens=1, completion_tokens=16))

    cluster.decode[0].script = slow
    other = asyncio.create_task(cluster.complete(max_tokens=16))
    reader, writer = await connect(cluster)
    writer.write(HEAD + LENGTH + BODY)
    await until(lambda: cluster.service.admission.active == 2)
    for part in (garbage, garbage, HEAD + LENGTH + BODY):
        writer.write(part)
        await asyncio.sleep(0.01)
    head, _, content = (await reader.read()).partition(b"\r\n\r\n")  # until the connection ends
    writer.close()
    assert b"connection: close" in head.lower()
    for answer in (json.loads(content), (await other).json()):
        assert answer["choices"][0]["text"] == "".join(f"{number} " for number in range(15)) + "x"
    assert len(cluster.decode[0].requests) == 2
    await until(lambda: cluster.service.admission.active == 0)


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
"""What Java's client sends with each request, since HTTP/2 would suit it too."""
CHUNKED = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize("piece", [1, 50, 10_000])
async def test_a_request_that_would_rather_have_another_protocol_is_served_as_it_is(cluster: Cluster, piece: int):
    asked = HEAD + H2C + LENGTH + BODY, HEAD + H2C + CHUNKED, HEAD + LENGTH + BODY
    reader, writer = await connect(cluster)
    sent = b"".join(asked)
    for begin in range(0, len(sent), piece):
        writer.write(sent[begin : begin + piece])
        await writer.drain()
    for _ in asked:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].split()[0])
        assert head.startswith(b"http/1.1 200 ")
        assert json.loads(await reader.readexactly(length))["choices"][0]["text"] == OUTPUT
    writer.close()


@pytest.mark.parametrize("behind", [HEAD + LENGTH + BODY, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /live HT"])
async def test_a_client_that_sent_more_and_leaves_is_noticed(cluster: Cluster, behind: bytes):
    cluster.decode[0].script = hanging(after=1)
    _, writer = await connect(cluster)
    writer.write(HEAD + LENGTH + BODY + behind)
    await until(lambda: len(cluster.decode[0].requests) == 1)
    writer.close()
    await asyncio.wait_for(cluster.decode[0].cancelled.wait(), 10)
    await until(lambda: cluster.service.admission.active == 0)
    await until(lambda: not cluster.server.server_state.connections)


def held(cluster: Cluster) -> asyncio.Event:
    """From now on the worker answers once the event is set."""
    go_on, answered = asyncio.Event(), cluster.decode[0].script

    async def waits(worker, request):
        await go_on.wait()
        async for reply in answered(worker, request):
            yield reply

    cluster.decode[0].script = waits
    return go_on


async def test_of_many_requests_sent_at_once_few_are_parsed_ahead(cluster: Cluster):
    """Parsing all of them at once would hold up every other client."""
    go_on = held(cluster)
    reader, writer = await connect(cluster)
    asked = b"GET /v1/models/tiny HTTP/1.1\r\nhost: x\r\n\r\n"
    writer.write(HEAD + LENGTH + BODY + asked * 3000)
    await until(lambda: len(cluster.decode[0].requests) == 1)
    [connection] = [each for each in cluster.server.server_state.connections if each._unanswered]
    assert MAX_PIPELINED < len(connection._unanswered) <= MAX_PIPELINED + 1 + PIECE_BYTES // len(asked)
    go_on.set()
    for _ in range(3001):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
    writer.close()


async def test_a_body_behind_a_running_request_waits_outside(cluster: Cluster):
    """Its bytes are not taken into memory before its turn; then it is read, and so is what follows."""
    go_on = held(cluster)
    long = b" " * (4 << 20) + BODY
    reader, writer = await connect(cluster)
    writer.write(HEAD + LENGTH + BODY + HEAD + b"content-length: %d\r\n\r\n" % len(long) + long + HEAD + LENGTH + BODY)
    await until(lambda: len(cluster.decode[0].requests) == 1)
    await asyncio.sleep(0.2)
    [connection] = [each for each in cluster.server.server_state.connections if each._unanswered]
    assert len(connection.cycle.body) + len(connection._unparsed) < 1 << 20
    go_on.set()
    for _ in range(3):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
    writer.close()
