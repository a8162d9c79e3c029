"""What holds for every transport with both ends in one process: payloads, order, room, sizes, keys."""

import asyncio
import contextlib
import random
import threading
import time

import pytest
import torch

from kvrail.errors import FrameError, TransferAbortedError, WorkerUnavailableError
from kvrail.transport.base import MAX_ADDRESS_BYTES, Peer
from tests.transport.conformance.conftest import POOL_BYTES, until
from tests.transport.conformance.peer import HOST, pattern

SIZES = [1, 2, 7, 8, 4095, 4096, 4097, 65_536, 1_000_003, 1 << 20, (4 << 20) + 1]


async def test_payloads_arrive_whole_and_in_order(ends):
    generator = random.Random(1)
    payloads = [generator.randbytes(size) for size in [*SIZES, *reversed(SIZES)]]
    async with ends.attempt(1) as (payload_sender, payload_receiver):
        for payload in payloads:  # one after the other
            sending = ends.sending(payload_sender, payload)
            region = await ends.receive(payload_receiver, len(payload))
            assert ends.kind.read(region) == payload
            region.release()
            await sending
    assert await ends.transfer(2, payloads) == payloads  # all under way at once


@pytest.mark.parametrize("pool_bytes", [1 << 26, pytest.param(1 << 30, marks=pytest.mark.heavy)])
async def test_a_payload_as_large_as_the_pool(ends, pool_bytes):
    def tensor(payload):
        return payload if isinstance(payload, torch.Tensor) else torch.frombuffer(payload, dtype=torch.uint8)

    payload = ends.kind.payload(pattern(pool_bytes))
    async with ends.attempt(1) as (payload_sender, payload_receiver):
        sending = asyncio.create_task(payload_sender.send(payload))
        region = await ends.receive(payload_receiver, pool_bytes)
        assert torch.equal(tensor(region.payload), tensor(payload))
        region.release()
        await sending


async def test_a_crossing_takes_no_longer_than_what_was_waited(ends):
    async with ends.attempt(1) as (payload_sender, payload_receiver):
        for seed in range(3):
            begin = time.perf_counter()
            sending = ends.sending(payload_sender, pattern(1 << 20, seed))
            region = await ends.receive(payload_receiver, 1 << 20)
            crossing_s, waited_s = region.crossing_s, time.perf_counter() - begin
            region.release()
            await sending
            assert crossing_s == 0 if ends.kind.one_object else 0 < crossing_s <= waited_s


async def test_a_crossing_is_no_longer_because_the_event_loop_is_late(ends):
    """Else a busy worker takes its own event loop for a slow link, and compresses."""
    async with ends.attempt(1) as (payload_sender, payload_receiver):
        for turns in (2, 5):
            sending = ends.sending(payload_sender, pattern(1 << 20))
            receiving = asyncio.create_task(ends.receive(payload_receiver, 1 << 20))
            for _ in range(turns):
                await asyncio.sleep(0)
            time.sleep(0.5)  # noqa: ASYNC251 - the loop is held up
            region = await receiving
            assert region.crossing_s < 0.5
            region.release()
            await sending


async def test_64_attempts_at_once_do_not_mix(ends):
    async def one(key):
        generator = random.Random(key)
        payloads = [generator.randbytes(generator.randint(1, 300_000)) for _ in range(6)]
        assert await ends.transfer(key, payloads) == payloads

    await asyncio.gather(*(one((1 << 63) + key) for key in range(64)))


async def test_a_payload_that_was_sent_is_read_no_more(ends):
    for key in range(8):
        want = pattern(1 << 20, key)
        payload = ends.kind.payload(want)
        async with ends.attempt(key) as (payload_sender, payload_receiver):
            sending = asyncio.create_task(payload_sender.send(payload))
            region = await ends.receive(payload_receiver, len(want))
            arrived = ends.kind.read(region)
            region.release()
            await sending
            ends.kind.wipe(payload)
            assert arrived == want


async def test_what_was_sent_arrives_though_the_sender_closes_at_once(ends):
    payloads = [pattern(2 << 20, seed) for seed in range(3)]
    for key in range(10):
        payload_sender, payload_receiver = await ends.open(key)

        async def send_and_close(payload_sender=payload_sender):
            await ends.send_all(payload_sender, payloads)
            await payload_sender.aclose()

        async def take_slowly(payload_receiver=payload_receiver):
            for payload in payloads:
                region = await ends.receive(payload_receiver, len(payload))
                await asyncio.sleep(0.005)
                assert ends.kind.read(region) == payload
                region.release()

        await asyncio.gather(send_and_close(), take_slowly())
        await payload_receiver.aclose()


async def test_send_waits_for_a_receiver_that_is_behind(ends):
    async with ends.attempt(1) as (payload_sender, payload_receiver):
        sending = ends.sending(payload_sender, pattern(4 << 20))
        await asyncio.sleep(0.05)
        assert not sending.done()
        (await ends.receive(payload_receiver, 4 << 20)).release()
        await sending


async def test_a_full_pool_is_waited_for(ends):
    room = ends.pool.buffer.numel() // 2
    payloads = [pattern(room, seed) for seed in range(5)]
    async with (
        ends.attempt(1) as (payload_sender, payload_receiver),
        ends.attempt(2) as (other_payload_sender, other_payload_receiver),
    ):
        sending = asyncio.create_task(ends.send_all(payload_sender, payloads))
        regions = [await ends.receive(payload_receiver, room) for _ in range(2)]
        assert ends.pool.free_bytes == 0
        third = asyncio.create_task(ends.receive(payload_receiver, room))
        # Another attempt waits as well, and is given up meanwhile.
        other = asyncio.create_task(ends.receive(other_payload_receiver, 10))
        other_sending = ends.sending(other_payload_sender, bytes(10))
        await asyncio.sleep(0.05)
        assert not third.done() and not other.done() and not sending.done()
        await other_payload_receiver.aclose()
        with pytest.raises(TransferAbortedError):
            await other
        with pytest.raises(TransferAbortedError):
            await other_sending
        for region in regions:
            threading.Thread(target=region.release).start()
        regions = [await third]
        for payload in payloads[2:]:
            assert ends.kind.read(regions[-1]) == payload
            regions.pop().release()
            if payload is not payloads[-1]:
                regions.append(await ends.receive(payload_receiver, room))
        await sending


async def test_regions_stay_valid_after_the_payload_receiver_is_closed(ends):
    payload_sender, payload_receiver = await ends.open(1)
    payload = pattern(1 << 20)
    sending = ends.sending(payload_sender, payload)
    region = await ends.receive(payload_receiver, len(payload))
    await payload_receiver.aclose()
    assert await ends.transfer(2, [bytes(1 << 20)] * 3) == [bytes(1 << 20)] * 3
    assert ends.kind.read(region) == payload
    region.release()
    region.release()
    await sending
    await payload_sender.aclose()


@pytest.mark.parametrize(("sent", "asked"), [(10, 11), (11, 10), (1 << 20, 1), (1, 1 << 20), (4 << 20, (4 << 20) - 1)])
async def test_another_size_is_a_frame_error(ends, sent, asked):
    async with ends.attempt(1) as (payload_sender, payload_receiver):
        first = ends.sending(payload_sender, b"abc")
        (await ends.receive(payload_receiver, 3)).release()
        await first
        sending = ends.sending(payload_sender, pattern(sent))
        with pytest.raises(FrameError):
            await ends.receive(payload_receiver, asked)
        await payload_receiver.aclose()
        with pytest.raises(TransferAbortedError):
            await ends.sending(payload_sender, pattern(1 << 20))
        await payload_sender.aclose()
        with contextlib.suppress(TransferAbortedError):  # it may have been read before it was refused
            await sending
    assert await ends.transfer(2, [b"after"]) == [b"after"]


async def test_what_the_pool_can_never_hold_is_refused(ends):
    size = ends.pool.buffer.numel() + 1
    async with ends.attempt(1) as (_, payload_receiver):
        with pytest.raises(FrameError, match=str(size)):
            await ends.receive(payload_receiver, size)
    assert await ends.transfer(2, [b"after"]) == [b"after"]


async def test_a_key_is_good_for_one_attempt(ends):
    key = 0x1234_5678_9ABC_DEF0
    assert await ends.transfer(key, [b"first"]) == [b"first"]
    payload_sender, payload_receiver = await ends.open(key + 1)
    with pytest.raises((TransferAbortedError, WorkerUnavailableError)):  # at the latest where it would receive
        stale = await ends.receiver.receiver(Peer(ends.sender.address, HOST), key)
        try:
            await ends.receive(stale, 5)
        finally:
            await stale.aclose()
    sending = ends.sending(payload_sender, b"later")
    region = await ends.receive(payload_receiver, 5)
    assert ends.kind.read(region) == b"later"
    region.release()
    await sending
    await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())


async def test_late_payloads_meet_nobody(ends):
    """A sender that was given up sends on; the next attempt with another key gets its own bytes."""
    payload_sender, payload_receiver = await ends.open(1)
    sends = [ends.sending(payload_sender, b"\xee" * (1 << 20)) for _ in range(3)]
    (await ends.receive(payload_receiver, 1 << 20)).release()
    await payload_receiver.aclose()
    mine = pattern(1 << 20)
    assert await ends.transfer(2, [mine] * 4) == [mine] * 4
    ended = await asyncio.gather(*sends, return_exceptions=True)
    assert ended[0] is None and all(isinstance(error, TransferAbortedError) for error in ended[1:])
    await payload_sender.aclose()


async def test_an_address_is_short_and_stays(ends):
    address = ends.sender.address
    assert len(address) <= MAX_ADDRESS_BYTES
    await ends.transfer(1, [b"x"])
    assert ends.sender.address == address


async def test_a_peer_that_is_not_there(kind):
    if kind.one_object:
        pytest.skip("both ends are one object")
    gone, receiver = await kind.start(POOL_BYTES), await kind.start(POOL_BYTES)
    address = gone.address
    await gone.aclose()
    with pytest.raises((WorkerUnavailableError, TransferAbortedError)):
        async with asyncio.timeout(60):
            payload_receiver = await receiver.receiver(Peer(address, HOST), 1)
            try:
                await payload_receiver.receive(10, on_device=kind.on_device)
            finally:
                await payload_receiver.aclose()
    pool = kind.pool(receiver)
    await until(lambda: pool.free_bytes == POOL_BYTES)
    await receiver.aclose()
