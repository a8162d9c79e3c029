"""An end of an attempt in a process of its own, told what to do through a pipe."""

import asyncio
import functools
import os
import random
import signal

from kvrail.transport.base import Peer
from tests import children
from tests.transport.conformance.kinds import TRANSPORTS

HOST = "127.0.0.1"
KEPT_BYTES = 4 << 20
"""Patterns of so many bytes are made once: tests ask for the same again and again, and compare with them."""


@functools.lru_cache(maxsize=16)
def _small_pattern(size, seed):
    return _pattern(size, seed)


def pattern(size, seed=0):
    """Bytes of which none is zero, and neighbouring blocks are not in step with pages."""
    return _small_pattern(size, seed) if size <= KEPT_BYTES else _pattern(size, seed)


def _pattern(size, seed):
    block = random.Random(seed).randbytes(65_521).replace(b"\0", b"\1")
    return (block * (size // len(block) + 1))[:size]


async def _send(kind, transport, peer, key, size):
    payload_sender = await transport.sender(peer, key)
    yield
    try:
        await payload_sender.send(kind.payload(pattern(size)))
    finally:
        await payload_sender.aclose()


async def _receive(kind, transport, peer, key, size):
    yield
    payload_receiver = await transport.receiver(peer, key)
    try:
        region = await payload_receiver.receive(size, on_device=kind.on_device)
        if kind.read(region) != pattern(size):
            raise ValueError("other bytes arrived")
        region.release()
    finally:
        await payload_receiver.aclose()


async def _serve(kind, pool_bytes, pipe):
    transport = await kind.start(pool_bytes)
    pipe.send(transport.address)
    while (order := await asyncio.to_thread(pipe.recv)) is not None:
        verb, address, key, size = order
        try:
            async for _ in {"send": _send, "receive": _receive}[verb](kind, transport, Peer(address, HOST), key, size):
                pipe.send("ready")
            pipe.send("done")
        except Exception as error:  # noqa: BLE001 - the test reads it
            pipe.send(type(error).__name__)
    await transport.aclose()
    pipe.send("closed")


def _main(name, pool_bytes, pipe):
    (kind,) = (kind for kind in TRANSPORTS if kind.name == name)
    asyncio.run(_serve(kind, pool_bytes, pipe))


class PeerProcess:
    """A worker elsewhere, which can be stopped and killed."""

    def __init__(self, kind, pool_bytes=1 << 20):
        self.address = b""  # once it has said it
        processes = children.context()
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_main, args=(kind.name, pool_bytes, theirs), daemon=True)
        self._process.start()
        theirs.close()

    async def says(self, patience_s=60):
        """What it says next."""

        def read():
            if not self._pipe.poll(patience_s):
                raise TimeoutError("the peer's process says nothing")
            return self._pipe.recv()

        return await asyncio.to_thread(read)

    def order(self, verb, address, key, size):
        """Let it send or receive one payload."""
        self._pipe.send((verb, address, key, size))

    async def close(self):
        """Let it end by itself."""
        self._pipe.send(None)
        assert await self.says() == "closed"
        await asyncio.to_thread(self._process.join, 30)
        assert self._process.exitcode == 0

    def stop(self):
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self):
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self):
        """Kill it, if it lives; stopped or not."""
        if self._pipe.closed:
            return
        self._process.kill()
        self._process.join(30)
        self._process.close()
        self._pipe.close()
