import asyncio
import os
import signal

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrail.errors import ConfigError, DeadlineError, KvrailError, RequestCancelledError
from kvrail.rpc.channel import open_channel
from kvrail.rpc.client import DecodeClient
from kvrail.rpc.events_server import DecodeService
from kvrail.rpc.http_side import side_server
from kvrail.rpc.server import build_server, serve_until_signal
from kvrail.wire.v1 import decode_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Slow(DecodeService):
    """One reply at once, a second when released."""

    def __init__(self):
        super().__init__()
        self.release = asyncio.Event()
        self.running = 0
        self.cancelled = asyncio.Event()
        self.idle = asyncio.Event()

    async def generate(self, request, write, until):
        self.running += 1
        try:
            await write(decode_pb2.GenerateReply(text="one"))
            await self.release.wait()
            await write(decode_pb2.GenerateReply(text="two"))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1
            self.idle.set()


@pytest.fixture
async def running():
    servicer = Slow()
    rpc = await build_server()
    rpc.add_decode(servicer)
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield rpc, servicer, channel
    await rpc.stop()


async def health(channel):
    return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)).status


async def test_taken_port_is_a_config_error():
    first, second = await build_server(), await build_server()
    port = first.bind("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=str(port)):
        second.bind("127.0.0.1", port)


async def test_cancelling_the_call_stops_the_servicer(running):
    _, servicer, channel = running
    async with DecodeClient(channel).events.submit(decode_pb2.GenerateRequest()) as stream:
        assert (await stream.read()).text == "one"
        waiting = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            await waiting
    await asyncio.wait_for(servicer.cancelled.wait(), 10)


async def test_cancelling_the_reading_task_is_no_error_of_the_call(running):
    _, servicer, channel = running
    stream = DecodeClient(channel).events.submit(decode_pb2.GenerateRequest())
    assert (await stream.read()).text == "one"
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.wait_for(servicer.cancelled.wait(), 10)


async def test_deadline_ends_the_call_on_both_sides(running):
    _, servicer, channel = running
    stream = DecodeClient(channel).events.submit(decode_pb2.GenerateRequest(), timeout_s=0.3)
    with pytest.raises(DeadlineError):
        [reply async for reply in stream]
    await asyncio.wait_for(servicer.cancelled.wait(), 10)


async def drain(rpc, servicer, grace_period_s, draining):
    await serve_until_signal(rpc, on_drain=draining.set, drained=servicer.idle.wait, grace_period_s=grace_period_s)


async def test_signal_drains_then_stops(running):
    rpc, servicer, channel = running
    draining = asyncio.Event()
    serving = asyncio.create_task(drain(rpc, servicer, 60, draining))
    stream = DecodeClient(channel).events.submit(decode_pb2.GenerateRequest())
    assert (await stream.read()).text == "one"
    assert await health(channel) == SERVING and not draining.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(draining.wait(), 10)
    assert await health(channel) == NOT_SERVING and not serving.done()
    servicer.release.set()
    assert [reply.text async for reply in stream] == ["two"]
    await asyncio.wait_for(serving, 10)


@pytest.mark.parametrize("signals", [1, 2])
async def test_grace_ends_by_time_or_by_a_second_signal(running, signals, caplog):
    rpc, servicer, channel = running
    serving = asyncio.create_task(drain(rpc, servicer, 0.05 if signals == 1 else 3600, asyncio.Event()))
    stream = DecodeClient(channel).events.submit(decode_pb2.GenerateRequest())
    assert (await stream.read()).text == "one"
    for _ in range(signals):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
    await asyncio.wait_for(serving, 10)
    assert "cancelling the requests that still run" in caplog.text
    await asyncio.wait_for(servicer.cancelled.wait(), 10)
    with pytest.raises(KvrailError):
        await stream.read()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_failing_drain_is_raised_and_the_server_stops(running):
    rpc, _, channel = running

    async def fails():
        raise ValueError("pages leaked")

    serving = asyncio.create_task(serve_until_signal(rpc, on_drain=lambda: None, drained=fails, grace_period_s=60))
    await health(channel)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(ValueError, match="pages leaked"):
        await asyncio.wait_for(serving, 10)


def test_side_server():
    """It answers while this thread runs no loop, as one does that loads a model."""
    why = [""]

    async def render(path, accept):
        return f"metrics of {path} for {accept}\n".encode(), "text/plain; version=1"

    with side_server("127.0.0.1", 0, render, lambda: why[0]) as port:
        with pytest.raises(ConfigError, match=str(port)), side_server("127.0.0.1", port, render, lambda: ""):
            pass
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"accept": "text/openmetrics"}) as client:
            reply = client.get("/metrics/vllm")
            assert reply.text == "metrics of /metrics/vllm for text/openmetrics\n"
            assert reply.headers["content-type"] == "text/plain; version=1"
            assert client.get("/metrics").text == "metrics of /metrics for text/openmetrics\n"
            assert client.get("/health").status_code == 200
            why[0] = "loading: import"
            reply = client.get("/health")
            assert (reply.status_code, reply.text) == (503, "loading: import\n")
            assert client.get("/secrets").status_code == 404
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")
