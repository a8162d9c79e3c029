"""A cluster on a simulated clock: the router's queue, policy and page index are the router's own code."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.simulator.trace import pages
from benchmarks.simulator.workers import Clock, Job, SimBoth, SimDecode, SimPrefill, SimWorker, Speed
from kvrail.config.settings import RouterSettings
from kvrail.runtime.queueing import FairQueue, Ticket
from kvrail.services.router.fleet.policy import POLICIES, PlacementRequest
from kvrail.services.router.fleet.ways import Slo, Snapshot, choose_way
from kvrail.services.router.fleet.workers import STATUS_INTERVAL_S as REPORT_S
from kvrail.tools.bench.trace import Request

PREFILL_WAIT_S: float = RouterSettings.model_fields["prefill_wait_s"].default
MAX_RUNNING = 64
STEP_TOKENS = 2048
SHARE = 0.1
GOLDEN = 0x9E3779B97F4A7C15
"""Draws of power-of-two: the same in each run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a trace under one policy.

    imbalance: the busiest prefill worker's time over the mean. helped: prompts that decode workers computed.
    """

    policy: str
    jobs: Sequence[Job]
    seconds: float
    hit_rate: float
    imbalance: float
    helped: int
    times: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Seconds to the first token."""
        return sum(self.times) / len(self.times)

    def quantile(self, share: float) -> float:
        """Percentile of the seconds to the first token."""
        return sorted(self.times)[min(len(self.times) - 1, int(share * len(self.times)))]

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens of all workers."""
        return sum(job.tokens + job.output for job in self.jobs) / self.seconds


class Simulation:
    """One trace through `workers` prefill workers and as many decode workers.

    prefill_wait_s: that a prompt waits for a prefill worker at most, where a decode worker has time; 0: any time.
    """

    def __init__(
        self,
        policy: str,
        workers: int,
        *,
        pages: int,
        page_size: int = 64,
        prefill_wait_s: float = PREFILL_WAIT_S,
        speed: Speed | None = None,
        max_running: int = MAX_RUNNING,
    ) -> None:
        self._clock = Clock()
        self.on_end: Callable[[Job], None] = lambda job: None
        self._prefill_wait_s = prefill_wait_s or math.inf
        self._helped = 0
        self._name = policy
        self._policy = POLICIES[policy]
        self._queue = FairQueue(SHARE)
        self._size = page_size
        speed = speed or Speed()
        kind = self._clock, speed, pages, page_size, max_running
        self._kind = *kind, STEP_TOKENS
        self._prefill: dict[str, SimPrefill | SimBoth] = {
            f"p{n}": SimPrefill(f"p{n}", *self._kind) for n in range(workers)
        }
        self._decode: dict[str, SimDecode | SimBoth] = {
            f"d{n}": SimDecode(f"d{n}", *self._kind) for n in range(workers)
        }
        self._slo = Slo()
        self._split: int | None = None
        self.ways: list[tuple[float, str, str]] = []  # when, which and why, of workers that do both
        self._speed = speed
        self._waiting: dict[Ticket, tuple[Job, PlacementRequest]] = {}
        self._computing: Counter[str] = Counter()
        self._open = 0
        self._output = 128.0

    def run(self, trace: Sequence[Request]) -> Outcome:
        """All of a trace, to the last token."""
        jobs = [self.ask(request, number) for number, request in enumerate(trace)]
        self.finish()
        prompt = sum(job.tokens for job in jobs)
        busy = [worker.busy_s for worker in self._prefill.values()]
        return Outcome(
            self._name,
            jobs,
            self._clock.now,
            sum(job.found for job in jobs) / prompt,
            max(busy) * len(busy) / (sum(busy) or 1.0),
            self._helped,
            [job.first_token - job.arrival for job in jobs],
        )

    def ask(self, request: Request, number: int) -> Job:
        """Let a request arrive when it is due; number: of no other one."""
        digests = pages(request, number, self._size)
        job = Job(number, request.arrival, request.prompt_tokens, request.output_tokens, digests)
        self._open += 1
        self._clock.at(request.arrival, lambda: self._arrive(job, request.key))
        return job

    def finish(self) -> None:
        """Let time pass until all requests have ended, also those that `on_end` asks for."""
        for worker in {each.name: each for each in (*self._prefill.values(), *self._decode.values())}.values():
            self._report(worker)
        self._clock.run(lambda: self._open > 0)

    def _report(self, worker: SimWorker) -> None:
        worker.report()
        self._clock.at(self._clock.now + REPORT_S, lambda: self._report(worker))

    def _arrive(self, job: Job, key: str) -> None:
        draw = (job.number + 1) * GOLDEN & 0xFFFFFFFFFFFFFFFF
        output = round(self._output)
        request = PlacementRequest(job.tokens, job.pages, self._size, 1, output, job.number, draw)
        ticket = Ticket(key, 1, job.tokens)
        self._waiting[ticket] = job, request
        self._queue.add(ticket)
        self._serve()
        if ticket in self._waiting and self._prefill_wait_s < math.inf:
            self._clock.at(self._clock.now + self._prefill_wait_s, self._serve)

    def _serve(self) -> None:
        while self._waiting and self._serve_next():
            pass

    def _serve_next(self) -> bool:
        decode = [worker.candidate(computes=False) for worker in self._decode.values()]
        prefill = [worker.candidate(computes=True) for worker in self._prefill.values()]
        first, _ = next(iter(self._waiting.values()))
        workers = Snapshot(decode, prefill, self._slo, self._split, {"": self._clock.now - first.arrival})
        patience_s = workers.patience_s(self._prefill_wait_s)
        passed: list[Ticket] = []
        for ticket in self._queue.turns(sum(max(0, each.load.max_running - each.load.sequences) for each in decode)):
            job, request = self._waiting[ticket]
            urgent, spare_s = not self._computing[ticket.client], job.arrival + patience_s - self._clock.now
            choice = choose_way(self._policy, request, workers, urgent=urgent, spare_s=spare_s)
            if choice is not None:
                del self._waiting[ticket]
                self._queue.granted(ticket, passed)
                if choice.way is not None:
                    self._split = choice.split
                    self.ways.append((self._clock.now, *choice.way))
                computing = self._prefill[choice.prefill[0].target] if choice.prefill else None
                self._send(ticket, job, self._decode[choice.decode.target], computing, choice.computed_tokens)
                return True
            passed.append(ticket)
        return False

    def _send(
        self, ticket: Ticket, job: Job, decode: SimDecode | SimBoth, prefill: SimPrefill | SimBoth | None, cached: int
    ) -> None:
        """To a decode worker, which computes the prompt where there is no prefill worker."""
        missing, computing = job.tokens - cached, prefill or decode
        fetch_s = missing * self._speed.fetch_s if prefill else 0.0
        self._computing[ticket.client] += missing
        self._helped += prefill is None
        job.crossed = prefill is not None
        decode.count(1, 0)
        decode.pages.expect(job.pages)
        computing.count(1 if prefill else 0, missing)
        if prefill:
            prefill.pages.expect(job.pages)

        def first_token() -> None:
            job.first_token = self._clock.now + self._speed.overhead_s
            computing.count(-1 if prefill else 0, -missing)
            if prefill:
                prefill.pages.settle(job.pages)
            self._computing[ticket.client] -= missing
            self._clock.at(self._clock.now + fetch_s, lambda: decode.begin(job, end))
            self._serve()

        def end() -> None:
            job.end = max(self._clock.now, job.first_token)
            decode.count(-1, 0)
            decode.pages.settle(job.pages)
            self._queue.ended(ticket)
            self._output += 0.05 * (job.output - self._output)
            self.on_end(job)
            self._open -= 1
            self._serve()

        begin = prefill.submit if prefill else decode.compute
        self._clock.at(self._clock.now + self._speed.overhead_s, lambda: begin(job, first_token))
