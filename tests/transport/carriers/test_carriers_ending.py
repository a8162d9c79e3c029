"""What holds for every carrier where an attempt ends early: cancelled or closed, on either end, at any moment."""

import asyncio

import pytest

from kvrail.errors import TransferAbortedError
from kvrail.transport.base import Peer
from tests.transport.carriers.peer import HOST, pattern

SIZE = 2 << 20
COUNT = 6
STAGES = range(24)


async def moment(stage):
    """Wait until the `stage`-th moment: turns of the loop at first, then ever longer times."""
    for _ in range(stage):
        await asyncio.sleep(0)
    if stage > 8:
        await asyncio.sleep(0.0002 * (stage - 8))


async def receive_in_turn(ends, inlet):
    for seed in range(COUNT):
        region = await ends.receive(inlet, SIZE)
        assert ends.kind.read(region) == pattern(SIZE, seed)
        region.release()


async def receive_side_by_side(ends, inlet):
    async def one(seed):
        region = await ends.receive(inlet, SIZE)
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


async def under_way(ends, stage, receive):
    """An attempt in the middle of things."""
    outlet, inlet = await ends.open(stage)
    sending = asyncio.create_task(ends.send_all(outlet, [pattern(SIZE, seed) for seed in range(COUNT)]))
    receiving = asyncio.create_task(receive(ends, inlet))
    await moment(stage)
    return outlet, inlet, sending, receiving


async def works(ends):
    """A new attempt is as good as the first."""
    payloads = [pattern(SIZE, 7), pattern(100, 8)]
    assert await ends.transfer((1 << 62) + 1, payloads) == payloads


@pytest.mark.parametrize("receive", [receive_in_turn, receive_side_by_side])
async def test_a_receive_is_cancelled(ends, receive):
    for stage in STAGES:
        outlet, inlet, sending, receiving = await under_way(ends, stage, receive)
        receiving.cancel()
        await ended(receiving)
        await inlet.aclose()
        await ended(sending)
        await outlet.aclose()
    await works(ends)


@pytest.mark.parametrize("receive", [receive_in_turn, receive_side_by_side])
async def test_a_send_is_cancelled(ends, receive):
    for stage in STAGES:
        outlet, inlet, sending, receiving = await under_way(ends, stage, receive)
        sending.cancel()
        await ended(sending)
        await outlet.aclose()
        await asyncio.gather(inlet.aclose(), ended(receiving))
    await works(ends)


@pytest.mark.parametrize("receive", [receive_in_turn, receive_side_by_side])
@pytest.mark.parametrize("first", ["inlet", "outlet", "both"])
async def test_an_end_is_closed(ends, receive, first):
    for stage in STAGES:
        outlet, inlet, sending, receiving = await under_way(ends, stage, receive)
        if first == "both":
            await asyncio.gather(inlet.aclose(), outlet.aclose())
        for end in (inlet, outlet) if first == "inlet" else (outlet, inlet):
            await end.aclose()
        await asyncio.gather(ended(sending), ended(receiving))
        await asyncio.gather(inlet.aclose(), outlet.aclose())  # a second call does nothing
    await works(ends)


async def test_closing_is_cancelled(ends):
    """Whoever is cancelled while he closes leaves nothing behind either."""
    for stage in STAGES:
        outlet, inlet, sending, receiving = await under_way(ends, stage, receive_side_by_side)
        closings = [asyncio.create_task(end.aclose()) for end in (inlet, outlet)]
        await moment(stage % 6)
        for closing in closings:
            closing.cancel()
        await asyncio.gather(*closings, return_exceptions=True)
        await asyncio.gather(inlet.aclose(), outlet.aclose())
        await asyncio.gather(ended(sending), ended(receiving))
    await works(ends)


async def test_the_ends_are_made_and_not_used(ends):
    for key in range(20):
        outlet, inlet = await ends.open(key)
        first, second = (outlet, inlet) if key % 2 else (inlet, outlet)
        await first.aclose()
        await second.aclose()
    lonely = await ends.sender.outlet(Peer(ends.receiver.address, HOST), 99)
    sending = ends.sending(lonely, b"nobody asks")
    await asyncio.sleep(0.01)
    await lonely.aclose()
    with pytest.raises(TransferAbortedError):
        await sending
    await works(ends)


async def test_use_after_the_end(ends):
    outlet, inlet = await ends.open(1)
    await asyncio.gather(inlet.aclose(), outlet.aclose())
    with pytest.raises(TransferAbortedError):
        await outlet.send(ends.kind.payload(b"x"))
    with pytest.raises(TransferAbortedError):
        await ends.receive(inlet, 1)


async def test_opening_is_cancelled(ends):
    for stage in range(12):
        outlet = await ends.sender.outlet(Peer(ends.receiver.address, HOST), stage)
        opening = asyncio.create_task(ends.receiver.inlet(Peer(ends.sender.address, HOST), stage))
        for _ in range(stage):
            await asyncio.sleep(0)
        opening.cancel()
        try:
            inlet = await opening
        except asyncio.CancelledError:
            pass
        else:
            await inlet.aclose()
        await outlet.aclose()
    await works(ends)


async def test_nothing_is_written_after_the_inlet_is_closed(ends):
    buffer = ends.pool.buffer
    for stage in STAGES:
        outlet, inlet, sending, receiving = await under_way(ends, stage, receive_side_by_side)
        await inlet.aclose()
        await ended(receiving)
        ends.kind.wipe(buffer)  # the payloads have no zero
        await asyncio.sleep(0.01)
        assert not buffer.any()
        await ended(sending)
        await outlet.aclose()
    await works(ends)
