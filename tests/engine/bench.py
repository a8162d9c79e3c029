"""An engine over the page machine, stepped by hand."""

import random

import pytest
from prometheus_client import CollectorRegistry

from kvrail.engine.batch.batch import SampledToken
from kvrail.engine.engine import Engine
from kvrail.engine.kv.pages import PagePool
from kvrail.engine.request.events import Admitted, Output
from kvrail.engine.request.requests import EngineRequest, ModelLimits
from kvrail.engine.schedule.chunks import StepBudget
from kvrail.engine.schedule.scheduler import Scheduler
from kvrail.engine.step.closing import PageCloser
from kvrail.telemetry.worker import EngineMetrics
from kvrail.values.sampling import SamplingParams
from tests.engine.page_machine import VOCAB, FirstIndexShift, PageMachine, expected


class Bench:
    def __init__(
        self,
        num_pages=32,
        page_size=4,
        prefix_cache=True,
        listener=None,
        max_drafts=64,
        ahead=False,
        tier=None,
        slotted=None,
        machine=PageMachine,
        **limits,
    ):
        settings = {"max_batch_tokens": 16, "max_running": 8, "max_waiting": 64, **limits}
        self.registry = CollectorRegistry()
        self.machine = machine(num_pages, page_size, ahead=ahead)
        self.pool = PagePool(
            num_pages,
            page_size,
            prefix_cache=prefix_cache,
            tier=tier and tier(self.machine.cells),
            slots=slotted and slotted.slots,
        )
        if slotted is not None:
            self.machine.cells = slotted
        self.events: dict[str, list] = {}
        self.scheduler = Scheduler(self.pool, StepBudget(**settings))
        self.engine = Engine(
            self.machine,
            FirstIndexShift(),
            self.scheduler,
            ModelLimits(VOCAB, 120, frozenset()),
            None,
            EngineMetrics(self.registry, "machine"),
            self.deliver,
            listener,
            max_drafts,
            slotted and PageCloser(self.pool, slotted),
        )

    def deliver(self, events):
        for request_id, event in events:
            self.events.setdefault(request_id, []).append(event)

    def submit(self, name, prompt, max_tokens=8, **kwargs):
        own = {"n": kwargs.pop("n", 1), "stop_token_ids": kwargs.pop("stop_token_ids", ())}
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **own)
        self.engine.submit(EngineRequest(name, tuple(prompt), params, **kwargs))

    def run(self, steps=1000):
        for _ in range(steps):
            if not self.engine.pending():
                break
            self.engine.step()
            self.engine.check()
        else:
            pytest.fail("the engine does not come to an end")

    def step(self, count):
        for _ in range(count):
            self.engine.step()
            self.engine.check()

    def tokens(self, name, index=0):
        outputs = [e for e in self.events.get(name, []) if isinstance(e, Output) and e.index == index]
        return [token for output in outputs for token in output.token_ids]

    def of(self, name, kind):
        return [e for e in self.events.get(name, []) if isinstance(e, kind)]


class Transfer:
    """A transfer into one request's pages. It writes whole pages, so it overwrites slots behind the prompt too."""

    def __init__(self, bench: Bench, name: str, prompt: list[int]) -> None:
        self.bench, self.name, self.prompt = bench, name, prompt
        self.lease = bench.engine.claim_lease(name)
        self.held = bench.of(name, Admitted)[0].cached_tokens

    def first(self) -> None:
        self.report_first(expected(self.prompt, 1)[0])

    def report_first(self, *tokens: int) -> None:
        with self.bench.engine.change() as requests:
            requests.receive_first_tokens(self.name, [SampledToken(token) for token in tokens])

    def write(self, wrong: bool) -> None:
        tokens = [(token + wrong) % VOCAB for token in self.prompt]
        size = self.bench.pool.page_size
        tokens += [77] * (-len(tokens) % size)
        self.bench.machine.write(self.lease.pages, self.held, tokens[self.held :])

    def coarse(self, wrong: bool = True) -> None:
        self.write(wrong)
        with self.bench.engine.change() as requests:
            requests.receive_coarse_kv(self.name)

    def exact(self) -> None:
        self.write(wrong=False)
        with self.bench.engine.change() as requests:
            requests.receive_kv(self.name)
        self.release()

    def lose(self) -> None:
        with self.bench.engine.change() as requests:
            requests.compute_here(self.name)
        self.release()

    def release(self) -> None:
        self.bench.engine.release_lease(self.lease)


def prompts(count, longest=40, seed=1):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]
