"""A request's deadline holds at every hop: in a queue, a prefill, a transfer, in decoding. Its work ends there."""

import asyncio
import threading

import pytest

from kvrail.errors import DeadlineError, WorkerUnavailableError
from kvrail.services.prefill.servicer import PrefillServicer
from tests.cluster.cluster import cluster
from tests.cluster.staged import on_send
from tests.cluster.test_equality import prompt_of
from tests.models import generate, tiny_model

SOON_S = 0.4
LATER_S = 60.0


@pytest.fixture
def llama():
    return tiny_model("llama")


class Steps:
    """Counts an engine's steps, and holds them up while `go_on` is not set."""

    def __init__(self, worker):
        self.count, self.go_on = 0, threading.Event()
        self._execute = worker.engine._runner.execute
        worker.engine._runner.execute = self._step

    def _step(self, *args):
        self.count += 1
        self.go_on.wait(LATER_S)
        return self._execute(*args)


async def late(c, prompt, **options):
    with pytest.raises(DeadlineError):
        await c.ask(prompt, timeout_s=SOON_S, **options)


async def test_what_is_left_of_it_reaches_each_prefill_worker(llama, monkeypatch):
    seen, prefill = [], PrefillServicer.Prefill

    async def noting(self, request, context):
        seen.append(context.time_remaining())
        await prefill(self, request, context)

    monkeypatch.setattr(PrefillServicer, "Prefill", noting)

    async def dying(sender, header, stage):
        if len(seen) == 1:
            await asyncio.sleep(1)
            raise WorkerUnavailableError("the worker died")

    on_send(monkeypatch, dying)
    async with cluster(llama, prefill_count=2) as c:
        assert (await c.ask(prompt_of(300), timeout_s=LATER_S)).summary.prefill_worker
        await c.settled()
    first, alternate = seen
    assert first <= LATER_S and alternate < first - 0.5  # gRPC rounds what it sends


async def test_it_ends_a_prefill_between_two_chunks(llama):
    async with cluster(llama, max_batch_tokens=64) as c:
        (prefill,) = c.prefills.values()
        steps = Steps(prefill)
        await late(c, prompt_of(640))
        steps.go_on.set()
        await c.settled()
        assert 0 < steps.count < 10


async def test_it_ends_a_transfer(llama, monkeypatch):
    async def never(sender, header, stage):
        await asyncio.Event().wait()

    on_send(monkeypatch, never)
    async with cluster(llama) as c:
        await late(c, prompt_of(300))
        await c.settled()


async def test_it_ends_decoding(llama):
    async with cluster(llama) as c:
        steps = Steps(c.decode)
        await late(c, prompt_of(300), max_tokens=200)
        steps.go_on.set()
        await c.settled()
        assert 0 < steps.count < 100


@pytest.mark.parametrize("where", ["decode", "prefill"])
async def test_it_ends_waiting_for_ones_turn(llama, where):
    async with cluster(llama, **{where: {"max_running": 1}}) as c:
        worker = c.decode if where == "decode" else next(iter(c.prefills.values()))
        steps, prompt = Steps(worker), prompt_of(300, seed=1)
        first = asyncio.create_task(c.ask(prompt))
        while not steps.count:
            await asyncio.sleep(0.005)
        await late(c, prompt_of(300))
        async with asyncio.timeout(LATER_S):
            while worker.engine.status().waiting:
                await asyncio.sleep(0.005)
        steps.go_on.set()
        assert (await first).tokens == {0: generate(str(llama), tuple(prompt), 16)}
        await c.settled()
