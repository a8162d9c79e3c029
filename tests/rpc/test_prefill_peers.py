"""gRPC peers that are not ours, or no longer there."""

import asyncio
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from kvrail.errors import FrameError, IncompatibleError, WorkerUnavailableError
from kvrail.rpc import options
from kvrail.rpc.channel import open_channel
from kvrail.rpc.client import DecodeClient, PrefillStatusClient
from kvrail.rpc.prefill.client import GrpcPrefillClient
from kvrail.transport.base import Announcement
from kvrail.wire.v1 import decode_pb2, prefill_pb2
from kvrail.wire.v1.prefill_pb2 import Accepted, FrameAnnounced, PrefillReply, PrefillRequest, TransferDone

ROOT = Path(__file__).resolve().parents[2]
FRAME = Announcement(b"head", 5, False)

WORKER = """
import asyncio
from kvrail.rpc.server import build_server
from kvrail.rpc.prefill.replies import PrefillReplies
from kvrail.transport.base import Announcement
from kvrail.wire.v1 import prefill_pb2, prefill_pb2_grpc

class Servicer(prefill_pb2_grpc.PrefillServicer):
    async def Prefill(self, request, context):
        replies = PrefillReplies()
        await replies.serve(self.answer(replies), context.write)

    async def answer(self, replies):
        replies.accept(prefill_pb2.Accepted())
        replies.announce(Announcement(b"head", 5, False))
        await asyncio.Event().wait()

async def main():
    rpc = await build_server()
    rpc.add_prefill(Servicer())
    print(rpc.bind("127.0.0.1", 0), flush=True)
    await rpc.start()
    await rpc.server.wait_for_termination()

asyncio.run(main())
"""


def start_worker():
    return subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True, cwd=ROOT)


async def test_killed_worker():
    with start_worker() as worker:
        try:
            port = int(await asyncio.to_thread(worker.stdout.readline))
            async with open_channel(f"127.0.0.1:{port}") as channel:
                async with GrpcPrefillClient(channel, "p0").prefill(PrefillRequest()) as call:
                    assert await call.announced() == FRAME
                    worker.send_signal(signal.SIGKILL)
                    with pytest.raises(WorkerUnavailableError):
                        await call.announced()
                async with GrpcPrefillClient(channel, "p1").prefill(PrefillRequest()) as call:
                    with pytest.raises(WorkerUnavailableError, match="p1"):
                        await call.accepted()
        finally:
            worker.kill()


async def test_frozen_worker_is_noticed_by_keepalive(monkeypatch):
    """A stopped process closes no socket, and its kernel goes on acknowledging: only unanswered pings tell."""
    monkeypatch.setattr(options, "KEEPALIVE_TIME_MS", 300)
    monkeypatch.setattr(options, "KEEPALIVE_TIMEOUT_MS", 300)
    with start_worker() as worker:
        try:
            port = int(await asyncio.to_thread(worker.stdout.readline))
            async with (
                open_channel(f"127.0.0.1:{port}") as channel,
                GrpcPrefillClient(channel, "p0").prefill(PrefillRequest()) as call,
            ):
                assert await call.announced() == FRAME
                worker.send_signal(signal.SIGSTOP)
                with pytest.raises(WorkerUnavailableError):
                    await asyncio.wait_for(call.announced(), 30)
        finally:
            worker.kill()


@asynccontextmanager
async def foreign(service, method, replies, *, kind="unary_stream"):
    """A server that answers `method` with the given bytes, whatever they are."""

    async def stream(request, context):
        for reply in replies:
            await context.write(reply)

    async def single(request, context):
        return replies[0]

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    answer = single if kind == "unary_unary" else stream
    handler = grpc.method_handlers_generic_handler(service, {method: make(answer)})
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


@asynccontextmanager
async def calling(replies):
    """A call of a prefill worker that answers with the given bytes."""
    async with (
        foreign("kvrail.v1.Prefill", "Prefill", replies) as channel,
        GrpcPrefillClient(channel, "p0").prefill(PrefillRequest()) as call,
    ):
        yield call


ACCEPTED = PrefillReply(accepted=Accepted()).SerializeToString()
ANNOUNCED = PrefillReply(announced=FrameAnnounced(head=b"head", payload_bytes=5)).SerializeToString()
DONE = PrefillReply(done=TransferDone(frame_count=1, payload_bytes=5)).SerializeToString()


async def test_worker_that_speaks_plain_protobuf():
    async with calling([ACCEPTED, ANNOUNCED, DONE]) as call:
        assert [await call.announced(), await call.announced()] == [FRAME, None]


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ([], "ended the call before"),
        ([ACCEPTED, ANNOUNCED], "ended the call before"),
        ([ACCEPTED, ANNOUNCED[:-1]], "no message of this protocol"),
        ([ACCEPTED, b""], "empty"),
        ([ACCEPTED, DONE], "1 frames and 5 bytes; 0 and 0 were announced"),
        ([b"\xff\xff"], "no message of this protocol"),
    ],
)
async def test_worker_that_breaks_the_protocol(replies, message):
    async with calling(replies) as call:
        with pytest.raises((FrameError, IncompatibleError), match=message):
            while await call.announced() is not None:
                pass


async def test_client_that_speaks_plain_protobuf():
    with start_worker() as worker:
        try:
            port = int(await asyncio.to_thread(worker.stdout.readline))
            async with open_channel(f"127.0.0.1:{port}") as channel:
                call = channel.unary_stream(
                    "/kvrail.v1.Prefill/Prefill",
                    request_serializer=PrefillRequest.SerializeToString,
                    response_deserializer=prefill_pb2.PrefillReply.FromString,
                )(PrefillRequest())
                assert (await call.read()).HasField("accepted")
                assert (await call.read()).announced.payload_bytes == 5
                call.cancel()
        finally:
            worker.kill()


async def test_reply_that_cannot_be_read_is_no_end_of_output():
    reply = decode_pb2.RequestEvents(number=1, replies=[decode_pb2.GenerateReply(text="one")])
    good = decode_pb2.EventBatch(requests=[reply]).SerializeToString()
    async with foreign("kvrail.v1.Decode", "Events", [good, b"\xff\xff"], kind="stream_stream") as channel:
        stream = DecodeClient(channel).events.submit(decode_pb2.GenerateRequest())
        assert (await stream.read()).text == "one"
        with pytest.raises(IncompatibleError):
            await stream.read()
    async with foreign("kvrail.v1.Prefill", "GetStatus", [b"\xff\xff"], kind="unary_unary") as channel:
        with pytest.raises(IncompatibleError):
            await PrefillStatusClient(channel).get_status(timeout_s=10)
