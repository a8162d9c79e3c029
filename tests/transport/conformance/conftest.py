import asyncio
import gc
import os
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from kvrail.transport.base import Peer, Transport
from tests import children
from tests.transport.conformance.kinds import PARAMETERS, Kind
from tests.transport.conformance.peer import HOST

PATIENCE_S = 30
POOL_BYTES = 8 << 20


@dataclass
class Ends:
    """A sending and a receiving transport."""

    kind: Kind
    sender: Transport
    receiver: Transport

    @property
    def pool(self):
        """The receiver's pool; the test is skipped where the transport has none."""
        if self.kind.pool is None:
            pytest.skip("regions are the sender's memory")
        return self.kind.pool(self.receiver)

    async def open(self, key):
        """Both ends of an attempt, in the order of the handshake."""
        payload_sender = await self.sender.sender(Peer(self.receiver.address, HOST), key)
        return payload_sender, await self.receiver.receiver(Peer(self.sender.address, HOST), key)

    @asynccontextmanager
    async def attempt(self, key):
        """Both ends, closed in the end."""
        payload_sender, payload_receiver = await self.open(key)
        try:
            yield payload_sender, payload_receiver
        finally:
            await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())

    async def transfer(self, key, payloads):
        """A whole attempt; returns what arrived."""
        async with self.attempt(key) as (payload_sender, payload_receiver):
            _, *arrived = await asyncio.gather(
                self.send_all(payload_sender, payloads),
                *(self._arrival(payload_receiver, len(payload)) for payload in payloads),
            )
            return arrived

    def sending(self, payload_sender, data):
        """A `send` of bytes that lie where this transport's payloads do, begun."""
        return asyncio.create_task(payload_sender.send(self.kind.payload(data)))

    async def send_all(self, payload_sender, payloads):
        """Send several at once."""
        await asyncio.gather(*[payload_sender.send(payload) for payload in map(self.kind.payload, payloads)])

    async def receive(self, payload_receiver, size):
        """The region of the next payload."""
        return await payload_receiver.receive(size, on_device=self.kind.on_device)

    async def _arrival(self, payload_receiver, size):
        region = await self.receive(payload_receiver, size)
        arrived = self.kind.read(region)
        region.release()
        return arrived


def held():
    """What a process holds: descriptors and threads, but for those in which the tests themselves wait."""
    ours = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
    return len(os.listdir("/proc/self/fd")), len(ours)


async def until(condition):
    """Wait for something that follows by itself."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(params=PARAMETERS)
def kind(request):
    if why := request.param.unavailable():
        pytest.skip(why)
    return request.param


@pytest.fixture
def pool_bytes():
    return POOL_BYTES


@pytest.fixture
async def ends(kind, pool_bytes):
    """Two ends in this process. After the test nothing of it is left: regions, descriptors, threads."""
    children.ready()
    sender = await kind.start(pool_bytes)
    receiver = sender if kind.one_object else await kind.start(pool_bytes)
    if kind.pool is not None:
        kind.wipe(kind.pool(receiver).buffer)
    both = Ends(kind, sender, receiver)
    if kind.keeps:
        await both.transfer(999_999, [b"opens the way"])
        kind.wipe(kind.pool(receiver).buffer)
    before = held()[0]
    async with asyncio.timeout(PATIENCE_S * 4):
        yield both
        if kind.pool is not None:
            await until(lambda: kind.pool(receiver).free_bytes == kind.pool(receiver).buffer.numel())
        if not kind.on_device:  # CUDA opens its own when it likes
            await until(lambda: held()[0] <= before)
        await asyncio.gather(receiver.aclose(), *([] if kind.one_object else [sender.aclose()]))


@pytest.fixture(autouse=True)
def nothing_large_is_left():
    """What a test held is in cycles that the collector would find much later: too few objects for a gigabyte."""
    yield
    gc.collect(1)  # the young objects, of which they are: all would take a second
