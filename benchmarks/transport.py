"""Loopback throughput of the transports: one transfer of equal frames; for gRPC the sender is another process.

    python -m benchmarks.transport [--frame-mib 4] [--frames 128] [--rounds 5]

Correctness first: a round compares every frame with what was sent. The timed rounds then run from the call to the end
of the transfer. `inproc` passes references: its figure is the cost of the queues alone. `plain protobuf` is the
baseline: the same stream with the generated serializers and gRPC's defaults.
"""

import argparse
import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
from kvrail.transport.frames import Expectation
from kvrail.transport.grpc import PrefillClient, serve_prefill
from kvrail.transport.replies import PrefillReplies
from kvrail.wire.replies import seal

from kvrail.rpc.channel import open_channel
from kvrail.rpc.errors import maps_errors
from kvrail.rpc.options import MESSAGE_OVERHEAD_BYTES
from kvrail.rpc.server import build_server
from kvrail.transport.inproc import Handler, InprocPrefillClient
from kvrail.wire.v1 import prefill_pb2_grpc
from kvrail.wire.v1.prefill_pb2 import Accepted, PrefillReply, PrefillRequest

Round = Callable[[int, bool], Awaitable[None]]
"""Receives so many frames; compares each with what was sent where asked."""


def the_frame(size: int) -> bytes:
    """The frame that every round sends; both processes make the same one."""
    return random.Random(0).randbytes(size)


def handler_for(size: int) -> Handler:
    """A prefill worker that sends as many frames as the request has tokens."""
    frame = the_frame(size)

    async def handler(request: PrefillRequest, replies: PrefillReplies) -> None:
        replies.accept(Accepted())
        for _ in request.prompt_token_ids:
            await replies.send(seal(frame))
        await replies.commit()

    return handler


class OurServicer(prefill_pb2_grpc.PrefillServicer):
    """The gRPC transport."""

    def __init__(self, size: int) -> None:
        self._handler = handler_for(size)

    @maps_errors
    async def Prefill(self, request: PrefillRequest, context: grpc.aio.ServicerContext) -> None:
        await serve_prefill(context, lambda replies: self._handler(request, replies))


class PlainServicer(prefill_pb2_grpc.PrefillServicer):
    """The baseline."""

    def __init__(self, size: int) -> None:
        self._frame = the_frame(size)

    async def Prefill(self, request: PrefillRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[PrefillReply]:
        for _ in request.prompt_token_ids:
            yield PrefillReply(frame=self._frame)


async def serve(kind: str, size: int, ports: "multiprocessing.Queue[int]") -> None:
    """Serve until the parent ends this process."""
    if kind == "grpc":
        rpc = await build_server(max_message_bytes=size + MESSAGE_OVERHEAD_BYTES)
        rpc.add_prefill(OurServicer(size))
        ports.put(rpc.bind("127.0.0.1", 0))
        await rpc.start()
        await rpc.server.wait_for_termination()
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    prefill_pb2_grpc.add_PrefillServicer_to_server(PlainServicer(size), server)
    ports.put(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await server.wait_for_termination()


def serve_in_child(kind: str, size: int, ports: "multiprocessing.Queue[int]") -> None:
    """Run `serve` in an event loop of its own."""
    asyncio.run(serve(kind, size, ports))


def call_rounds(client: InprocPrefillClient | PrefillClient, size: int) -> Round:
    """A round over one of our transports: receives all frames, compares them where asked."""
    frame = the_frame(size)

    async def one_round(count: int, compare: bool) -> None:
        async with client.prefill(PrefillRequest(request_id="bench", prompt_token_ids=range(count))) as call:
            call.reserve(Expectation("bench", size, size * count))
            received = 0
            while (got := await call.receive()) is not None:
                received += 1
                if compare and got != frame:
                    raise SystemExit(f"frame {received} arrived with other bytes")
            if received != count:
                raise SystemExit(f"{received} of {count} frames arrived")

    return one_round


def plain_rounds(channel: grpc.aio.Channel, size: int) -> Round:
    """A round of the baseline."""
    frame, stub = the_frame(size), prefill_pb2_grpc.PrefillStub(channel)

    async def one_round(count: int, compare: bool) -> None:
        received = 0
        async for reply in stub.Prefill(PrefillRequest(prompt_token_ids=range(count))):
            got = reply.frame
            received += 1
            if compare and got != frame:
                raise SystemExit(f"frame {received} arrived with other bytes")
        if received != count:
            raise SystemExit(f"{received} of {count} frames arrived")

    return one_round


@asynccontextmanager
async def connected(kind: str, size: int) -> AsyncIterator[Round]:
    """The round of one transport, with its sender running."""
    if kind == "inproc":
        yield call_rounds(InprocPrefillClient(handler_for(size)), size)
        return
    spawn = multiprocessing.get_context("spawn")
    ports = spawn.Queue()
    child = spawn.Process(target=serve_in_child, args=(kind, size, ports), daemon=True)
    child.start()
    try:
        target = f"127.0.0.1:{await asyncio.to_thread(ports.get, True, 60)}"
        if kind == "grpc":
            async with open_channel(target, max_message_bytes=size + MESSAGE_OVERHEAD_BYTES) as channel:
                yield call_rounds(PrefillClient(channel), size)
        else:
            async with grpc.aio.insecure_channel(target, [("grpc.max_receive_message_length", -1)]) as channel:
                yield plain_rounds(channel, size)
    finally:
        child.terminate()
        child.join()


async def measure(kind: str, size: int, frames: int, rounds: int) -> list[float]:
    """GB/s of each timed round."""
    async with connected(kind, size) as one_round:
        await one_round(frames, True)
        rates = []
        for _ in range(rounds):
            begin = time.perf_counter()
            await one_round(frames, False)
            rates.append(frames * size / (time.perf_counter() - begin) / 1e9)
    return rates


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frame-mib", type=float, default=4.0)
    parser.add_argument("--frames", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    size = int(options.frame_mib * (1 << 20))
    print(f"{options.frames} frames of {options.frame_mib:g} MiB, {options.rounds} rounds, GB/s")
    print(f"{'transport':<16}{'median':>8}{'min':>8}{'max':>8}")
    for kind, name in (("inproc", "inproc"), ("grpc", "grpc"), ("plain", "plain protobuf")):
        rates = await measure(kind, size, options.frames, options.rounds)
        print(f"{name:<16}{statistics.median(rates):>8.2f}{min(rates):>8.2f}{max(rates):>8.2f}")


if __name__ == "__main__":
    asyncio.run(main())
