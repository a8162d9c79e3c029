"""Processes of benchmarks/token_path.py: a worker without a model, a source of lines and the bare proxy before it.

    python -m benchmarks.token_path_stubs worker|source|proxy [TARGET]

Each prints the port that it listens on and serves until it is killed. The step of all is the same: one token for each
stream that runs, then the next step as soon as the last one has been taken, or STEP_MS after the last one.
"""

import asyncio
import os
import sys
import time
from typing import Any

from kvrail.rpc.errors import maps_errors
from kvrail.rpc.events_server import DecodeService
from kvrail.rpc.server import build_server
from kvrail.runtime import loops
from kvrail.wire import PROTOCOL_VERSION
from kvrail.wire.v1 import common_pb2, decode_pb2

MODEL = "kvrail-demo"
STEP_S = float(os.environ.get("STEP_MS", "0")) / 1e3


def text() -> str:
    """A token's text: when it was made, in nanoseconds of the clock that all processes share."""
    return f" {time.monotonic_ns()}"


class Steps:
    """An engine of steps: who waits for `step` gets one token when it comes."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None
        self._waiting = 0
        self._task = asyncio.create_task(self._run())

    async def step(self) -> None:
        """Wait for the next step."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        self._waiting += 1
        await self._next

    async def _run(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + STEP_S, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter() if STEP_S else 0 if self._waiting else 0.001)
            if self._waiting:
                step, self._next, self._waiting = self._next, None, 0
                assert step is not None
                step.set_result(None)


class StubDecode(DecodeService):
    """Gives max_tokens tokens, one a step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = Steps()

    @maps_errors
    async def GetStatus(self, request: Any, context: Any) -> common_pb2.WorkerStatus:
        """A healthy worker."""
        model = common_pb2.ModelInfo(name=MODEL, fingerprint="f" * 64, vocab_size=512, max_model_len=1 << 20)
        return common_pb2.WorkerStatus(
            model=model,
            protocol_version=PROTOCOL_VERSION,
            codecs=["raw"],
            max_running=512,
            max_waiting=512,
            kv_cache="plain",
        )

    async def generate(self, request: decode_pb2.GenerateRequest, write: Any, until: float | None) -> None:
        """The output of one request."""
        count = request.sampling.max_tokens
        for number in range(count):
            await self.steps.step()
            finish_reason = decode_pb2.FINISH_REASON_LENGTH if number == count - 1 else 0
            reply = decode_pb2.GenerateReply(token_ids=[65 + number % 26], text=text(), finish_reason=finish_reason)
            await write(reply)
        summary = decode_pb2.GenerateSummary(completion_tokens=count)
        await write(decode_pb2.GenerateReply(summary=summary))


async def serve_worker() -> None:
    """A decode worker that makes tokens out of nothing."""
    rpc = await build_server()
    rpc.add_decode(StubDecode())
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    await _announce(port)


class Source(asyncio.Protocol):
    """Upstream of the bare proxy: after a number and a line break, that number of events, one a step."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def connection_made(self, transport: Any) -> None:
        """Keep the way back."""
        self._transport = transport
        self._room = asyncio.Event()
        self._room.set()

    def data_received(self, data: bytes) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._send(int(data)))

    def pause_writing(self) -> None:
        """The reader is slow."""
        self._room.clear()

    def resume_writing(self) -> None:
        """It is not any more."""
        self._room.set()

    async def _send(self, count: int) -> None:
        for _ in range(count):
            await self._steps.step()
            made = text()
            await self._room.wait()
            self._transport.write(b'data: {"choices":[{"index":0,"text":"%s"}]}\n\n' % made.encode())
        self._transport.close()


async def serve_source() -> None:
    """Lines over plain sockets."""
    steps = Steps()
    server = await asyncio.get_running_loop().create_server(lambda: Source(steps), "127.0.0.1", 0)
    await _announce(server.sockets[0].getsockname()[1])


async def serve_proxy(target: str) -> None:
    """A bare proxy: what one upstream connection brings leaves as one chunk of one client's HTTP response."""
    host, _, port = target.rpartition(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        body = await reader.readexactly(size)
        upstream, order = await asyncio.open_connection(host, int(port))
        order.write(body.partition(b'"max_tokens":')[2].partition(b",")[0].strip() + b"\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        while data := await upstream.read(1 << 16):
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()
        order.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    await _announce(server.sockets[0].getsockname()[1])


async def _announce(port: int) -> None:
    print(port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    roles = {"worker": serve_worker, "source": serve_source, "proxy": serve_proxy}
    loops.run(roles[sys.argv[1]](*sys.argv[2:]))
