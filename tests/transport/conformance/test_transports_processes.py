"""What holds for every transport where the other end is another process: it works, dies, stops and comes back."""

import asyncio
import contextlib

import pytest

from kvrail.errors import TransferAbortedError
from kvrail.transport.base import Peer
from tests.transport.conformance.conftest import held, until
from tests.transport.conformance.peer import HOST, PeerProcess, pattern

SIZE = 256 << 20
CLOSE_S = 20


@pytest.fixture
def kind(kind):
    if not kind.processes:
        pytest.skip("both ends are in one process")
    return kind


@pytest.fixture
def pool_bytes():
    return SIZE


@contextlib.contextmanager
def peer_of(kind, pool_bytes=1 << 20):
    peer = PeerProcess(kind, pool_bytes)
    try:
        yield peer
    finally:
        peer.kill()


@contextlib.asynccontextmanager
async def receiving(ends, peer, key, size=SIZE):
    """A receiver and its first `receive`, with the sender elsewhere."""
    peer.address = await peer.says()
    peer.order("send", ends.receiver.address, key, size)
    assert await peer.says() == "ready"
    payload_receiver = await ends.receiver.receiver(Peer(peer.address, HOST), key)
    task = asyncio.create_task(ends.receive(payload_receiver, size))
    try:
        yield payload_receiver, task
    finally:
        await payload_receiver.aclose()


async def begun(pool):
    """Return in the middle of a payload that is under way: its first byte is there."""
    async with asyncio.timeout(60):
        while not pool.buffer[0]:
            await asyncio.sleep(0)


async def ends_aborted(task, kind, end):
    """The task ends by itself where the transport notices; else once its end is closed, in bounded time."""
    if kind.notices_death:
        await asyncio.wait((task,), timeout=CLOSE_S)
        assert task.done()
    async with asyncio.timeout(CLOSE_S):
        await end.aclose()
    with pytest.raises(TransferAbortedError):
        await task


async def test_a_payload_from_and_to_another_process(ends):
    size = 10 << 20
    with peer_of(ends.kind, size) as peer:
        async with receiving(ends, peer, 1, size) as (_, task):
            region = await task
            assert ends.kind.read(region) == pattern(size)
            region.release()
        assert await peer.says() == "done"
        payload_sender = await ends.sender.sender(Peer(peer.address, HOST), 2)
        peer.order("receive", ends.sender.address, 2, size)
        assert await peer.says() == "ready"
        await payload_sender.send(ends.kind.payload(pattern(size)))
        assert await peer.says() == "done"
        await payload_sender.aclose()
        await peer.close()


async def test_the_sender_is_killed_in_the_middle(ends):
    if not ends.kind.needs_peer:
        pytest.skip("the payload is read from the sender's memory, whatever the sender does; see tests/transport/ucx")
    with peer_of(ends.kind) as peer:
        async with receiving(ends, peer, 1) as (payload_receiver, task):
            await begun(ends.pool)
            peer.stop()
            assert not ends.pool.buffer[-1], "the whole payload came before the sender could be stopped"
            peer.kill()
            await ends_aborted(task, ends.kind, payload_receiver)
    payload = pattern(1 << 20)
    assert await ends.transfer(9, [payload]) == [payload]


async def test_the_sender_stands_still_and_is_given_up(ends):
    if not ends.kind.needs_peer:
        pytest.skip("the payload is read from the sender's memory, whatever the sender does; see tests/transport/ucx")
    with peer_of(ends.kind) as peer:
        async with receiving(ends, peer, 1) as (payload_receiver, task):
            await begun(ends.pool)
            peer.stop()
            assert not ends.pool.buffer[-1], "the whole payload came before the sender could be stopped"
            async with asyncio.timeout(CLOSE_S):
                await payload_receiver.aclose()
            with pytest.raises(TransferAbortedError):
                await task
            assert ends.pool.free_bytes == SIZE
            ends.kind.wipe(ends.pool.buffer)  # the payload has no zero
            peer.go_on()
            assert await peer.says() == "TransferAbortedError"
            assert not ends.pool.buffer.any()
        await peer.close()


@contextlib.asynccontextmanager
async def sending_to_one_that_stopped(ends):
    """The peer, a sender and its first `send`, in whose middle the peer was stopped."""
    if ends.kind.on_device:
        pytest.skip("the whole payload leaves a GPU before the receiver could be stopped; see tests/gpu/test_ucx.py")
    with peer_of(ends.kind, SIZE) as peer:
        payload_sender = await ends.sender.sender(Peer(await peer.says(), HOST), 1)
        sending = ends.sending(payload_sender, pattern(SIZE))
        peer.order("receive", ends.sender.address, 1, SIZE)
        assert await peer.says() == "ready"
        async with asyncio.timeout(60):
            while not ends.kind.met(payload_sender):
                await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        peer.stop()
        assert not sending.done(), "the whole payload left before the receiver could be stopped"
        yield peer, payload_sender, sending


async def test_the_receiver_is_killed_in_the_middle(ends):
    async with sending_to_one_that_stopped(ends) as (peer, payload_sender, sending):
        peer.kill()
        await ends_aborted(sending, ends.kind, payload_sender)
    assert await ends.transfer(2, [b"after"]) == [b"after"]


async def test_the_receiver_stands_still_and_is_given_up(ends):
    async with sending_to_one_that_stopped(ends) as (peer, payload_sender, sending):
        async with asyncio.timeout(CLOSE_S):
            await payload_sender.aclose()
        with pytest.raises(TransferAbortedError):
            await sending
        peer.go_on()
        assert await peer.says() == "TransferAbortedError"
        await peer.close()


async def test_a_peer_comes_back_again_and_again(ends):
    size, holds = 1 << 20, []
    for key in range(3):
        with peer_of(ends.kind) as peer:
            async with receiving(ends, peer, key, size) as (_, task):
                region = await task
                assert ends.kind.read(region) == pattern(size)
                region.release()
        await asyncio.sleep(0.1)
        holds.append(held())
    await until(lambda: held()[0] <= holds[0][0] and held()[1] <= holds[0][1])
