"""Many requests to one worker: each has its own output, end, deadline and reader; they share one stream of events."""

import asyncio
import contextlib
import time
from types import SimpleNamespace

import grpc
import pytest

from kvrail.errors import (
    FrameError,
    IncompatibleError,
    InvalidRequestError,
    KvrailError,
    RequestCancelledError,
    WorkerUnavailableError,
)
from kvrail.rpc import events, events_server
from kvrail.rpc.channel import open_channel
from kvrail.rpc.client import DecodeClient
from kvrail.rpc.errors import from_rpc_error
from kvrail.rpc.events_server import MAX_UNTAKEN_MESSAGES, MAX_WAITING_REPLIES, DecodeService, EventSender
from kvrail.rpc.server import build_server
from kvrail.wire.v1 import decode_pb2, decode_pb2_grpc


class Worker(DecodeService):
    """Follows the request's id: `count N`, `fail N`, `hang`, `flood`; keeps the streams that its output left on."""

    def __init__(self):
        super().__init__()
        self.running = set()
        self.streams = set()
        self.told = 0
        self.go_on = asyncio.Event()

    async def generate(self, request, write, until):
        order, _, number = request.request_id.partition(" ")
        self.running.add(request.request_id)
        self.streams.add(write.func.__self__)  # the stream that it writes to
        try:
            for i in range(int(number or 1)):
                await write(decode_pb2.GenerateReply(index=i, text="x" * len(request.model)))
                self.told += 1
                if order != "flood":
                    await asyncio.sleep(0)
            if order == "fail":
                raise FrameError(f"torn at {number}")
            if order == "hang":
                await self.go_on.wait()
        finally:
            self.running.discard(request.request_id)


def ask(order: str, text: str = "") -> decode_pb2.GenerateRequest:
    return decode_pb2.GenerateRequest(request_id=order, model=text)


async def collect(stream) -> list[int]:
    return [reply.index async for reply in stream]


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def pair():
    worker, rpc = Worker(), await build_server()
    rpc.add_decode(worker)
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        client = DecodeClient(channel)
        yield worker, client, rpc, channel
        await client.close()
    await rpc.stop()


async def test_requests_share_a_stream_and_nothing_else(pair):
    worker, client, _, _ = pair
    orders = ["count 5", "fail 2", "count 1000", "fail 0", "count 1"]
    streams = [client.events.submit(ask(order)) for order in orders]
    outputs = await asyncio.gather(*(collect(stream) for stream in streams), return_exceptions=True)
    assert outputs[0] == list(range(5)) and outputs[2] == list(range(1000)) and outputs[4] == [0]
    assert isinstance(outputs[1], FrameError) and str(outputs[1]) == "torn at 2"
    assert isinstance(outputs[3], FrameError) and str(outputs[3]) == "torn at 0"
    assert len(worker.streams) == 1


async def test_output_before_an_error_can_be_read(pair):
    _, client, _, _ = pair
    stream = client.events.submit(ask("fail 3"))
    assert [(await stream.read()).index for _ in range(3)] == [0, 1, 2]
    with pytest.raises(FrameError, match="torn at 3"):
        await stream.read()


async def test_cancelling_a_request_ends_it_alone(pair):
    worker, client, _, _ = pair
    stays = client.events.submit(ask("hang"))
    async with client.events.submit(ask("hang 2")) as leaves:
        await leaves.read()
        await until(lambda: worker.running == {"hang", "hang 2"})
    await until(lambda: worker.running == {"hang"})
    worker.go_on.set()
    assert await collect(stays) == [0]


@pytest.mark.parametrize("whole_channel", [False, True])
async def test_closing_the_stream_ends_all_requests(pair, whole_channel):
    worker, client, _, channel = pair
    streams = [client.events.submit(ask(f"hang {i}")) for i in range(1, 6)]
    await until(lambda: len(worker.running) == 5)
    await (channel.close() if whole_channel else client.close())
    await until(lambda: not worker.running)
    for stream in streams:
        with pytest.raises(WorkerUnavailableError):
            await collect(stream)


async def test_a_lost_worker_fails_every_request_and_the_next_one(pair):
    worker, client, rpc, _ = pair
    streams = [client.events.submit(ask(f"hang {i}")) for i in range(1, 6)]
    await until(lambda: len(worker.running) == 5)
    await rpc.stop()
    for stream in streams:
        with pytest.raises(WorkerUnavailableError):
            await collect(stream)
    with pytest.raises(WorkerUnavailableError):
        await collect(client.events.submit(ask("count 1")))


async def test_the_next_request_after_a_loss_opens_another_stream():
    worker, rpc = Worker(), await build_server()
    rpc.add_decode(worker)
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        client = DecodeClient(channel)
        assert await collect(client.events.submit(ask("count 2"))) == [0, 1]
        await rpc.stop()
        again = await build_server()
        again.add_decode(worker)
        again.bind("127.0.0.1", port)
        await again.start()

        async def works() -> bool:
            try:
                return await collect(client.events.submit(ask("count 3"))) == [0, 1, 2]
            except WorkerUnavailableError:
                return False

        async with asyncio.timeout(30):
            while not await works():
                await asyncio.sleep(0.05)
        await client.close()
        await again.stop()


async def test_a_slow_reader_is_ended_alone(pair, monkeypatch):
    monkeypatch.setattr(events, "MAX_UNREAD_BYTES", 200_000)
    worker, client, _, _ = pair
    overflown = []
    slow = client.events.submit(ask("flood 5000", "t" * 100), on_overflow=lambda: overflown.append(True))
    quick = await collect(client.events.submit(ask("count 3000", "t" * 100)))
    assert quick == list(range(3000))
    await until(lambda: "flood 5000" not in worker.running)
    indices = []
    with pytest.raises(RequestCancelledError, match="does not read"):
        async for reply in slow:
            indices.append(reply.index)
    assert indices == list(range(len(indices))) and 100 < len(indices) < 2500
    assert overflown == [True]


async def opened(stub):
    """A stream of events and its number."""
    stream = stub.Events()
    first = await stream.read()
    assert first.HasField("running") and first.stream
    return stream, first.stream


async def test_a_router_that_takes_no_messages_gets_no_more_of_them(pair):
    """Output then waits at the worker, up to a bound, and leaves in few messages once the router goes on."""
    worker, _, _, channel = pair
    stub = decode_pb2_grpc.DecodeStub(channel)
    stream, number = await opened(stub)
    await stub.Submit(decode_pb2.SubmitRequest(stream=number, number=1, request=ask("count 9000")))
    messages = [await stream.read() for _ in range(MAX_UNTAKEN_MESSAGES - 1)]
    more = asyncio.create_task(stream.read())
    await until(lambda: worker.told >= MAX_WAITING_REPLIES)
    await asyncio.sleep(0.1)
    assert not more.done()
    assert worker.told <= MAX_WAITING_REPLIES + sum(len(part.replies) for m in messages for part in m.requests)
    await stream.write(decode_pb2.EventsRequest(taken=1))
    (part,) = (await more).requests
    assert len(part.replies) >= MAX_WAITING_REPLIES - 1
    stream.cancel()
    await until(lambda: not worker.running)


async def test_large_replies_of_many_requests_fit_into_messages(pair):
    """As log probabilities of long prompts are, 7 KiB each, where the router was slow; gRPC would end the stream."""
    worker, _, _, channel = pair
    stub = decode_pb2_grpc.DecodeStub(channel)
    stream, number = await opened(stub)
    for n in range(1, 257):
        await stub.Submit(decode_pb2.SubmitRequest(stream=number, number=n, request=ask("flood 20", "t" * 7180)))
    replies = 0
    while replies < 256 * 20:
        message = await stream.read()
        replies += sum(len(part.replies) for part in message.requests)
        assert message.ByteSize() < 2 << 20
        await stream.write(decode_pb2.EventsRequest(taken=1))
    stream.cancel()
    await until(lambda: not worker.running)


async def test_a_worker_that_stops_has_sent_what_it_has(pair):
    """The requests have ended; their output waits for a router that is slow to take messages."""
    worker, _, rpc, channel = pair
    stub = decode_pb2_grpc.DecodeStub(channel)
    stream, number = await opened(stub)
    for n in range(1, 5 * MAX_UNTAKEN_MESSAGES + 1):
        await stub.Submit(decode_pb2.SubmitRequest(stream=number, number=n, request=ask("count 1")))
    await until(lambda: worker.told == n and not worker.running)
    flushed = asyncio.create_task(rpc.decode.flushed())
    await asyncio.wait([flushed], timeout=0.1)
    assert not flushed.done()
    replies = ended = 0
    while ended < n:
        for part in (await stream.read()).requests:
            replies, ended = replies + len(part.replies), ended + part.HasField("end")
        await stream.write(decode_pb2.EventsRequest(taken=1))
    assert replies == n
    await asyncio.wait_for(flushed, 10)
    stream.cancel()


class Resetting(decode_pb2_grpc.DecodeServicer):
    """Takes requests, then ends the stream with a status."""

    def __init__(self, status):
        self._status, self._asked = status, asyncio.Event()

    async def Events(self, _, context):
        await context.write(decode_pb2.EventBatch(stream=7, running={}))
        await self._asked.wait()
        await context.abort(self._status, "reset")

    async def Submit(self, request, context):
        asyncio.get_running_loop().call_later(0.05, self._asked.set)
        return decode_pb2.SubmitReply(sent=1)


@pytest.mark.parametrize("status", ["INTERNAL", "UNKNOWN", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"])
async def test_whatever_ends_the_stream_the_worker_is_lost(status):
    """No single request is at fault, so each may go on elsewhere. A proxy that loses its upstream says INTERNAL."""
    rpc = await build_server()
    decode_pb2_grpc.add_DecodeServicer_to_server(Resetting(grpc.StatusCode[status]), rpc.server)
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        client = DecodeClient(channel)
        with pytest.raises(WorkerUnavailableError):
            await collect(client.events.submit(ask("hang")))
        await client.close()
    await rpc.stop()


async def refused(method, message) -> KvrailError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await method(message)
    return from_rpc_error(caught.value)


async def test_what_a_router_may_not_submit(pair):
    """A number that runs, a stream that is not open, a deadline that is none; what runs is left alone."""
    worker, _, _, channel = pair
    stub = decode_pb2_grpc.DecodeStub(channel)
    stream, number = await opened(stub)
    request = decode_pb2.SubmitRequest(stream=number, number=7, request=ask("hang"))
    await stub.Submit(request)
    error = await refused(stub.Submit, request)
    assert isinstance(error, IncompatibleError) and "request 7" in str(error)
    elsewhere = decode_pb2.SubmitRequest(stream=number + 1, number=8, request=ask("hang"))
    error = await refused(stub.Submit, elsewhere)
    assert isinstance(error, WorkerUnavailableError) and f"no stream {number + 1:016x} is open" in str(error)
    for timeout_s in (float("nan"), float("inf"), -1.0, 1e300):
        wrong = decode_pb2.SubmitRequest(stream=number, number=8, request=ask("hang"), timeout_s=timeout_s)
        error = await refused(stub.Submit, wrong)
        assert isinstance(error, InvalidRequestError) and "timeout_s is" in str(error)
    await until(lambda: worker.running == {"hang"})
    stream.cancel()
    await until(lambda: not worker.running)
    assert isinstance(await refused(stub.Submit, request), WorkerUnavailableError)


async def test_a_late_abort_is_harmless(pair):
    _, _, _, channel = pair
    stub = decode_pb2_grpc.DecodeStub(channel)
    stream, number = await opened(stub)
    await stub.Abort(decode_pb2.AbortRequest(stream=number, numbers=[5, 6]))
    await stub.Abort(decode_pb2.AbortRequest(stream=number + 1, numbers=[5]))
    await stub.Submit(decode_pb2.SubmitRequest(stream=number, number=5, request=ask("count 2")))
    (part,) = (await stream.read()).requests
    while not part.HasField("end"):
        (part,) = (await stream.read()).requests
    await stub.Abort(decode_pb2.AbortRequest(stream=number, numbers=[5]))
    await stub.Submit(decode_pb2.SubmitRequest(stream=number, number=6, request=ask("count 1")))
    assert [part.number for part in (await stream.read()).requests] == [6]
    stream.cancel()


@pytest.mark.parametrize("turns", range(6))
async def test_a_request_that_is_cancelled_while_it_is_submitted_ends(pair, turns):
    """Whether it has not left, is on its way or runs already."""
    worker, client, _, _ = pair
    stays = client.events.submit(ask("hang"))
    await until(lambda: worker.running == {"hang"})
    leaves = client.events.submit(ask("hang 2"))
    for _ in range(turns * turns):
        await asyncio.sleep(0)
    leaves.cancel()
    with pytest.raises(RequestCancelledError):
        while await leaves.read():
            pass
    assert await collect(client.events.submit(ask("count 2"))) == [0, 1]
    await until(lambda: worker.running == {"hang"})
    worker.go_on.set()
    assert await collect(stays) == [0]


async def test_a_request_that_is_too_large_is_refused_before_it_is_sent(pair, monkeypatch):
    monkeypatch.setattr(events, "MAX_REQUEST_BYTES", 1000)
    _, client, _, _ = pair
    with pytest.raises(InvalidRequestError, match="1000"):
        client.events.submit(ask("count 1", "t" * 1000))
    assert await collect(client.events.submit(ask("count 1"))) == [0]


@pytest.fixture
def beats_often(monkeypatch):
    monkeypatch.setattr(events, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(events_server, "HEARTBEAT_S", 0.02)


async def test_requests_that_take_long_are_left_alone(pair, beats_often):
    worker, client, _, _ = pair
    stays = client.events.submit(ask("hang"))
    await until(lambda: worker.running == {"hang"})
    await asyncio.sleep(1)  # many heartbeats
    worker.go_on.set()
    assert await collect(stays) == [0]
    assert len(worker.streams) == 1


async def test_a_request_that_the_worker_has_lost_ends_alone(pair, beats_often, monkeypatch):
    """Its end is never sent, as if a wake-up had been lost."""
    worker, client, _, _ = pair
    serve = EventSender._serve

    async def forgetful(self, submitted):
        if submitted.request.request_id != "lost":
            await serve(self, submitted)

    monkeypatch.setattr(EventSender, "_serve", forgetful)
    lost, stays = client.events.submit(ask("lost")), client.events.submit(ask("hang"))
    with pytest.raises(WorkerUnavailableError, match="has lost the request"):
        await collect(lost)
    worker.go_on.set()
    assert await collect(stays) == [0]
    assert await collect(client.events.submit(ask("count 2"))) == [0, 1]
    assert len(worker.streams) == 1


async def test_a_silent_stream_is_a_lost_worker(pair, beats_often, monkeypatch):
    """The worker sends no messages; the connection and its pings are well."""
    worker, client, _, _ = pair
    sends = EventSender.run

    async def silent(self):
        await asyncio.Event().wait()

    monkeypatch.setattr(EventSender, "run", silent)
    with pytest.raises(WorkerUnavailableError, match="sends nothing"):
        await collect(client.events.submit(ask("count 1")))
    monkeypatch.setattr(EventSender, "run", sends)
    assert await collect(client.events.submit(ask("count 2"))) == [0, 1]  # over another one
    await until(lambda: not worker.running)


async def test_a_submit_without_an_answer_is_a_lost_worker(pair, beats_often, monkeypatch):
    worker, client, _, _ = pair
    monkeypatch.setattr(events, "ANSWER_S", 0.2)
    stays = client.events.submit(ask("hang"))
    await until(lambda: worker.running == {"hang"})
    start = EventSender.start
    monkeypatch.setattr(EventSender, "start", lambda self, request: time.sleep(0.5) or start(self, request))
    with pytest.raises(WorkerUnavailableError, match="ask another worker"):
        await collect(client.events.submit(ask("hang 2")))
    with pytest.raises(WorkerUnavailableError):
        await collect(stays)
    monkeypatch.setattr(EventSender, "start", start)
    await until(lambda: not worker.running)
    assert await collect(client.events.submit(ask("count 2"))) == [0, 1]


@pytest.mark.parametrize("method", ["Submit", "Abort"])
async def test_a_call_that_cannot_be_made_breaks_the_stream(pair, monkeypatch, method):
    worker, client, _, _ = pair
    assert await collect(client.events.submit(ask("count 2"))) == [0, 1]

    def fails(message, timeout):
        raise RuntimeError("no way out")

    monkeypatch.setattr(client._events, "_stub", SimpleNamespace(Submit=client._stub.Submit, Abort=client._stub.Abort))
    stays = client.events.submit(ask("hang"))
    await until(lambda: "hang" in worker.running)
    monkeypatch.setattr(client._events._stub, method, fails)
    async with client.events.submit(ask("hang 2")) as leaves:
        with contextlib.suppress(WorkerUnavailableError):  # where it cannot be submitted
            await leaves.read()
    with pytest.raises(WorkerUnavailableError, match="no way out"):
        await collect(stays)
    assert await collect(client.events.submit(ask("count 2"))) == [0, 1]
    await until(lambda: not worker.running)


async def test_a_request_that_something_inside_it_cancels_has_an_end(pair, monkeypatch):
    worker, client, _, _ = pair

    async def cancelled(request, write, deadline):
        raise asyncio.CancelledError

    monkeypatch.setattr(worker, "generate", cancelled)
    with pytest.raises(KvrailError, match="internal error"):
        await collect(client.events.submit(ask("count 1")))


async def test_a_refused_submit_fails_its_request_and_no_other(pair):
    _, client, _, _ = pair
    beside = client.events.submit(ask("count 3"))
    wrong = client.events.submit(ask("count 1"), timeout_s=1e10)
    with pytest.raises(InvalidRequestError, match="timeout_s is"):
        await collect(wrong)
    assert await collect(beside) == [0, 1, 2]
