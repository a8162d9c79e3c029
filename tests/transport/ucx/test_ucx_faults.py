"""Peers that die, stand still and come back, by tcp and by cma; what comes late; what is left over."""

import asyncio
import gc
import os
import random

import psutil
import pytest

from kvrail.errors import FrameError, TransferAbortedError
from kvrail.transport.base import Peer
from kvrail.transport.regions import host_pool
from kvrail.transport.ucx import UcxTransport, available
from kvrail.transport.ucx.library import load
from tests.transport.ucx.child import SETTINGS, SenderProcess, pattern

if why := available():
    pytest.skip(why, allow_module_level=True)

POOL = 256 << 20
PATIENCE_S = 30


@pytest.fixture(params=["tcp", "cma"])
def tls(request):
    return request.param


@pytest.fixture
async def transport(tls):
    transport = await UcxTransport.start(pool=host_pool(POOL), settings=SETTINGS[tls], grace_s=0.5)
    transport.pools.host.buffer.zero_()
    yield transport
    assert transport.pools.host.free_bytes == POOL
    assert transport.retired_bytes == 0
    await transport.aclose()


@pytest.fixture
def sender(tls):
    process = SenderProcess(tls)
    yield process
    process.kill()


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def receiving(transport, sender, size, times=1):
    """The receiver of an attempt that has begun, and its receives."""
    address = await sender.hear()
    key = random.getrandbits(64)
    await sender.send(transport.address, key, size, times)
    payload_receiver = await transport.receiver(Peer(address), key)
    return payload_receiver, [
        asyncio.create_task(payload_receiver.receive(size, on_device=False)) for _ in range(times)
    ]


async def released(tasks):
    """What each came to; its region is given back."""
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if not isinstance(end, BaseException):
            end.release()
    return ends


async def test_a_sender_dies_in_the_middle(transport, sender):
    """The payloads under way end by themselves: whole, where they had come, else as aborted; this process lives."""
    payload_receiver, tasks = await receiving(transport, sender, POOL // 4, 4)
    await until(lambda: transport.pools.host.buffer[0].item())
    sender.kill()
    async with asyncio.timeout(PATIENCE_S):
        ends = await released(tasks)
    assert any(isinstance(end, TransferAbortedError) for end in ends)
    await payload_receiver.aclose()
    await until(lambda: transport.endpoints == 0)


async def test_failed_payloads_keep_nothing_alive(transport, sender):
    """UCXX keeps a failed request's future for ever: a traceback in it would keep frames, and what they hold."""
    payload_receiver, tasks = await receiving(transport, sender, POOL // 4, 4)
    await until(lambda: transport.pools.host.buffer[0].item())
    sender.kill()
    ends = await released(tasks)
    assert any(isinstance(end, TransferAbortedError) for end in ends)
    await payload_receiver.aclose()
    await until(lambda: transport.endpoints == 0)
    futures = [each for each in gc.get_objects() if type(each) is asyncio.Future and each.done()]
    errors = [each.exception() for each in futures if not each.cancelled()]
    kept = [each for each in errors if isinstance(each, load().error)]
    assert kept
    assert [each for each in kept if each.__traceback__ is not None] == []


async def test_a_sender_stands_still_then_dies(transport, sender):
    payload_receiver, tasks = await receiving(transport, sender, POOL // 4, 4)
    await until(lambda: transport.pools.host.buffer[0].item())
    sender.stop()
    async with asyncio.timeout(PATIENCE_S):
        await payload_receiver.aclose()
        ends = await released(tasks)
    assert any(isinstance(end, TransferAbortedError) for end in ends)
    assert transport.pools.host.free_bytes == POOL
    sender.kill()
    await until(lambda: transport.endpoints == 0)


async def test_nothing_is_written_after_a_sender_that_stood_still_goes_on(transport, sender):
    payload_receiver, tasks = await receiving(transport, sender, POOL // 4, 4)
    await until(lambda: transport.pools.host.buffer[0].item())
    sender.stop()
    await payload_receiver.aclose()
    await released(tasks)
    transport.pools.host.buffer.zero_()  # the payload has no zero
    sender.go_on()
    assert await sender.hear() == "TransferAbortedError"
    await asyncio.sleep(0.2)
    assert not transport.pools.host.buffer.any()


async def test_a_receiver_gives_up_and_comes_again(transport, sender):
    """A sender that lives is told: its payloads are swept away, the endpoint stays, the next attempt is whole."""
    address = await sender.hear()
    for _ in range(10):
        key = random.getrandbits(64)
        await sender.send(transport.address, key, 4 << 20, 8)
        payload_receiver = await transport.receiver(Peer(address), key)
        tasks = [asyncio.create_task(payload_receiver.receive(4 << 20, on_device=False)) for _ in range(3)]
        await asyncio.sleep(random.random() * 0.01)
        tasks[0].cancel()
        async with asyncio.timeout(PATIENCE_S):
            await payload_receiver.aclose()
            assert await sender.hear() == "TransferAbortedError"
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and task.exception() is None:
                task.result().release()
        assert transport.pools.host.free_bytes == POOL
    assert transport.endpoints == 1
    key = random.getrandbits(64)
    await sender.send(transport.address, key, 4 << 20)
    payload_receiver = await transport.receiver(Peer(address), key)
    region = await payload_receiver.receive(4 << 20, on_device=False)
    assert bytes(region.payload) == pattern(4 << 20)
    region.release()
    assert await sender.hear() == "done"
    await payload_receiver.aclose()


async def test_a_payload_for_a_device_that_is_not_there_is_refused(transport, sender):
    payload_receiver, tasks = await receiving(transport, sender, 1000)
    await released(tasks)
    await asyncio.wait({payload_receiver._end})  # the sender has ended: that is no reason to say something else
    with pytest.raises(FrameError, match="device"):
        await payload_receiver.receive(1000, on_device=True)
    await payload_receiver.aclose()


async def test_20_restarts_of_a_peer_leave_nothing_behind(transport, tls):
    async def life(seed):
        process = SenderProcess(tls)
        try:
            payload_receiver, tasks = await receiving(transport, process, 8 << 20, 4)
            if seed % 2:  # killed while it sends
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                process.kill()
            await released(tasks)
            await payload_receiver.aclose()
        finally:
            process.kill()

    def held():
        return len(os.listdir("/proc/self/fd"))

    for seed in range(4):
        await life(seed)
    await until(lambda: transport.endpoints == 0)
    fds, memory = held(), psutil.Process().memory_info().rss
    for seed in range(4, 20, 2):
        await asyncio.gather(life(seed), life(seed + 1))
    await until(lambda: transport.endpoints == 0)
    await until(lambda: held() <= fds)
    assert psutil.Process().memory_info().rss < memory + (16 << 20)


@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_receiver_that_takes_nothing_ends(tls, size):
    """Short payloads wait for its word, long ones to be read."""
    sender = await UcxTransport.start(pool=host_pool(4096), settings=SETTINGS[tls], grace_s=0.1, silence_s=0.2)
    receiver = await UcxTransport.start(pool=host_pool(4096), settings=SETTINGS[tls], grace_s=0.1)
    payload_sender = await sender.sender(Peer(receiver.address), 7)
    async with asyncio.timeout(PATIENCE_S):
        sent = await asyncio.gather(
            *(payload_sender.send(memoryview(bytes(size))) for _ in range(2)), return_exceptions=True
        )
    assert all(isinstance(each, TransferAbortedError) for each in sent)
    assert any("took nothing" in str(each) for each in sent)
    await payload_sender.aclose()
    await sender.aclose()
    await receiver.aclose()


async def test_a_receiver_that_takes_one_payload_after_another_is_not_cut():
    """Together they wait longer than one may."""
    receiver = await UcxTransport.start(pool=host_pool(1 << 20), settings=SETTINGS["cma"])
    sender = await UcxTransport.start(pool=host_pool(4096), settings=SETTINGS["cma"], silence_s=4.0)
    payload_sender = await sender.sender(Peer(receiver.address), 7)
    sending = [asyncio.create_task(payload_sender.send(memoryview(pattern(100_000)))) for _ in range(4)]
    payload_receiver = await receiver.receiver(Peer(sender.address), 7)
    for _ in sending:
        await asyncio.sleep(1.2)
        (await payload_receiver.receive(100_000, on_device=False)).release()
    await asyncio.gather(*sending)
    await asyncio.gather(payload_sender.aclose(), payload_receiver.aclose())
    await sender.aclose()
    await receiver.aclose()


@pytest.mark.parametrize("answers", [True, False])
async def test_a_transport_that_closes_waits_for_its_receivers(tls, answers):
    """What it sent last may be on its way until they have ended; one that never does is given a grace."""
    sender = await UcxTransport.start(
        pool=host_pool(4096), settings=SETTINGS[tls], grace_s=PATIENCE_S if answers else 0.1
    )
    receiver = await UcxTransport.start(pool=host_pool(1 << 20), settings=SETTINGS[tls])
    payload_sender = await sender.sender(Peer(receiver.address), 7)
    payload_receiver = await receiver.receiver(Peer(sender.address), 7)
    sending = asyncio.create_task(payload_sender.send(memoryview(pattern(100_000))))
    (await payload_receiver.receive(100_000, on_device=False)).release()
    await sending
    await payload_sender.aclose()
    closing = asyncio.create_task(sender.aclose())
    async with asyncio.timeout(PATIENCE_S):
        if answers:
            done, _ = await asyncio.wait({closing}, timeout=0.3)
            assert not done
            await payload_receiver.aclose()
        await closing
    await payload_receiver.aclose()
    await receiver.aclose()
