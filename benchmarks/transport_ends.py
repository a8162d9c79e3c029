"""The roads that `benchmarks.transport` compares: how each one's two ends send and receive equal payloads.

A road's sender runs in another process; what it says of itself travels to the receiver as bytes.
"""

import asyncio
import importlib
import importlib.util
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio
import torch

from kvrail.transport.base import Peer, Transport
from kvrail.transport.regions import RegionPool
from kvrail.transport.tcp import TcpTransport
from kvrail.transport.tcp.messages import MOST_CONNECTIONS

HOST = "127.0.0.1"
UNDER_WAY = 2
"""Payloads that a receiver has asked for at once."""

Check = Callable[[memoryview], None]
"""Looks at a payload that has arrived."""


class Sender(Protocol):
    """A road's sending end."""

    @property
    def address(self) -> bytes:
        """Address for the receiver."""
        ...

    async def send(self, peer: bytes, key: int, payload: memoryview, count: int, ready: Callable[[], None]) -> None:
        """Send the payload `count` times, to the receiver that comes after `ready`."""


class Receiver(Protocol):
    """A road's receiving end."""

    @property
    def address(self) -> bytes:
        """Address for the sender."""
        ...

    async def receive(self, peer: bytes, key: int, size: int, count: int, check: Check) -> None:
        """Receive `count` payloads of `size` bytes."""


@dataclass(frozen=True)
class Road:
    """Makes both ends for payloads of a size in bytes."""

    name: str
    sender: Callable[[int], AbstractAsyncContextManager[Sender]]
    receiver: Callable[[int], AbstractAsyncContextManager[Receiver]]


class TransportEnd:
    """Either end of a transport, as transfers use it: announced payloads are received in order, and released."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def address(self) -> bytes:
        """The transport's."""
        return self._transport.address

    async def send(self, peer: bytes, key: int, payload: memoryview, count: int, ready: Callable[[], None]) -> None:
        """As a sender that announces without waiting."""
        payload_sender = await self._transport.sender(Peer(peer, HOST), key)
        ready()
        try:
            await asyncio.gather(*(payload_sender.send(payload) for _ in range(count)))
        finally:
            await payload_sender.aclose()

    async def receive(self, peer: bytes, key: int, size: int, count: int, check: Check) -> None:
        """As a receiver whose decoding costs nothing."""
        payload_receiver = await self._transport.receiver(Peer(peer, HOST), key)
        left = iter(range(count))

        async def in_turn() -> None:
            for _ in left:
                region = await payload_receiver.receive(size, on_device=False)
                if isinstance(region.payload, torch.Tensor):
                    raise SystemExit("a payload from the host arrived on a device")
                check(region.payload)
                region.release()

        try:
            await asyncio.gather(*(in_turn() for _ in range(UNDER_WAY)))
        finally:
            await payload_receiver.aclose()


def transport_road(name: str, start: Callable[[int], Awaitable[Transport]]) -> Road:
    """A transport; `start` takes the bytes of its pool."""

    @asynccontextmanager
    async def end(size: int) -> AsyncIterator[TransportEnd]:
        transport = await start((size + 4096) * UNDER_WAY)
        yield TransportEnd(transport)
        await transport.aclose()

    return Road(name, end, end)


async def start_tcp(pool_bytes: int) -> Transport:
    """The transport of the transport tcp."""
    pool = RegionPool(torch.zeros(pool_bytes, dtype=torch.uint8))
    return await TcpTransport.start(pool, host=HOST, connections=MOST_CONNECTIONS)


async def start_sealed_tcp(pool_bytes: int) -> Transport:
    """The same, encrypted."""
    pool = RegionPool(torch.zeros(pool_bytes, dtype=torch.uint8))
    return await TcpTransport.start(pool, host=HOST, connections=MOST_CONNECTIONS, sealed=True)


class BareSocketSender:
    """A bound: a thread that does nothing but `sendall` to each connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.address = self._listener.getsockname()[1].to_bytes(2)

    async def send(self, peer: bytes, key: int, payload: memoryview, count: int, ready: Callable[[], None]) -> None:
        """One connection for each round."""

        def serve() -> None:
            with self._listener.accept()[0] as sock:
                for _ in range(count):
                    sock.sendall(payload)

        ready()
        await asyncio.to_thread(serve)


class BareSocketReceiver:
    """A thread that does nothing but fill as many regions as a transport's receiver has, in turn."""

    address = b""

    def __init__(self, size: int) -> None:
        self._regions = [torch.zeros(size, dtype=torch.uint8).numpy().data.cast("B") for _ in range(UNDER_WAY)]

    async def receive(self, peer: bytes, key: int, size: int, count: int, check: Check) -> None:
        """One system call for each payload."""

        def fill() -> None:
            with socket.create_connection((HOST, int.from_bytes(peer))) as sock:
                for turn in range(count):
                    region = self._regions[turn % UNDER_WAY]
                    if sock.recv_into(region, size, socket.MSG_WAITALL) != size:
                        raise SystemExit("the sender ended early")
                    check(region)

        await asyncio.to_thread(fill)


_STREAM = "/kvrail.benchmark.Payloads/Stream"


class BareGrpcSender:
    """A bound of frames inside the call: one grpc.aio stream of bytes without protobuf."""

    def __init__(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
        self._payload, self._count = b"", 0
        stream = grpc.unary_stream_rpc_method_handler(self._stream)
        service, method = _STREAM[1:].split("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: stream}),))
        self._port = self._server.add_insecure_port(f"{HOST}:0")
        self._ended = asyncio.Event()
        self.address = self._port.to_bytes(2)

    async def start(self) -> None:
        """Serve."""
        await self._server.start()

    async def stop(self) -> None:
        """Serve no more."""
        await self._server.stop(0)

    async def send(self, peer: bytes, key: int, payload: memoryview, count: int, ready: Callable[[], None]) -> None:
        """One call for each round."""
        self._payload, self._count = bytes(payload), count
        self._ended.clear()
        ready()
        await self._ended.wait()

    async def _stream(self, request: bytes, context: grpc.aio.ServicerContext) -> None:
        for _ in range(self._count):
            await context.write(self._payload)
        self._ended.set()


class BareGrpcReceiver:
    """Reads messages; not even copied to where they belong."""

    address = b""

    async def receive(self, peer: bytes, key: int, size: int, count: int, check: Check) -> None:
        """One call."""
        options = [("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(f"{HOST}:{int.from_bytes(peer)}", options) as channel:
            async for message in channel.unary_stream(_STREAM)(b""):
                check(memoryview(message))


@asynccontextmanager
async def _bare_grpc_sender(size: int) -> AsyncIterator[Sender]:
    sender = BareGrpcSender()
    await sender.start()
    yield sender
    await sender.stop()


@asynccontextmanager
async def _bare_grpc_receiver(size: int) -> AsyncIterator[Receiver]:
    yield BareGrpcReceiver()


@asynccontextmanager
async def _bare_socket_sender(size: int) -> AsyncIterator[Sender]:
    yield BareSocketSender()


@asynccontextmanager
async def _bare_socket_receiver(size: int) -> AsyncIterator[Receiver]:
    yield BareSocketReceiver(size)


def roads() -> list[Road]:
    """All that can be compared here; `benchmarks.transport_ucx.start_transport` makes ucx's where the module is."""
    found = [
        transport_road("tcp", start_tcp),
        transport_road("tcp sealed", start_sealed_tcp),
        Road("bare socket", _bare_socket_sender, _bare_socket_receiver),
        Road("bare grpc.aio", _bare_grpc_sender, _bare_grpc_receiver),
    ]
    if importlib.util.find_spec("benchmarks.transport_ucx") is not None:
        ucx = importlib.import_module("benchmarks.transport_ucx")
        if not (why := ucx.unavailable()):
            found.insert(1, transport_road("ucx", ucx.start_transport))
        else:
            print(f"ucx left out: {why}")
    return found


class EngineLikeThread(threading.Thread):
    """Does what an engine's thread does to the interpreter's lock: small torch operations, one after the other."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.steps = 0
        self.cpu_s = 0.0
        self._stopping = False

    def run(self) -> None:
        """Step until `stop`."""
        torch.set_num_threads(1)
        weight, row = torch.randn(64, 64), torch.randn(1, 64)
        while not self._stopping:
            for _ in range(20):
                row = torch.tanh(row @ weight)
            self.steps += 1
            self.cpu_s = time.thread_time()

    def stop(self) -> None:
        """End it."""
        self._stopping = True
        self.join()
