"""A page write that is enqueued when its transfer fails: nobody computes into that page, or gets it, before it is over.

On a GPU the write stands behind a long spin on the side stream; on the CPU a thread does it after a while.
"""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
import torch

from kvrail.codec.raw.codec import RawCodec
from kvrail.errors import WorkerUnavailableError
from kvrail.transfer.streams import SideStream
from tests.cluster.staged import on_send, with_payload
from tests.cluster.test_codecs import content
from tests.cluster.test_equality import prompt_of
from tests.cluster.test_faults import value
from tests.gpu.devices import CARRIED, DEVICES, at_rest, forget, landed, lean_cluster
from tests.models import tiny_model

LENGTH = 300
DECODE = {"num_pages": 20}
"""A second prompt must take pages of the first."""
FRAME = {"max_frame_bytes": 1 << 15}
"""A prompt's first frame brings so many of its pages that the second prompt gets some of them."""
SPIN_CYCLES = 2_000_000_000
"""Of a GPU, about a second; the prompt and its answer are computed in less than half of that."""
SPIN_S = 0.5


class LateWrites:
    """Decoding of raw payloads is enqueued behind a spin, once `spins` is set."""

    def __init__(self, monkeypatch, device):
        self.spins = False
        self.enqueued = threading.Event()
        self.side = None  # the decode worker's
        self._device = device
        self._writes, self._thread = [], ThreadPoolExecutor(1)  # the side stream of a CPU
        self._decode, self._synchronize = RawCodec.decode, SideStream.synchronize
        monkeypatch.setattr(RawCodec, "decode", lambda *args: self._enqueue(*args))
        monkeypatch.setattr(SideStream, "synchronize", lambda side: self._wait(side))

    def _enqueue(self, codec, stage, payloads, out):
        if not self.spins:
            self._decode(codec, stage, payloads, out)
        elif self._device == "cuda":
            torch.cuda._sleep(SPIN_CYCLES)
            self._decode(codec, stage, payloads, out)
        else:
            copies = [memoryview(bytes(payload)) for payload in payloads]
            self._writes.append(self._thread.submit(self._later, codec, stage, copies, out))
        self.enqueued.set()

    def _later(self, codec, stage, payloads, out):
        time.sleep(SPIN_S)
        self._decode(codec, stage, payloads, out)

    def _wait(self, side):
        self._synchronize(side)
        if side is self.side:
            wait(self._writes)

    def landed(self):
        landed(self._device)
        wait(self._writes)


def negated(payload):
    """Other numbers, all finite: bfloat16 with the other sign."""
    if isinstance(payload, torch.Tensor):
        wrong = (payload.view(torch.int16) ^ -0x8000).view(torch.uint8)
        landed("cuda")
        return wrong
    return memoryview((np.frombuffer(payload, np.uint16) ^ 0x8000).view(np.uint8))


def fail_behind_a_wrong_write(monkeypatch, late):
    """The first frame brings wrong numbers, well framed; once their write is enqueued the worker is lost."""

    async def dying(sender, header, stage):
        if header.sequence == 0:
            return with_payload(stage, negated(stage.payload), sealed=True)
        while not late.enqueued.is_set():
            await asyncio.sleep(0.001)
        raise WorkerUnavailableError("the worker died")

    on_send(monkeypatch, dying)


@pytest.fixture(params=["waits", "does not wait"])
def waits(request):
    """Whether the side stream is waited for. Where it is not, these tests must see it, or they see nothing."""
    return request.param == "waits"


def unless(waits, monkeypatch):
    if not waits:
        monkeypatch.setattr(SideStream, "synchronize", lambda side: None)


async def pages_of(c, late, prompt):
    """Bits of the full pages of a prompt once all writes have landed."""
    await c.settled()
    late.landed()
    return [pool.clone() for pool in content(c.decode, prompt)]


def equal(ours, theirs):
    return all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transport", CARRIED)
async def test_a_prompt_is_computed_here_after_the_late_write(monkeypatch, device, transport, waits):
    late = LateWrites(monkeypatch, device)
    async with lean_cluster(tiny_model("llama"), transport, device, decode=DECODE, **FRAME) as c:
        late.side, prompt = c.decode.access.side, prompt_of(LENGTH)
        undisturbed = await c.ask(prompt, local=True)
        pages = await pages_of(c, late, prompt)
        fail_behind_a_wrong_write(monkeypatch, late)
        for spins in (False, True):  # the first time all is compiled and all memory taken
            forget(c.decode, *c.prefills.values())
            late.enqueued.clear()
            late.spins = spins
            if spins:
                unless(waits, monkeypatch)
            answer = await c.ask(prompt, codec="raw")
            assert not answer.summary.prefill_worker and value(c.decode, "local") == spins + 1
            same = equal(await pages_of(c, late, prompt), pages)
            assert same == (waits or not spins)
            assert answer.tokens == undisturbed.tokens or not waits
        await at_rest(c)


@pytest.mark.parametrize("device", DEVICES)
async def test_pages_go_to_others_after_the_late_write(monkeypatch, device, waits):
    """The client leaves while the write is enqueued; another prompt needs the same pages."""
    late = LateWrites(monkeypatch, device)
    async with lean_cluster(tiny_model("llama"), "tcp", device, decode=DECODE, **FRAME) as c:
        late.side, other = c.decode.access.side, prompt_of(LENGTH, seed=1)
        undisturbed = await c.ask(other, local=True)
        pages = await pages_of(c, late, other)
        fail_behind_a_wrong_write(monkeypatch, late)
        for spins in (False, True):
            forget(c.decode, *c.prefills.values())
            late.enqueued.clear()
            late.spins = spins
            if spins:
                unless(waits, monkeypatch)
            leaving = asyncio.create_task(c.ask(prompt_of(LENGTH), codec="raw"))
            while not late.enqueued.is_set():
                await asyncio.sleep(0.001)
            leaving.cancel()
            await asyncio.wait([leaving])
            answer = await c.ask(other, local=True)
            same = equal(await pages_of(c, late, other), pages)
            assert same == (waits or not spins)
            assert answer.tokens == undisturbed.tokens or not waits
        await at_rest(c)
