"""Payloads over several connections of one attempt: whole, in order, and all over where one of them ends."""

import asyncio
import contextlib
import random
import threading
import time

import pytest
import torch

from kvrail.errors import FrameError, TransferAbortedError
from kvrail.transport.base import Peer
from kvrail.transport.regions import RegionPool
from kvrail.transport.tcp import TcpTransport, Timeouts
from kvrail.transport.tcp.messages import (
    LEAST_PART_BYTES,
    MOST_CONNECTIONS,
    SIZE,
    Address,
    Place,
    hello,
    parts_of,
    sealed_hello,
)
from kvrail.transport.tcp.sealed import name_of
from kvrail.transport.tcp.stream import Stream, plain

HOST = "127.0.0.1"
HASTY = Timeouts(connect_s=5, hello_s=5, come_s=1, linger_s=0.3)
LARGE = MOST_CONNECTIONS * LEAST_PART_BYTES + 4711
HUGE = 64 << 20
POOL_BYTES = 4 * LARGE


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
async def ends(request):
    pool = RegionPool(torch.zeros(POOL_BYTES, dtype=torch.uint8))
    sender = await TcpTransport.start(host=HOST, timeouts=HASTY, sealed=request.param)
    receiver = await TcpTransport.start(pool, connections=MOST_CONNECTIONS, sealed=request.param)
    yield sender, receiver
    await receiver.aclose()
    await sender.aclose()
    assert pool.free_bytes == POOL_BYTES


def some_bytes(size):
    return random.Random(size).randbytes(size)


async def attempt(sender, receiver, key=7):
    return await sender.sender(Peer(b""), key), await receiver.receiver(Peer(sender.address, HOST), key)


async def taken(payload_receiver, size):
    region = await payload_receiver.receive(size, on_device=False)
    try:
        return bytes(region.payload)
    finally:
        region.release()


@pytest.mark.parametrize("connections", [1, 3, MOST_CONNECTIONS])
def test_parts_are_the_whole(connections):
    for size in (0, 1, LEAST_PART_BYTES, 2 * LEAST_PART_BYTES - 1, 2 * LEAST_PART_BYTES, LARGE, 10 * LARGE):
        parts = parts_of(size, connections)
        assert 1 <= len(parts) <= connections
        assert b"".join(bytes(range(256))[part] for part in parts_of(256, connections)) == bytes(range(256))
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == size
        assert len(parts) == 1 or all(part.stop - part.start >= LEAST_PART_BYTES for part in parts[:-1])


async def test_payloads_arrive_whole_and_in_order(ends):
    sender, receiver = ends
    pairs = [await attempt(sender, receiver, key) for key in (7, 8, 9)]
    sizes = (10, LARGE, 2 * LEAST_PART_BYTES, 1, LARGE + 1, 3 * LEAST_PART_BYTES + 5)

    async def one(payload_sender, payload_receiver, number):
        payloads = [some_bytes(size + number) for size in sizes]
        sent = [asyncio.create_task(payload_sender.send(memoryview(each))) for each in payloads]
        got = await asyncio.gather(*(taken(payload_receiver, len(each)) for each in payloads))
        assert got == payloads
        await asyncio.gather(*sent)
        await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())

    async with asyncio.timeout(60):
        await asyncio.gather(*(one(*pair, number) for number, pair in enumerate(pairs)))


async def test_further_ones_are_opened_once_a_payload_needs_them(ends):
    payload_sender, payload_receiver = await attempt(*ends)
    for size, count in ((10, 1), (2 * LEAST_PART_BYTES, 2), (LARGE, MOST_CONNECTIONS), (10, MOST_CONNECTIONS)):
        sending = asyncio.create_task(payload_sender.send(memoryview(some_bytes(size))))
        assert await taken(payload_receiver, size) == some_bytes(size)
        await sending
        assert len(payload_sender._connected()) == len(payload_receiver._connections) == count
    await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())


@pytest.mark.parametrize("number", [0, 1, MOST_CONNECTIONS - 1])
@pytest.mark.parametrize("end", ["sender", "receiver"])
async def test_where_one_is_cut_both_ends_hear_of_it(ends, number, end):
    """In the middle of a payload whose parts are more than the kernel keeps for whoever does not read."""
    sender, _ = ends
    Slow.may.clear()
    pool = RegionPool(torch.zeros(HUGE, dtype=torch.uint8))
    slow = await TcpTransport.start(pool, connections=MOST_CONNECTIONS, wrap=slowly, sealed=ends[1]._sealed)
    payload_sender, payload_receiver = await attempt(sender, slow)
    sending = asyncio.create_task(payload_sender.send(memoryview(bytes(HUGE))))
    receiving = asyncio.create_task(payload_receiver.receive(HUGE, on_device=False))
    async with asyncio.timeout(30):
        while min(map(len, (payload_sender._connected(), payload_receiver._connections))) < MOST_CONNECTIONS:
            await asyncio.sleep(0.01)
        connections = payload_sender._connected() if end == "sender" else payload_receiver._connections
        connections[number].stream.shutdown()
        Slow.may.set()
        for task in (sending, receiving):
            with pytest.raises(TransferAbortedError, match="is gone"):
                await task
        assert pool.free_bytes == HUGE
        await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())
    await slow.aclose()


async def slowly(sock, host):
    return Slow(sock)


class Slow(Stream):
    """Takes no part of a payload before it may."""

    may = threading.Event()

    def receive(self, *parts, begun=False, **limits):
        if parts[0].nbytes > LEAST_PART_BYTES:
            self.may.wait(20)
        super().receive(*parts, begun=begun, **limits)


@pytest.mark.parametrize("end", ["sender", "receiver"])
async def test_a_close_in_the_middle_leaves_nothing(ends, end):
    payload_sender, payload_receiver = await attempt(*ends)
    sending = asyncio.create_task(payload_sender.send(memoryview(bytes(LARGE))))
    second = asyncio.create_task(payload_sender.send(memoryview(bytes(LARGE))))
    receiving = asyncio.create_task(payload_receiver.receive(LARGE, on_device=False))
    await asyncio.sleep(0.002)
    async with asyncio.timeout(20):
        await (payload_sender if end == "sender" else payload_receiver).aclose()
        for task in (sending, second, receiving):
            with contextlib.suppress(TransferAbortedError):
                if (region := await task) is not None:
                    region.release()
        await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())


class Leaving(Stream):
    """Is in a payload's memory for a while after it was told to leave."""

    inside = 0

    def _in(self, function, parts, limits):
        Leaving.inside += 1
        try:
            function(*parts, **limits)
        finally:
            time.sleep(0.2)
            Leaving.inside -= 1

    def send(self, *parts):
        self._in(super().send, parts, {})

    def receive(self, *parts, **limits):
        self._in(super().receive, parts, limits)


async def leaving(sock, host):
    return Leaving(sock)


async def all_inside():
    async with asyncio.timeout(20):
        while Leaving.inside < MOST_CONNECTIONS:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["cancelled", "cut"])
async def test_who_gives_up_has_left_the_memory(how):
    """At the end of `send` and of `receive` no thread is in the payload, on whichever connection."""
    Slow.may.clear()
    pool = RegionPool(torch.zeros(HUGE, dtype=torch.uint8))
    sender = await TcpTransport.start(host=HOST, timeouts=HASTY, wrap=leaving)
    receiver = await TcpTransport.start(pool, connections=MOST_CONNECTIONS, wrap=slowly)
    payload_sender, payload_receiver = await attempt(sender, receiver)
    sending = asyncio.create_task(payload_sender.send(memoryview(bytes(HUGE))))
    receiving = asyncio.create_task(payload_receiver.receive(HUGE, on_device=False))
    await all_inside()
    if how == "cancelled":
        sending.cancel()
    else:
        payload_sender._connected()[2].stream.shutdown()
    with pytest.raises((asyncio.CancelledError, TransferAbortedError)):
        await sending
    assert Leaving.inside == 0
    Slow.may.set()
    with pytest.raises(TransferAbortedError):
        await receiving
    assert pool.free_bytes == HUGE
    await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())

    receiver._wrap, sender._wrap = leaving, plain
    payload_sender, payload_receiver = await attempt(sender, receiver)
    receiving = asyncio.create_task(payload_receiver.receive(HUGE, on_device=False))
    await all_inside()  # each waits for its part
    if how == "cancelled":
        receiving.cancel()
    else:
        payload_receiver._connections[2].stream.shutdown()
    with pytest.raises((asyncio.CancelledError, TransferAbortedError)):
        await receiving
    assert Leaving.inside == 0
    assert pool.free_bytes == HUGE
    await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())
    await receiver.aclose()
    await sender.aclose()


async def test_a_size_that_was_not_announced_is_told_to_both(ends):
    payload_sender, payload_receiver = await attempt(*ends)
    sending = asyncio.create_task(payload_sender.send(memoryview(bytes(LARGE))))
    async with asyncio.timeout(20):
        with pytest.raises(FrameError, match=rf"{LARGE} bytes came where {LARGE - 1}"):
            await payload_receiver.receive(LARGE - 1, on_device=False)
        with pytest.raises(TransferAbortedError):
            await sending
    await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())


async def said_by(transport, *, sealed, key, place, proven=True):
    """A connection that greets, and the transport's secret."""
    address = Address.of(Peer(transport.address, HOST))
    secret = address.secret if proven else bytes(32)
    said = sealed_hello(name_of(secret, key, place), bytes(24), place) if sealed else hello(secret, key, place)
    reader, writer = await asyncio.open_connection(HOST, address.port)
    writer.write(said)
    return reader, writer


async def is_shown_out(reader, writer):
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()


async def test_a_place_is_taken_once_by_who_proves_itself(ends):
    sender, _ = ends
    sealed = sender._sealed
    payload_sender = await sender.sender(Peer(b""), 7)
    for place, proven in ((Place(1, 4), True), (Place(0, 4), False), (Place(0, 5), True), (Place(4, 4), True)):
        await is_shown_out(*await said_by(sender, sealed=sealed, key=7, place=place, proven=proven))
    assert not payload_sender.connected
    peer = await said_by(sender, sealed=sealed, key=7, place=Place(0, 4))
    while not payload_sender.connected:
        await asyncio.sleep(0.01)
    for place, proven in ((Place(0, 4), True), (Place(1, 3), True), (Place(1, 4), False)):
        await is_shown_out(*await said_by(sender, sealed=sealed, key=7, place=place, proven=proven))
    await payload_sender.aclose()
    peer[1].close()


async def test_a_receiver_that_opens_too_few_is_given_up():
    sender = await TcpTransport.start(host=HOST, timeouts=Timeouts(come_s=0.3))
    payload_sender = await sender.sender(Peer(b""), 7)
    reader, writer = await said_by(sender, sealed=False, key=7, place=Place(0, 4))
    writer.write(SIZE.pack(LARGE))
    drain = asyncio.create_task(reader.read())
    with pytest.raises(TransferAbortedError, match=r"within 0\.3 s"):
        await asyncio.wait_for(payload_sender.send(memoryview(bytes(LARGE))), 20)
    await payload_sender.aclose()
    with contextlib.suppress(ConnectionError):
        await drain
    writer.close()
    await sender.aclose()
