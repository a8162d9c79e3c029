"""The transport `ucx` between two processes, on two GPUs if there are two: bits, mixed payloads, a peer that dies."""

import asyncio
import multiprocessing
import random

import pytest
import torch

from kvrail.errors import TransferAbortedError
from kvrail.transport.base import Peer
from kvrail.transport.regions import host_pool
from kvrail.transport.ucx import UcxTransport, available

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if why := available():
    pytest.skip(why, allow_module_level=True)

POOL = 1 << 30
SENDERS_GPU = torch.cuda.device_count() - 1
PATIENCE_S = 60
SIZES = [1, 7, 4096, 65_537, 8 << 20, (64 << 20) + 3, 512 << 20]


def payload(size, seed, device):
    """uint8 [size], the same on every device; no byte is zero."""
    numbers = torch.arange(size, dtype=torch.int64, device=device)
    return (((numbers * 2_654_435_761 + seed * 97) >> 13) % 255 + 1).to(torch.uint8)


async def _run(pipe):
    device = torch.device("cuda", SENDERS_GPU)
    torch.cuda.set_device(device)
    transport = await UcxTransport.start(
        pool=host_pool(1 << 20, pinned=True), device=device, device_bytes=1 << 20, grace_s=1
    )
    pipe.send((transport.address, transport.on_device))
    while (order := await asyncio.to_thread(pipe.recv)) is not None:
        address, key, sizes = order
        payloads = []
        for seed, (size, on_device) in enumerate(sizes):
            made = payload(size, seed, device)
            payloads.append(made if on_device else made.cpu().numpy().data)
        torch.cuda.synchronize(device)
        payload_sender = await transport.sender(Peer(address), key)
        pipe.send("ready")
        try:
            await asyncio.gather(*map(payload_sender.send, payloads))
            said = "done"
        except Exception as error:  # noqa: BLE001 - the test reads it
            said = type(error).__name__
        await payload_sender.aclose()
        pipe.send(said)
    await transport.aclose()


def _main(pipe):
    asyncio.run(_run(pipe))


class Sender:
    def __init__(self):
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_main, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    async def hear(self):
        return await asyncio.to_thread(self._pipe.recv)

    async def send(self, address, key, sizes):
        self._pipe.send((address, key, sizes))
        assert await self.hear() == "ready"

    def kill(self):
        self._process.kill()
        self._process.join(30)


@pytest.fixture
def sender():
    process = Sender()
    yield process
    process.kill()


@pytest.fixture
async def transport():
    torch.cuda.set_device(0)
    transport = await UcxTransport.start(
        pool=host_pool(POOL, pinned=True), device=torch.device("cuda", 0), device_bytes=POOL, grace_s=1
    )
    assert transport.on_device
    async with asyncio.timeout(240):
        yield transport
        assert transport.retired_bytes == 0
        for pool in (transport.pools.host, transport.pools.device):
            assert pool.free_bytes == POOL
        await transport.aclose()


async def attempt(transport, sender, peer, sizes):
    key = random.getrandbits(64)
    await sender.send(transport.address, key, sizes)
    return await transport.receiver(Peer(peer), key)


@pytest.mark.parametrize("where", ["device", "host", "mixed"])
async def test_payloads_are_the_same_bit_for_bit(transport, sender, where):
    peer, on_device = await sender.hear()
    assert on_device
    sizes = [(size, where == "device" or (where == "mixed" and turn % 2 == 0)) for turn, size in enumerate(SIZES)]
    for _ in range(2):
        payload_receiver = await attempt(transport, sender, peer, sizes)

        async def one(seed, size, on_device, payload_receiver=payload_receiver):
            region = await payload_receiver.receive(size, on_device=on_device)
            assert region.tensor.is_cuda == on_device
            assert torch.equal(region.tensor.cuda(0), payload(size, seed, "cuda:0"))
            region.release()

        await asyncio.gather(*(one(seed, *what) for seed, what in enumerate(sizes)))
        assert await sender.hear() == "done"
        await payload_receiver.aclose()
    assert transport.endpoints == 1


async def test_a_sender_dies_in_the_middle(transport):
    """What was under way ends, this process lives, and its memory is whole: the next sender's payloads arrive."""
    for pause_s in (0, 0.001, 0.003, 0.01):
        sender = Sender()
        peer, _ = await sender.hear()
        payload_receiver = await attempt(transport, sender, peer, [(256 << 20, True)] * 16)

        async def in_turn(payload_receiver=payload_receiver):
            for _ in range(16):
                (await payload_receiver.receive(256 << 20, on_device=True)).release()

        receiving = asyncio.create_task(in_turn())
        await asyncio.sleep(pause_s)
        sender.kill()
        async with asyncio.timeout(PATIENCE_S):
            (end,) = await asyncio.gather(receiving, return_exceptions=True)
            assert end is None or isinstance(end, TransferAbortedError)
            await payload_receiver.aclose()
    sender = Sender()
    try:
        peer, _ = await sender.hear()
        payload_receiver = await attempt(transport, sender, peer, [(8 << 20, True)])
        region = await payload_receiver.receive(8 << 20, on_device=True)
        assert torch.equal(region.tensor, payload(8 << 20, 0, "cuda:0"))
        region.release()
        await payload_receiver.aclose()
    finally:
        sender.kill()


async def test_a_receiver_gives_up_and_comes_again(transport, sender):
    peer, _ = await sender.hear()
    for turn in range(6):
        payload_receiver = await attempt(transport, sender, peer, [(64 << 20, True)] * 8)
        receiving = asyncio.create_task(payload_receiver.receive(64 << 20, on_device=True))
        await asyncio.sleep(0.001 * turn)
        await payload_receiver.aclose()
        assert await sender.hear() == "TransferAbortedError"
        (end,) = await asyncio.gather(receiving, return_exceptions=True)
        if not isinstance(end, BaseException):
            end.release()
    assert transport.endpoints == 1
