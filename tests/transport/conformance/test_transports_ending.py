"""What holds for every transport where an attempt ends early: cancelled or closed, on either end, at any moment."""

import asyncio

import pytest

from kvrail.errors import TransferAbortedError
from kvrail.transport.base import Peer
from tests.transport.conformance.peer import HOST, pattern

SIZE = 2 << 20
COUNT = 6
STAGES = range(24)


async def moment(stage):
    """Wait until the `stage`-th moment: turns of the loop at first, then ever longer times."""
    for _ in range(stage):
        await asyncio.sleep(0)
    if stage > 8:
        await asyncio.sleep(0.0002 * (stage - 8))


async def receive_in_turn(ends, payload_receiver):
    for seed in range(COUNT):
        region = await ends.receive(payload_receiver, SIZE)
        assert ends.kind.read(region) == pattern(SIZE, seed)
        region.release()


async def receive_side_by_side(ends, payload_receiver):
    async def one(seed):
        region = await ends.receive(payload_receiver, SIZE)
        assert ends.kind.read(region) == pattern(SIZE, seed)
        region.release()

    await asyncio.gather(*map(one, range(COUNT)))


async def ended(task):
    """Wait for one that somebody ended or that was through; anything but an abort is a fault."""
    try:
        await task
    except (TransferAbortedError, asyncio.CancelledError):
        return True
    return False


async def under_way(ends, stage):
    """An attempt in the middle of things: payloads are received in turn and side by side, from stage to stage."""
    receive = receive_side_by_side if stage % 2 else receive_in_turn
    payload_sender, payload_receiver = await ends.open(stage)
    sending = asyncio.create_task(ends.send_all(payload_sender, [pattern(SIZE, seed) for seed in range(COUNT)]))
    receiving = asyncio.create_task(receive(ends, payload_receiver))
    await moment(stage)
    return payload_sender, payload_receiver, sending, receiving


async def works(ends):
    """A new attempt is as good as the first."""
    payloads = [pattern(SIZE, 7), pattern(100, 8)]
    assert await ends.transfer((1 << 62) + 1, payloads) == payloads


async def test_a_receive_is_cancelled(ends):
    for stage in STAGES:
        payload_sender, payload_receiver, sending, receiving = await under_way(ends, stage)
        receiving.cancel()
        await ended(receiving)
        await payload_receiver.aclose()
        await ended(sending)
        await payload_sender.aclose()
    await works(ends)


async def test_a_send_is_cancelled(ends):
    for stage in STAGES:
        payload_sender, payload_receiver, sending, receiving = await under_way(ends, stage)
        sending.cancel()
        await ended(sending)
        await payload_sender.aclose()
        await asyncio.gather(payload_receiver.aclose(), ended(receiving))
    await works(ends)


@pytest.mark.parametrize("first", ["receiver", "sender", "both"])
async def test_an_end_is_closed(ends, first):
    for stage in STAGES:
        payload_sender, payload_receiver, sending, receiving = await under_way(ends, stage)
        if first == "both":
            await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())
        for end in (payload_receiver, payload_sender) if first == "receiver" else (payload_sender, payload_receiver):
            await end.aclose()
        await asyncio.gather(ended(sending), ended(receiving))
        await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())  # a second call does nothing
    await works(ends)


async def test_closing_is_cancelled(ends):
    """Whoever is cancelled while he closes leaves nothing behind either."""
    for stage in STAGES:
        payload_sender, payload_receiver, sending, receiving = await under_way(ends, stage)
        closings = [asyncio.create_task(end.aclose()) for end in (payload_receiver, payload_sender)]
        await moment(stage % 6)
        for closing in closings:
            closing.cancel()
        await asyncio.gather(*closings, return_exceptions=True)
        await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())
        await asyncio.gather(ended(sending), ended(receiving))
    await works(ends)


async def test_the_ends_are_made_and_not_used(ends):
    for key in range(20):
        payload_sender, payload_receiver = await ends.open(key)
        first, second = (payload_sender, payload_receiver) if key % 2 else (payload_receiver, payload_sender)
        await first.aclose()
        await second.aclose()
    lonely = await ends.sender.sender(Peer(ends.receiver.address, HOST), 99)
    sending = ends.sending(lonely, b"nobody asks")
    await asyncio.sleep(0.01)
    await lonely.aclose()
    with pytest.raises(TransferAbortedError):
        await sending
    await works(ends)


async def test_use_after_the_end(ends):
    payload_sender, payload_receiver = await ends.open(1)
    await asyncio.gather(payload_receiver.aclose(), payload_sender.aclose())
    with pytest.raises(TransferAbortedError):
        await payload_sender.send(ends.kind.payload(b"x"))
    with pytest.raises(TransferAbortedError):
        await ends.receive(payload_receiver, 1)


async def test_opening_is_cancelled(ends):
    for stage in range(12):
        payload_sender = await ends.sender.sender(Peer(ends.receiver.address, HOST), stage)
        opening = asyncio.create_task(ends.receiver.receiver(Peer(ends.sender.address, HOST), stage))
        for _ in range(stage):
            await asyncio.sleep(0)
        opening.cancel()
        try:
            payload_receiver = await opening
        except asyncio.CancelledError:
            pass
        else:
            await payload_receiver.aclose()
        await payload_sender.aclose()
    await works(ends)


async def test_nothing_is_written_after_the_payload_receiver_is_closed(ends):
    buffer = ends.pool.buffer
    for stage in STAGES:
        payload_sender, payload_receiver, sending, receiving = await under_way(ends, stage)
        await payload_receiver.aclose()
        await ended(receiving)
        ends.kind.wipe(buffer)  # the payloads have no zero
        await asyncio.sleep(0.01)
        assert not buffer.any()
        await ended(sending)
        await payload_sender.aclose()
    await works(ends)
