"""A prefill worker lost, silent, cut off or garbling in the middle of a transfer: the answer is as without it."""

import asyncio
import gc

import pytest
import torch

from kvrail.errors import WorkerUnavailableError
from tests.cluster.staged import on_send, with_payload
from tests.cluster.test_equality import prompt_of
from tests.cluster.test_faults import value
from tests.gpu.devices import CARRIED, CUDA, at_rest, forget, landed, lean_cluster
from tests.models import tiny_model

LENGTH = 400
BEFORE = 4
"""Frames that leave before the fault."""
PATIENCE_S = 60.0
SILENCE_S = 0.5
"""Of the fault `silent`."""
CASES = [
    ("cpu", "tcp", "raw", 1),
    pytest.param("cpu", "ucx", "splitzip-progressive-ans", 1, marks=CARRIED[1].marks),
    *(
        pytest.param("cuda", "tcp", codec, 3, marks=CUDA.marks, id=f"cuda-tcp-{codec}")
        for codec in ("raw", "splitzip-progressive-ans")
    ),
    *(
        pytest.param("cuda", "ucx", codec, 3, marks=(*CUDA.marks, *CARRIED[1].marks), id=f"cuda-ucx-{codec}")
        for codec in ("raw", "splitzip-progressive-ans")
    ),
]
"""Device, transport, codec, and how often. After the first round all memory has been taken that such faults take."""


def changed(payload):
    """The payload with one bit flipped."""
    if isinstance(payload, torch.Tensor):
        wrong = payload.clone()
        wrong[-1] ^= 1
        landed(wrong.device.type)
        return wrong
    wrong = bytearray(payload)
    wrong[-1] ^= 1
    return memoryview(wrong)


async def lost(sender, stage):
    raise WorkerUnavailableError("the worker died")


async def cut_off(sender, stage):
    await sender._payload_sender.aclose()


async def flipped(sender, stage):
    return with_payload(stage, changed(stage.payload))


async def silent(sender, stage):
    await asyncio.sleep(3600)


FAULTS = (lost, cut_off, flipped, silent)


class Faulty:
    """A fault befalls the transfers of the next `left` attempts, after some frames each."""

    def __init__(self, monkeypatch):
        self.fault, self.left, self.befell = None, 0, 0
        self._frames = {}
        on_send(monkeypatch, self._send)

    async def _send(self, sender, header, stage):
        frames = self._frames[sender] = self._frames.get(sender, 0) + 1
        if self.left and frames == BEFORE + 1:
            self.left -= 1
            self.befell += 1
            return await self.fault(sender, stage)
        return None

    def next(self, fault, attempts):
        self.fault, self.left, self.befell = fault, attempts, 0
        self._frames.clear()


@pytest.mark.parametrize(("device", "transport", "codec", "rounds"), CASES)
async def test_no_fault_shows_and_nothing_is_kept(monkeypatch, device, transport, codec, rounds):
    """Each fault at one worker, then at both; after each, the worker that failed sends a prompt in full."""
    faulty = Faulty(monkeypatch)
    options = {"prefill_count": 2, "decode": {"max_drafts": 4}}
    async with lean_cluster(tiny_model("llama"), transport, device, **options) as c:
        first, second = c.prefills
        prompts = [prompt_of(LENGTH, seed=number) for number in range(2)]
        tokens = [(await c.ask(prompt, local=True)).tokens for prompt in prompts]

        async def ask(number, fault, attempts, sender):
            """A prompt whose transfers fail so often, then come from `sender`, or nowhere from."""
            forget(c.decode, *c.prefills.values())
            faulty.next(fault, attempts)
            c.fetcher.parts.silence_s = SILENCE_S if fault is silent else PATIENCE_S
            before = [value(c.decode, reason) for reason in ("alternate", "local")]
            answer = await c.ask(prompts[number], codec=codec)
            assert answer.tokens == tokens[number], (fault, attempts)
            assert answer.summary.prefill_worker == sender and faulty.befell == attempts
            taken = [value(c.decode, reason) for reason in ("alternate", "local")]
            assert taken == [before[0] + (attempts > 0), before[1] + (attempts == 2)]
            faulty.next(None, 0)
            await at_rest(c)

        await ask(1, None, 0, first)  # compiles what is needed, where that is
        memory = []
        for _ in range(rounds):
            for fault in FAULTS:
                await ask(0, fault, 1, second)
                await ask(0, fault, 2, "")
                await ask(1, None, 0, first)
            gc.collect()
            memory.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
        assert memory[-1] <= memory[0] + (1 << 20), memory
