"""Many calls over one stream: each has its own output, end, deadline and reader."""

import asyncio

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
from kvrail.rpc import trunk as trunk_module
from kvrail.rpc.channel import open_channel
from kvrail.rpc.client import DecodeClient
from kvrail.rpc.errors import from_rpc_error, maps_errors
from kvrail.rpc.server import build_server
from kvrail.rpc.trunk_server import MAX_UNTAKEN_MESSAGES, MAX_WAITING_REPLIES, TrunkServer
from kvrail.wire.v1 import decode_pb2, decode_pb2_grpc


class Worker(decode_pb2_grpc.DecodeServicer):
    """Follows the request's id: `count N`, `fail N`, `hang`, `flood`; counts trunks by their callers' addresses."""

    def __init__(self):
        self.running = set()
        self.peers = set()
        self.told = 0
        self.go_on = asyncio.Event()

    @maps_errors
    async def Generate(self, request, context):
        order, _, number = request.request_id.partition(" ")
        self.running.add(request.request_id)
        self.peers.add(context.peer())
        try:
            for i in range(int(number or 1)):
                await context.write(decode_pb2.GenerateReply(index=i, text="x" * len(request.model)))
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


async def test_calls_share_a_stream_and_nothing_else(pair):
    worker, client, _, _ = pair
    orders = ["count 5", "fail 2", "count 1000", "fail 0", "count 1"]
    streams = [client.generate(ask(order)) for order in orders]
    outputs = await asyncio.gather(*(collect(stream) for stream in streams), return_exceptions=True)
    assert outputs[0] == list(range(5)) and outputs[2] == list(range(1000)) and outputs[4] == [0]
    assert isinstance(outputs[1], FrameError) and str(outputs[1]) == "torn at 2"
    assert isinstance(outputs[3], FrameError) and str(outputs[3]) == "torn at 0"
    assert len(worker.peers) == 1


async def test_output_before_an_error_can_be_read(pair):
    _, client, _, _ = pair
    stream = client.generate(ask("fail 3"))
    assert [(await stream.read()).index for _ in range(3)] == [0, 1, 2]
    with pytest.raises(FrameError, match="torn at 3"):
        await stream.read()


async def test_dropping_a_call_ends_it_alone(pair):
    worker, client, _, _ = pair
    stays = client.generate(ask("hang"))
    async with client.generate(ask("hang 2")) as leaves:
        await leaves.read()
        await until(lambda: worker.running == {"hang", "hang 2"})
    await until(lambda: worker.running == {"hang"})
    worker.go_on.set()
    assert await collect(stays) == [0]


@pytest.mark.parametrize("whole_channel", [False, True])
async def test_closing_the_trunk_ends_all_calls(pair, whole_channel):
    worker, client, _, channel = pair
    streams = [client.generate(ask(f"hang {i}")) for i in range(1, 6)]
    await until(lambda: len(worker.running) == 5)
    await (channel.close() if whole_channel else client.close())
    await until(lambda: not worker.running)
    for stream in streams:
        with pytest.raises(WorkerUnavailableError):
            await collect(stream)


async def test_a_lost_worker_is_heard_of_by_every_call_and_found_again(pair):
    worker, client, rpc, _ = pair
    streams = [client.generate(ask(f"hang {i}")) for i in range(1, 6)]
    await until(lambda: len(worker.running) == 5)
    await rpc.stop()
    for stream in streams:
        with pytest.raises(WorkerUnavailableError):
            await collect(stream)
    with pytest.raises(WorkerUnavailableError):
        await collect(client.generate(ask("count 1")))


async def test_the_next_call_after_a_loss_opens_another_trunk():
    worker, rpc = Worker(), await build_server()
    rpc.add_decode(worker)
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        client = DecodeClient(channel)
        assert await collect(client.generate(ask("count 2"))) == [0, 1]
        await rpc.stop()
        again = await build_server()
        again.add_decode(worker)
        again.bind("127.0.0.1", port)
        await again.start()

        async def works() -> bool:
            try:
                return await collect(client.generate(ask("count 3"))) == [0, 1, 2]
            except WorkerUnavailableError:
                return False

        async with asyncio.timeout(30):
            while not await works():
                await asyncio.sleep(0.05)
        await client.close()
        await again.stop()


async def test_a_slow_reader_is_ended_alone(pair, monkeypatch):
    monkeypatch.setattr(trunk_module, "MAX_UNREAD_BYTES", 200_000)
    worker, client, _, _ = pair
    overflown = []
    slow = client.generate(ask("flood 5000", "t" * 100), on_overflow=lambda: overflown.append(True))
    quick = await collect(client.generate(ask("count 3000", "t" * 100)))
    assert quick == list(range(3000))
    await until(lambda: "flood 5000" not in worker.running)
    indices = []
    with pytest.raises(RequestCancelledError, match="does not read"):
        async for reply in slow:
            indices.append(reply.index)
    assert indices == list(range(len(indices))) and 100 < len(indices) < 2500
    assert overflown == [True]


async def test_a_caller_that_takes_no_messages_gets_no_more_of_them(pair):
    """Output then waits at the worker, up to a bound, and leaves in few messages once the caller goes on."""
    worker, _, _, channel = pair
    call = decode_pb2_grpc.DecodeStub(channel).GenerateMany()
    await call.write(decode_pb2.TrunkRequest(call=1, start=ask("count 9000")))
    messages = [await call.read() for _ in range(MAX_UNTAKEN_MESSAGES)]
    more = asyncio.create_task(call.read())
    await until(lambda: worker.told >= MAX_WAITING_REPLIES)
    await asyncio.sleep(0.1)
    assert not more.done()
    assert worker.told <= MAX_WAITING_REPLIES + sum(len(part.replies) for m in messages for part in m.calls)
    await call.write(decode_pb2.TrunkRequest(taken=1))
    (part,) = (await more).calls
    assert len(part.replies) >= MAX_WAITING_REPLIES - 1
    call.cancel()
    await until(lambda: not worker.running)


async def test_a_number_used_twice_ends_the_trunk(pair):
    worker, _, _, channel = pair
    call = decode_pb2_grpc.DecodeStub(channel).GenerateMany()
    for _ in range(2):
        await call.write(decode_pb2.TrunkRequest(call=7, start=ask("hang")))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    error = from_rpc_error(caught.value)
    assert isinstance(error, IncompatibleError) and "call 7" in str(error)
    await until(lambda: not worker.running)


async def test_a_request_too_large_for_the_trunk_is_refused_before_it(pair, monkeypatch):
    monkeypatch.setattr(trunk_module, "MAX_REQUEST_BYTES", 1000)
    _, client, _, _ = pair
    with pytest.raises(InvalidRequestError, match="1000"):
        client.generate(ask("count 1", "t" * 1000))
    assert await collect(client.generate(ask("count 1"))) == [0]


@pytest.fixture
def checks_often(monkeypatch):
    monkeypatch.setattr(trunk_module, "CHECK_EVERY_S", 0.05)


async def test_calls_that_take_long_are_asked_about_and_left_alone(pair, checks_often):
    worker, client, _, _ = pair
    stays = client.generate(ask("hang"))
    await until(lambda: worker.running == {"hang"})
    await asyncio.sleep(1)  # twenty questions
    worker.go_on.set()
    assert await collect(stays) == [0]


async def test_a_call_that_the_worker_has_lost_ends_alone(pair, checks_often, monkeypatch):
    """Its end is never told, as if a wake-up had been lost on the way."""
    worker, client, _, _ = pair
    servers = []
    serve = TrunkServer._serve

    async def forgetful(self, order):
        servers.append(self)
        if order.start.request_id == "lost":
            del self._tasks[order.call]
        else:
            await serve(self, order)

    monkeypatch.setattr(TrunkServer, "_serve", forgetful)
    lost, stays = client.generate(ask("lost")), client.generate(ask("hang"))
    with pytest.raises(WorkerUnavailableError, match="has lost the request"):
        await collect(lost)
    worker.go_on.set()
    assert await collect(stays) == [0]
    assert await collect(client.generate(ask("count 2"))) == [0, 1]
    assert len(set(servers)) == 1


@pytest.mark.parametrize("way", ["_read", "_write"])
async def test_a_trunk_that_carries_nothing_any_more_is_broken(pair, checks_often, monkeypatch, way):
    """The worker's end reads no orders, or sends no messages; the connection and its pings are well."""
    worker, client, _, _ = pair
    tried = getattr(TrunkServer, way)

    async def stuck(self):
        await asyncio.Event().wait()

    monkeypatch.setattr(TrunkServer, way, stuck)
    with pytest.raises(WorkerUnavailableError, match="answers nothing"):
        await collect(client.generate(ask("count 1")))
    monkeypatch.setattr(TrunkServer, way, tried)
    assert await collect(client.generate(ask("count 2"))) == [0, 1]  # over another one
    await until(lambda: not worker.running)


async def test_an_order_that_cannot_be_sent_breaks_the_trunk(pair, monkeypatch):
    _, client, _, _ = pair
    assert await collect(client.generate(ask("count 2"))) == [0, 1]

    async def fails(order):
        raise RuntimeError("no way out")

    monkeypatch.setattr(client._trunk._line._stream, "write", fails)
    with pytest.raises(WorkerUnavailableError, match="no way out"):
        await collect(client.generate(ask("count 1")))
    assert await collect(client.generate(ask("count 2"))) == [0, 1]


async def test_a_call_that_something_inside_it_cancels_has_an_end(pair, monkeypatch):
    _, client, _, _ = pair

    async def cancelled(request, context):
        raise asyncio.CancelledError

    monkeypatch.setattr(TrunkServer, "__init__", _with(TrunkServer.__init__, cancelled))
    with pytest.raises(KvrailError, match="internal error"):
        await collect(client.generate(ask("count 1")))


def _with(init, method):
    return lambda self, _, context: init(self, method, context)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, 1e300])
async def test_a_deadline_that_is_none_fails_its_call_and_no_other(pair, timeout_s):
    _, client, _, _ = pair
    beside = client.generate(ask("count 3"))
    wrong = client.generate(ask("count 1"))
    client._trunk._line._orders[-1].timeout_s = timeout_s
    with pytest.raises(InvalidRequestError, match="timeout_s is"):
        await collect(wrong)
    assert await collect(beside) == [0, 1, 2]
