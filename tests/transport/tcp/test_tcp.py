"""The data port: who may come in, how long one may stand still, what is told of it."""

import asyncio
import contextlib
import os
import random
import socket
import threading

import pytest
import torch

from kvrail.errors import ConfigError, FrameError, TransferAbortedError, WorkerUnavailableError
from kvrail.transport.base import MAX_ADDRESS_BYTES, Peer
from kvrail.transport.regions import RegionPool, host_pool
from kvrail.transport.tcp import TcpTransport, Timeouts, ends
from kvrail.transport.tcp import transport as transport_module
from kvrail.transport.tcp.connection import Connection, stopped
from kvrail.transport.tcp.ends import TcpReceiver
from kvrail.transport.tcp.messages import (
    FIRST,
    HELLO_BYTES,
    KEY,
    MAGIC,
    SIZE,
    Address,
    hello,
    read_hello,
    sealed_hello,
)
from kvrail.transport.tcp.sealed import name_of
from kvrail.transport.tcp.stream import Stream

HOST = "127.0.0.1"
HASTY = Timeouts(connect_s=2, hello_s=0.3, come_s=20, linger_s=0.3)


def some_pool(size=1 << 20):
    return RegionPool(torch.zeros(size, dtype=torch.uint8))


@pytest.fixture
async def sender():
    transport = await TcpTransport.start(host=HOST, timeouts=HASTY)
    yield transport
    await transport.aclose()


@pytest.fixture
async def receiver():
    transport = await TcpTransport.start(some_pool())
    yield transport
    await transport.aclose()


class Stranger:
    """A connection that speaks for itself."""

    @classmethod
    async def come(cls, transport, said=b"", local=None):
        self = cls()
        self.address = Address.of(Peer(transport.address, HOST))
        self.reader, self.writer = await asyncio.open_connection(HOST, self.address.port, local_addr=local)
        self.writer.write(said)
        return self

    async def is_shown_out(self, patience_s=20):
        async with asyncio.timeout(patience_s):
            with contextlib.suppress(ConnectionResetError):
                assert await self.reader.read() == b""
        self.writer.close()


async def both(sender, receiver, key, payload=b"still works"):
    payload_sender = await sender.sender(Peer(b""), key)
    payload_receiver = await receiver.receiver(Peer(sender.address, HOST), key)
    sending = asyncio.create_task(payload_sender.send(memoryview(payload)))
    async with asyncio.timeout(20):
        region = await payload_receiver.receive(len(payload), on_device=False)
        assert bytes(region.payload) == payload
        region.release()
        await sending
        await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())


def address_of(transport):
    return Address.of(Peer(transport.address, HOST))


async def test_unproven_are_shown_out_and_get_nothing(sender, receiver):
    payload_sender = await sender.sender(Peer(b""), 7)
    secret = address_of(sender).secret
    wrong = bytes([secret[0] ^ 1]) + secret[1:]
    for said in (
        hello(wrong, 7),
        hello(secret, 8),
        hello(bytes(32), 7),
        b"\0" + hello(secret, 7)[1:],
        os.urandom(HELLO_BYTES),
        b"GET / HTTP/1.1\r\nHost: kvrail\r\nAccept: everything\r\n\r\n",
        os.urandom(1 << 20),
    ):
        await (await Stranger.come(sender, said)).is_shown_out()
    assert not payload_sender.connected
    await payload_sender.aclose()
    await (await Stranger.come(sender, hello(secret, 7))).is_shown_out()  # late: the sender has been closed
    await both(sender, receiver, 9)


async def test_the_silent_and_the_slow_are_shown_out(sender, receiver):
    silent = await Stranger.come(sender)
    half = await Stranger.come(sender, hello(address_of(sender).secret, 7)[:-1])
    dripping = await Stranger.come(sender)

    async def drip():
        for byte in bytes(HELLO_BYTES):
            dripping.writer.write(bytes([byte]))
            await asyncio.sleep(0.1)

    dropping = asyncio.create_task(drip())
    await asyncio.gather(*(stranger.is_shown_out() for stranger in (silent, half, dripping)))
    dropping.cancel()
    await both(sender, receiver, 9)


async def test_unproven_are_bounded_and_keep_nobody_out_for_long(sender, receiver, monkeypatch):
    monkeypatch.setattr(transport_module, "MAX_UNPROVEN", 4)
    threads = threading.active_count()
    crowd = [await Stranger.come(sender) for _ in range(20)]
    transfer = asyncio.create_task(both(sender, receiver, 9))
    most = 0
    while not transfer.done():
        most = max(most, threading.active_count() - threads)
        await asyncio.sleep(0.01)
    await transfer
    assert most <= 2, "a stranger had a thread"
    await asyncio.gather(*(stranger.is_shown_out() for stranger in crowd))


PATIENT = Timeouts(hello_s=3600, come_s=20)


@pytest.mark.parametrize("sealed", [False, True])
async def test_a_crowd_of_silent_unproven_does_not_delay_a_peer(monkeypatch, sealed):
    """None of the strangers would leave by itself: the oldest ones make room."""
    monkeypatch.setattr(transport_module, "MAX_UNPROVEN", 4)
    sender = await TcpTransport.start(host=HOST, timeouts=PATIENT, sealed=sealed)
    receiver = await TcpTransport.start(some_pool(), sealed=sealed)
    crowd = [await Stranger.come(sender) for _ in range(20)]
    await both(sender, receiver, 9)
    await asyncio.gather(*(stranger.is_shown_out() for stranger in crowd[:16]))
    assert not any(stranger.reader.at_eof() for stranger in crowd[17:])
    await sender.aclose()
    await receiver.aclose()
    await asyncio.gather(*(stranger.is_shown_out() for stranger in crowd[16:]))


async def test_unproven_of_one_host_do_not_show_out_another_hosts(monkeypatch):
    monkeypatch.setattr(transport_module, "MAX_UNPROVEN", 4)
    sender = await TcpTransport.start(host=HOST, timeouts=PATIENT)
    payload_sender = await sender.sender(Peer(b""), 7)
    peer = await Stranger.come(sender)  # the first of all, and slow to speak
    crowd = [await Stranger.come(sender, local=("127.0.0.2", 0)) for _ in range(20)]
    await asyncio.gather(*(stranger.is_shown_out() for stranger in crowd[:17]))
    peer.writer.write(hello(address_of(sender).secret, 7))
    async with asyncio.timeout(20):
        while not payload_sender.connected:
            await asyncio.sleep(0.01)
    await payload_sender.aclose()
    await sender.aclose()
    for each in (peer, *crowd):
        each.writer.close()


async def test_the_second_with_a_key_is_refused(sender, receiver):
    payload_sender = await sender.sender(Peer(b""), 7)
    payload_receiver = await receiver.receiver(Peer(sender.address, HOST), 7)
    sending = asyncio.create_task(payload_sender.send(memoryview(b"mine")))
    region = await payload_receiver.receive(4, on_device=False)
    await sending
    await (await Stranger.come(sender, hello(address_of(sender).secret, 7))).is_shown_out()
    with pytest.raises(TransferAbortedError, match="in use"):
        await sender.sender(Peer(b""), 7)
    assert bytes(region.payload) == b"mine"
    region.release()
    await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())


async def test_a_receiver_that_never_comes():
    sender = await TcpTransport.start(host=HOST, timeouts=Timeouts(come_s=0.3))
    payload_sender = await sender.sender(Peer(b""), 1)
    first, second = (asyncio.create_task(payload_sender.send(memoryview(b"x"))) for _ in range(2))
    for sending in (first, second):
        with pytest.raises(TransferAbortedError, match=r"within 0\.3 s"):
            await sending
    await payload_sender.aclose()
    await sender.aclose()


async def test_a_receiver_that_never_reads_the_rest_is_left(sender):
    payload_sender = await sender.sender(Peer(b""), 1)
    stranger = await Stranger.come(sender, hello(address_of(sender).secret, 1) + SIZE.pack(100) * 3)
    await payload_sender.send(memoryview(bytes(100)))
    await payload_sender.aclose()  # what has left may still be read, but not for ever
    async with asyncio.timeout(20):
        assert await stranger.reader.read() == SIZE.pack(100) + bytes(100)
        while sender._lingering:
            await asyncio.sleep(0.01)
    stranger.writer.close()


async def test_what_was_sent_arrives_though_more_was_asked_for(sender):
    """A close with grants unread would reset the connection and discard what the receiver has not read yet."""
    payload_sender = await sender.sender(Peer(b""), 1)
    payload = random.Random(0).randbytes(300_000)
    with socket.create_connection((HOST, address_of(sender).port)) as stranger:
        stranger.sendall(hello(address_of(sender).secret, 1) + SIZE.pack(len(payload)) * 3)
        async with asyncio.timeout(20):
            await payload_sender.send(memoryview(payload))
        await payload_sender.aclose()
        await asyncio.sleep(0.05)
        want = SIZE.pack(len(payload)) + payload
        assert stranger.recv(len(want), socket.MSG_WAITALL) == want


async def test_a_job_that_is_cancelled_has_stopped():
    """Whoever stops waiting for a thread may use its memory only once that thread has left it."""
    with socket.create_server((HOST, 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    connection, left, leave = Connection(Stream(ours)), threading.Event(), threading.Event()

    def job(stream):
        leave.wait(20)
        left.set()

    connection.run(job).cancel()
    waiting = asyncio.create_task(stopped([connection]))
    for _ in range(3):  # once and again
        await asyncio.sleep(0.01)
        waiting.cancel()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert left.is_set()
    await connection.aclose()
    assert theirs.recv(1) == b""
    theirs.close()


async def test_a_sender_that_waits_for_room_hears_of_the_close():
    """It must be told with a reset: of a mere end, a sender whose window is shut hears nothing for a minute."""
    with socket.create_server((HOST, 0)) as listener:
        sending = Connection(Stream(socket.create_connection(listener.getsockname())))
        receiver = Stream(listener.accept()[0])
    job = sending.run(lambda stream: stream.send(memoryview(bytes(256 << 20))))
    await asyncio.sleep(1)  # the receiver's buffer is full now
    receiver.shutdown()
    with pytest.raises(ConnectionResetError, match="closed"):  # it takes what lies there, as a thread in `receive` does
        receiver.receive(memoryview(bytearray(256 << 20)))
    receiver.close()
    with pytest.raises(ConnectionError):  # not TimeoutError
        await job
    await sending.aclose()


class FakeSender:
    """A listener in a thread that answers as it is told."""

    def __init__(self, answer):
        self._listener = socket.create_server((HOST, 0))
        self.peer = Peer(Address(self._listener.getsockname()[1], bytes(32)).pack(), HOST)
        self._thread = threading.Thread(target=self._serve, args=(answer,))
        self._thread.start()

    def _serve(self, answer):
        sock, _ = self._listener.accept()
        with sock:
            said = sock.recv(HELLO_BYTES + SIZE.size, socket.MSG_WAITALL)
            assert read_hello(MAGIC, said[:HELLO_BYTES]) == (bytes(32) + KEY.pack(5), FIRST)
            for part in answer:
                sock.sendall(part)
            while sock.recv(100):
                pass

    def close(self):
        self._thread.join(20)
        self._listener.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ([SIZE.pack(101) + bytes(100)], FrameError),
        ([SIZE.pack(0) + bytes(100)], FrameError),
        ([SIZE.pack((1 << 64) - 2) + bytes(4096)], FrameError),
        ([SIZE.pack(100) + bytes(100) + bytes(1 << 16)], None),  # what nobody asked for is not read
    ],
)
async def test_what_a_sender_says_is_held_against_what_was_asked(receiver, answer, error):
    buffer = receiver.pool.buffer
    buffer.fill_(7)
    fake = FakeSender(answer)
    payload_receiver = await receiver.receiver(fake.peer, 5)
    if error is None:
        region = await payload_receiver.receive(100, on_device=False)
        assert bytes(region.payload) == bytes(100)
        region.release()
    else:
        with pytest.raises(error):
            await payload_receiver.receive(100, on_device=False)
    await payload_receiver.aclose()
    await asyncio.to_thread(fake.close)
    assert bool((buffer[100:] == 7).all()), "bytes outside of the region were written"
    assert receiver.pool.free_bytes == buffer.numel()


@pytest.mark.parametrize("begun", [0, 10])
async def test_a_payload_that_stands_still_ends(receiver, begun):
    async def hasty(sock, host):
        return Stream(sock, stall_s=0.2)

    transport = await TcpTransport.start(some_pool(), wrap=hasty)
    fake = FakeSender([SIZE.pack(1000) + bytes(begun)])
    payload_receiver = await transport.receiver(fake.peer, 5)
    with pytest.raises(TransferAbortedError, match="made no progress"):
        await payload_receiver.receive(1000, on_device=False)
    await payload_receiver.aclose()
    await asyncio.to_thread(fake.close)
    assert transport.pool.free_bytes == transport.pool.buffer.numel()
    await transport.aclose()


async def test_a_crossing_is_timed_from_the_first_byte_to_the_last(receiver, monkeypatch):
    begun, times = threading.Event(), iter([10.0, 12.5])

    def clock():
        begun.set()
        return next(times)

    def answer():
        yield b"" if begun.is_set() else SIZE.pack(1000) + bytes(10)  # what comes before is not timed
        if begun.wait(20):
            yield bytes(990)

    monkeypatch.setattr(ends, "perf_counter", clock)
    fake = FakeSender(answer())
    payload_receiver = await receiver.receiver(fake.peer, 5)
    region = await payload_receiver.receive(1000, on_device=False)
    assert region.crossing_s == 2.5
    region.release()
    await payload_receiver.aclose()
    await asyncio.to_thread(fake.close)


async def test_a_receiver_that_stands_still_in_a_payload_ends():
    async def hasty(sock, host):
        return Stream(sock, stall_s=0.2)

    sender = await TcpTransport.start(host=HOST, wrap=hasty)
    payload_sender = await sender.sender(Peer(b""), 1)
    size = 256 << 20
    stranger = socket.create_connection((HOST, address_of(sender).port))
    stranger.sendall(hello(address_of(sender).secret, 1))
    sending = asyncio.create_task(payload_sender.send(memoryview(bytes(size))))
    await asyncio.sleep(0.5)
    assert not sending.done()  # no room has been granted: that is no stall
    stranger.sendall(SIZE.pack(size))
    with pytest.raises(TransferAbortedError, match="made no progress"):
        await sending
    await payload_sender.aclose()
    stranger.close()
    await sender.aclose()


@pytest.mark.parametrize("sealed", [False, True])
async def test_a_receiver_that_takes_nothing_ends(sealed):
    """It proves itself and never asks for a payload: the sender's pages wait for it no longer than that."""

    async def hasty(sock, host):
        return Stream(sock, stall_s=0.1)

    sender = await TcpTransport.start(host=HOST, timeouts=Timeouts(silence_s=0.3), wrap=hasty, sealed=sealed)
    payload_sender = await sender.sender(Peer(b""), 1)
    secret = address_of(sender).secret
    said = sealed_hello(name_of(secret, 1), bytes(24)) if sealed else hello(secret, 1)
    stranger = await Stranger.come(sender, said)
    async with asyncio.timeout(20):
        sent = await asyncio.gather(
            *(payload_sender.send(memoryview(bytes(100))) for _ in range(2)), return_exceptions=True
        )
    assert all(isinstance(each, TransferAbortedError) and "took nothing for 0.3 s" in str(each) for each in sent)
    await payload_sender.aclose()
    await stranger.is_shown_out()
    await sender.aclose()


async def test_a_slow_receiver_that_still_moves_is_not_cut():
    sender = await TcpTransport.start(host=HOST, timeouts=Timeouts(silence_s=0.05))
    payload_sender = await sender.sender(Peer(b""), 1)
    payload = random.Random(0).randbytes(8 << 20)  # more than the kernel keeps for a receiver that does not read
    stranger = await Stranger.come(sender, hello(address_of(sender).secret, 1) + SIZE.pack(len(payload)))
    sending, got = asyncio.create_task(payload_sender.send(memoryview(payload))), bytearray()
    async with asyncio.timeout(60):
        assert await stranger.reader.readexactly(SIZE.size) == SIZE.pack(len(payload))
        while len(got) < len(payload):
            got += await stranger.reader.read(1 << 20)
            await asyncio.sleep(0.02)
        await sending
    assert bytes(got) == payload
    await payload_sender.aclose()
    stranger.writer.close()
    await sender.aclose()


async def test_devices_are_refused(sender, receiver):
    payload_sender = await sender.sender(Peer(b""), 1)
    payload_receiver = await receiver.receiver(Peer(sender.address, HOST), 1)
    with pytest.raises(FrameError, match="copy the payload to the host"):
        await payload_sender.send(torch.empty(10, dtype=torch.uint8, device="meta"))
    with pytest.raises(FrameError, match="copy the payload to the host"):
        await payload_receiver.receive(10, on_device=True)
    assert not sender.on_device
    await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())


async def test_addresses():
    secret = random.Random(0).randbytes(32)
    packed = Address(4711, secret).pack()
    assert len(packed) <= MAX_ADDRESS_BYTES
    assert Address.of(Peer(packed, "called")) == Address(4711, secret, "called")
    for bad in (b"", b"\1", packed[:10], b"\1" + packed[1:], packed + bytes(5000), Address(0, secret).pack()):
        with pytest.raises(WorkerUnavailableError, match="data port"):
            Address.of(Peer(bad, "host"))
    with pytest.raises(WorkerUnavailableError, match="host ''"):
        Address.of(Peer(packed))


async def test_a_sender_does_not_choose_which_host_is_connected_to(receiver):
    """Nobody connects to the listener that the address names."""
    with socket.create_server(("127.0.0.2", 0)) as elsewhere:
        told = Address(elsewhere.getsockname()[1], bytes(32)).pack() + b"127.0.0.2"
        with pytest.raises(WorkerUnavailableError, match=r"the host that was called \(127\.0\.0\.1\)"):
            await receiver.receiver(Peer(told, HOST), 5)
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


async def test_a_connection_that_is_not_answered_has_a_reason(monkeypatch):
    monkeypatch.setattr(transport_module, "_connect", lambda host, port: asyncio.sleep(3600))
    receiver = await TcpTransport.start(some_pool(), timeouts=Timeouts(connect_s=0.05))
    with pytest.raises(WorkerUnavailableError, match="TimeoutError; is the"):
        await receiver.receiver(Peer(Address(1, bytes(32)).pack(), HOST), 5)
    await receiver.aclose()


async def test_an_end_that_lacks_a_part_says_so(sender, receiver):
    with pytest.raises(ConfigError, match="pool"):
        await sender.receiver(Peer(sender.address, HOST), 1)
    with pytest.raises(ConfigError, match="listen"):
        await receiver.sender(Peer(b""), 1)
    with pytest.raises(ConfigError, match="another host or port"):
        await TcpTransport.start(host=HOST, port=address_of(sender).port)
    with pytest.raises(WorkerUnavailableError, match="data port"):
        await receiver.receiver(Peer(receiver.address, HOST), 1)


async def test_secrets_differ():
    transports = [await TcpTransport.start(host=HOST) for _ in range(2)]
    assert len({address_of(transport).secret for transport in transports}) == 2
    for transport in transports:
        await transport.aclose()


async def test_connections_that_were_made_are_closed_if_the_transfer_is_given_up_as_another_fails():
    made = []

    async def connected():
        listener = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(listener.getsockname())
        theirs.append(listener.accept()[0])
        listener.close()
        return Connection(Stream(ours))

    async def further(place):
        if place.number == 1:
            made.append(await connected())
            return made[0]
        if place.number == 2:
            await asyncio.sleep(0.05)
            raise WorkerUnavailableError("refused")
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)

    theirs = []
    receiver = TcpReceiver(await connected(), host_pool(64 << 20), 4, further)
    receiving = asyncio.create_task(receiver.receive(8 << 20, on_device=False))
    await asyncio.sleep(0.07)  # the second one has failed, the third one is ending
    receiving.cancel()
    await asyncio.wait([receiving])
    await receiver.aclose()
    closed = made[0].stream._sock.fileno() < 0
    await made[0].aclose()
    assert receiving.cancelled() and closed
    for each in theirs:
        each.close()
