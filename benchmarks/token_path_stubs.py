"""Processes of benchmarks/token_path.py: workers without a model, a source of lines and the bare proxy before it.

    python -m benchmarks.token_path_stubs worker|servicer|source|proxy [TARGET]

Each prints the port that it listens on and serves until it is killed. The step of all is the same: one token for each
stream that runs, then the next step as soon as the last one has been taken, or STEP_MS after the last one.
"""

import asyncio
import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

from kvrail.rpc.errors import maps_errors
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


class StubDecode:
    """Gives max_tokens tokens, one a step."""

    def __init__(self) -> None:
        self.steps = Steps()

    @maps_errors
    async def GetStatus(self, request: Any, context: Any) -> common_pb2.WorkerStatus:
        """A healthy worker."""
        model = common_pb2.ModelInfo(name=MODEL, fingerprint="f" * 64, vocab_size=512, max_model_len=1 << 20)
        return common_pb2.WorkerStatus(
            model=model, protocol_version=PROTOCOL_VERSION, codecs=["raw"], max_running=512, max_waiting=512
        )

    async def generate(self, request: decode_pb2.GenerateRequest, context: Any) -> None:
        """The output of one request."""
        count = request.sampling.max_tokens
        for number in range(count):
            await self.steps.step()
            finish_reason = decode_pb2.FINISH_REASON_LENGTH if number == count - 1 else 0
            reply = decode_pb2.GenerateReply(token_ids=[65 + number % 26], text=text(), finish_reason=finish_reason)
            await context.write(reply)
        summary = decode_pb2.GenerateSummary(completion_tokens=count)
        await context.write(decode_pb2.GenerateReply(summary=summary))


async def serve_worker() -> None:
    """A decode worker that makes tokens out of nothing."""
    rpc = await build_server()
    rpc.add_decode(StubDecode())
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    await _announce(port)


class StubEngine:
    """A thread that gives each request a token a step; the real engine's events, and what delivers them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        from kvrail.engine.aio import EventRouter

        self.events = EventRouter(loop)
        self._lock = threading.Lock()
        self._running: dict[str, list[int]] = {}
        self._loop_turns = threading.Semaphore(0)
        self._loop = loop
        self.cpu_s = 0.0

    def start(self) -> None:
        """Begin to step."""
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: Any) -> None:
        """Take a request in."""
        with self._lock:
            self._running[request.request_id] = [0, request.params.max_tokens]

    def abort(self, request_id: str) -> None:
        """Drop a request."""
        with self._lock:
            self._running.pop(request_id, None)

    def status(self) -> Any:
        """The engine's state that the choice of a prefill worker reads."""
        with self._lock:
            return SimpleNamespace(running=len(self._running))

    def _run(self) -> None:
        from kvrail.engine.request.events import Admitted, Finished, Output
        from kvrail.values.sampling import FinishReason

        begin = time.thread_time()
        due = time.perf_counter()
        while True:
            due = max(due + STEP_S, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()) if STEP_S else 0)
            with self._lock:
                running = list(self._running.items())
            events: list[tuple[str, Any]] = []
            for request_id, state in running:
                done, most = state
                if done == 0:
                    events.append((request_id, Admitted(0, False)))
                last = done + 1 == most
                reason = FinishReason.LENGTH if last else None
                events.append((request_id, Output(0, (65,), text(), (), reason, "")))
                state[0] += 1
                if last:
                    events.append((request_id, Finished(most)))
                    self.abort(request_id)
            self.events.deliver(events)
            self.cpu_s = time.thread_time() - begin
            if not running:
                time.sleep(0.001)
            elif not STEP_S:  # a closed loop: the next step begins once the loop has gone round
                self._loop.call_soon_threadsafe(self._loop_turns.release)
                self._loop_turns.acquire()


async def serve_servicer() -> None:
    """The real servicer of a decode worker over a stub engine; it reports CPU time, without a metrics port."""
    from kvrail.config.settings import DecodeSettings
    from kvrail.runtime.drain import ActiveCalls
    from kvrail.services.decode.fetch_attempt import FetchParts
    from kvrail.services.decode.fetcher import Fetcher
    from kvrail.services.decode.prefill_workers import GrpcPrefillWorkers
    from kvrail.services.decode.servicer import DecodeServicer
    from kvrail.telemetry.series import Registry
    from kvrail.telemetry.worker import CodecMetrics, TransferMetrics
    from kvrail.worker.access import EngineAccess
    from kvrail.worker.codecs import Codecs
    from kvrail.worker.observing import KVMeters
    from kvrail.worker.status import ServedModel
    from kvrail.worker.transports import Transports

    engine: Any = StubEngine(asyncio.get_running_loop())
    cache: Any = SimpleNamespace(layout=SimpleNamespace(page_bytes=1, page_size=1))
    side: Any = None
    registry = Registry()

    async def no_grammar(key: Any, client: str) -> None:
        assert not key

    settings = DecodeSettings(local_prefill_tokens=0)
    loaded: Any = SimpleNamespace(fingerprint="")
    reporter: Any = None
    grammars: Any = SimpleNamespace(get=no_grammar)
    access = EngineAccess(engine, engine.events, cache, side)
    meters = KVMeters(TransferMetrics(registry, MODEL, (), ("received",)), CodecMetrics(registry, MODEL))
    parts = FetchParts(ServedModel(MODEL, loaded, ""), access, meters, Transports([]), 60.0, 1 << 20)
    codecs = Codecs(settings, allow_lossy=False)
    fetcher = Fetcher(parts, settings, codecs, "raw", "raw", GrpcPrefillWorkers())
    servicer = DecodeServicer(reporter, fetcher, grammars, ActiveCalls(), None, ())

    async def status(request: Any, context: Any) -> common_pb2.WorkerStatus:
        # running, waiting: microseconds of CPU that the loop's thread and the engine's have had
        return common_pb2.WorkerStatus(running=int(time.thread_time() * 1e6), waiting=int(engine.cpu_s * 1e6))

    servicer.GetStatus = status  # type: ignore[method-assign]
    rpc = await build_server()
    rpc.add_decode(servicer)
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    engine.start()
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
    roles = {"worker": serve_worker, "servicer": serve_servicer, "source": serve_source, "proxy": serve_proxy}
    loops.run(roles[sys.argv[1]](*sys.argv[2:]))
