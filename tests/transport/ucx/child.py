"""An end of an attempt in a process of its own, which the test stops and kills."""

import asyncio
import os
import signal

from kvrail.transport.base import Peer
from kvrail.transport.regions import host_pool
from kvrail.transport.ucx import UcxTransport, available
from tests import children
from tests.transport.ucx.starting import CMA, TCP

SETTINGS = {"tcp": TCP, "cma": CMA}


def pattern(size):
    """Bytes of which none is zero, that no shift of them repeats."""
    block = bytes((i * i // 7 + i) % 255 + 1 for i in range(65_521))
    return (block * (size // len(block) + 1))[:size]


async def _run(transport, pipe):
    transport = await UcxTransport.start(pool=host_pool(1 << 20), settings=SETTINGS[transport], grace_s=0.5)
    pipe.send(transport.address)
    while True:
        address, key, size, times = await asyncio.to_thread(pipe.recv)
        payload_sender = await transport.sender(Peer(address), key)
        payload = memoryview(pattern(size))
        pipe.send("ready")
        try:
            await asyncio.gather(*(payload_sender.send(payload) for _ in range(times)))
            said = "done"
        except Exception as error:  # noqa: BLE001 - the test reads it
            said = type(error).__name__
        await payload_sender.aclose()
        pipe.send(said)


def _main(transport, pipe):
    if why := available():
        raise SystemExit(why)
    asyncio.run(_run(transport, pipe))


class SenderProcess:
    """Sends what it is told to."""

    def __init__(self, transport):
        processes = children.context()
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_main, args=(transport, theirs), daemon=True)
        self._process.start()
        theirs.close()

    async def hear(self):
        return await asyncio.to_thread(self._pipe.recv)

    async def send(self, address, key, size, times=1):
        self._pipe.send((address, key, size, times))
        assert await self.hear() == "ready"

    def stop(self):
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self):
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self):
        self._process.kill()
        self._process.join(30)
        self._pipe.close()
