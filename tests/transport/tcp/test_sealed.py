"""The data port under encryption: nothing can be read or changed on the way, and who is not meant is shown out."""

import asyncio
import contextlib
import socket

import pytest
import torch

from kvrail.errors import TransferAbortedError
from kvrail.transport.base import Peer
from kvrail.transport.regions import RegionPool
from kvrail.transport.tcp import TcpTransport, Timeouts
from kvrail.transport.tcp.messages import Address, hello, sealed_hello
from kvrail.transport.tcp.sealed import SEGMENT_BYTES, Keys, SealedStream, name_of, new_salt
from kvrail.transport.tcp.stream import Stream

HOST = "127.0.0.1"
HASTY = Timeouts(connect_s=5, hello_s=5, come_s=20, linger_s=0.3)
PAYLOAD = b"a prompt that nobody may read. " * (SEGMENT_BYTES // 20)


@pytest.fixture
async def ends():
    pool = RegionPool(torch.zeros(2 * len(PAYLOAD), dtype=torch.uint8))
    sender = await TcpTransport.start(host=HOST, timeouts=HASTY, sealed=True)
    receiver = await TcpTransport.start(pool, sealed=True)
    yield sender, receiver
    await receiver.aclose()
    await sender.aclose()
    assert pool.free_bytes == pool.buffer.numel()


class Tap:
    """A man in the middle: sees all bytes and changes those at one place of what the sender sends."""

    def __init__(self, port, change_at=None):
        self.port, self.change_at, self.seen = port, change_at, bytearray()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._relay, HOST, 0)
        return Peer(b"", HOST), self.server.sockets[0].getsockname()[1]

    async def __aexit__(self, *_):
        self.server.close()

    async def _relay(self, reader, writer):
        there, back = await asyncio.open_connection(HOST, self.port)
        await asyncio.gather(self._pass(reader, back, None), self._pass(there, writer, self.change_at))

    async def _pass(self, source, target, change_at):
        come = 0
        with contextlib.suppress(ConnectionError):
            while data := bytearray(await source.read(1 << 16)):
                self.seen += data
                if change_at is not None and come <= change_at < come + len(data):
                    data[change_at - come] ^= 1
                come += len(data)
                target.write(data)
                await target.drain()
            target.write_eof()


def through(transport, port):
    """The transport's address as a receiver gets it whose connections pass the tap."""
    address = Address.of(Peer(transport.address, HOST))
    return Peer(Address(port, address.secret).pack(), HOST)


async def transfer(sender, receiver, tap):
    async with tap as (_, port):
        payload_sender = await sender.sender(Peer(b""), 7)
        payload_receiver = await receiver.receiver(through(sender, port), 7)
        sending = asyncio.create_task(payload_sender.send(memoryview(PAYLOAD)))
        try:
            region = await payload_receiver.receive(len(PAYLOAD), on_device=False)
            arrived = bytes(region.payload)
            region.release()
            await sending
        finally:
            await payload_receiver.aclose()
            await payload_sender.aclose()
            await asyncio.gather(sending, return_exceptions=True)
        return arrived


async def test_nothing_can_be_read_on_the_way(ends):
    sender, receiver = ends
    tap = Tap(Address.of(Peer(sender.address, HOST)).port)
    assert await transfer(sender, receiver, tap) == PAYLOAD
    assert len(tap.seen) > len(PAYLOAD)
    assert PAYLOAD[:16] not in tap.seen and Address.of(Peer(sender.address, HOST)).secret not in tap.seen


@pytest.mark.parametrize("place", [3, 30, SEGMENT_BYTES + 50, len(PAYLOAD) + 10])
async def test_what_is_changed_on_the_way_ends_the_attempt(ends, place):
    """In the size, at the payload's begin, in its second segment, in the last tag."""
    sender, receiver = ends
    with pytest.raises(TransferAbortedError, match="not those that the other end sent"):
        await transfer(sender, receiver, Tap(Address.of(Peer(sender.address, HOST)).port, change_at=place))


@pytest.mark.parametrize("kind", ["without encryption", "of no attempt", "without the secret"])
async def test_strangers_are_shown_out(ends, kind):
    sender, _ = ends
    address = Address.of(Peer(sender.address, HOST))
    payload_sender = await sender.sender(Peer(b""), 7)
    said = {
        "without encryption": hello(address.secret, 7),
        "of no attempt": sealed_hello(name_of(address.secret, 8), bytes(24)),
        "without the secret": sealed_hello(name_of(bytes(32), 7), bytes(24)),
    }[kind]
    reader, writer = await asyncio.open_connection(HOST, address.port)
    writer.write(said)
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    assert not payload_sender.connected
    await payload_sender.aclose()


async def test_a_hello_that_is_heard_again_gives_nothing(ends):
    """Who repeats a hello has no key: what he asks for ends the attempt instead of being answered."""
    sender, _ = ends
    address = Address.of(Peer(sender.address, HOST))
    payload_sender = await sender.sender(Peer(b""), 7)
    reader, writer = await asyncio.open_connection(HOST, address.port)
    writer.write(sealed_hello(name_of(address.secret, 7), bytes(24)) + bytes(24))
    with pytest.raises(TransferAbortedError):
        await asyncio.wait_for(payload_sender.send(memoryview(PAYLOAD)), 20)
    await payload_sender.aclose()
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def test_a_payload_that_stands_still_between_two_segments_ends():
    listener = socket.create_server((HOST, 0))
    there = socket.create_connection(listener.getsockname())
    here, _ = listener.accept()
    keys = Keys.derive(b"secret", 1, new_salt())
    sender = SealedStream(Stream(there), keys, receiver=False)
    receiver = SealedStream(Stream(here, stall_s=0.2), keys, receiver=True)
    segment = memoryview(bytearray(SEGMENT_BYTES))
    sending = asyncio.create_task(asyncio.to_thread(sender.send, segment))
    receiving = asyncio.create_task(asyncio.to_thread(receiver.receive, segment, segment))
    try:
        await asyncio.wait((receiving,), timeout=20)
        assert receiving.done()
        with pytest.raises(TimeoutError, match="made no progress"):
            await receiving
    finally:
        receiver.shutdown()
        await asyncio.wait((sending, receiving))
        for each in (listener, there, here):
            each.close()
