"""Simulated workers: how long they take, and which pages they hold. Pages, reports, costs are the engine's own code."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvrail.engine.kv.pages import PagePool
from kvrail.engine.kv.prefix_events import Cursor
from kvrail.engine.schedule.chunks import StepBudget, enough_tokens
from kvrail.engine.schedule.cost import StepCostModel
from kvrail.services.router.fleet.demand import RECENT_S, DemandClock, TokenRate
from kvrail.services.router.fleet.policy import Candidate, Load, WorkerState
from kvrail.services.router.fleet.prefixes import WorkerPages
from kvrail.services.router.fleet.ways import Slo
from kvrail.wire.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class Speed:
    """What a worker's hardware gives; the defaults are Qwen3-8B on an H200 (README, "Measured").

    prefill_s: of a prompt's token; attend_s: that each token before it adds. step_s: of a decode step, each_s: that
    each sequence adds. mixed_tokens: of prompts, that a decode worker computes in a step; mixed: part of their time
    that they add there, as a step reads the weights once (measured: benchmarks/results/roles-2026-11-28-2xh100.md).
    fetch_s: until the KV of a token has come from a prefill worker. overhead_s: of a request on its way.
    """

    prefill_s: float = 1 / 40_000
    attend_s: float = 0.0
    step_s: float = 5.2e-3
    each_s: float = 1.8e-5
    mixed_tokens: int = 512
    mixed: float = 0.7
    fetch_s: float = 3e-6
    overhead_s: float = 2e-3


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way through the simulated cluster."""

    number: int
    arrival: float
    tokens: int
    output: int
    pages: list[int]
    first_token: float = 0.0
    end: float = 0.0
    found: int = 0  # tokens that the worker had that computed it
    crossed: bool = False  # whether it was computed on another worker than where it decodes


class Clock:
    """Events in the order of their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self.demand = DemandClock(lambda: self.now)

    def at(self, when: float, what: Callable[[], object]) -> None:
        """Have something happen then."""
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what))

    def run(self, more: Callable[[], bool]) -> None:
        """Let happen what is to happen, as long as there is more to wait for."""
        while self._events and more():
            self.now, _, what = heapq.heappop(self._events)
            what()


@dataclass(eq=False)
class SimWorker:
    """One worker, and what the router knows of it."""

    name: str
    clock: Clock
    speed: Speed
    num_pages: int
    page_size: int
    max_running: int
    step_tokens: int
    pages: WorkerPages = field(default_factory=WorkerPages)
    requests: int = 0
    backlog: int = 0
    began: float = 0.0
    busy_s: float = 0.0
    prefilled: int = 0
    given: TokenRate = field(init=False)
    pool: PagePool = field(init=False)
    _seen: Candidate | None = None  # as long as nothing has changed
    _seen_at: float = 0.0

    def __post_init__(self) -> None:
        self.pool = PagePool(self.num_pages, self.page_size)
        self.given = TokenRate(self.clock.demand)

    def candidate(self, *, computes: bool) -> Candidate:
        """As the router's policy sees it; computes: whether it computes prompts."""
        if self._seen is None or (self.backlog and self._seen_at < self.clock.now):
            self._seen_at = self.clock.now
            self._seen = Candidate(self.name, WorkerState.HEALTHY, self._load(computes), self.pages)
        return self._seen

    def count(self, requests: int, backlog: int) -> None:
        """Requests, and tokens to compute, have come or gone."""
        if backlog < 0 or not self.backlog:
            self.began = self.clock.now
        self.requests += requests
        if requests:
            (self.clock.demand.begin if requests > 0 else self.clock.demand.end)()
        self.backlog += backlog
        if backlog > 0:
            self.given.add(backlog)
        self._seen = None

    def _load(self, computes: bool) -> Load:
        return Load(
            requests=self.requests,
            sequences=self.requests,
            backlog=self.backlog,
            computing_s=self.clock.now - self.began if self.backlog else 0.0,
            max_running=self.max_running,
            pages_free=self.pool.counts().free,
            token_s=self.speed.prefill_s if computes else self.speed.fetch_s,
            compute_s=self.speed.prefill_s,
            sequence_s=self.speed.each_s,
            step_tokens=self.step_tokens,
            fetch_s=self.speed.fetch_s,
            step_s=self.speed.step_s,
            chunk_tokens=self.speed.mixed_tokens,
            tokens_per_s=self.given.read(),
            recent_per_s=self.given.read(RECENT_S),
        )

    def report(self) -> None:
        """Answer the router's question for pages."""
        asked = self.pages.question()
        events = self.pool.events.since(Cursor(asked.stored_to, asked.removed_to), asked.max_pages)
        self.pages.take(
            common_pb2.KVEvents(
                snapshot=events.snapshot,
                stored_to=events.cursor.stored,
                removed_to=events.cursor.removed,
                stored=events.stored,
                removed=events.removed,
                complete=events.complete,
            ),
            self.pool.num_pages,
        )

    def hold(self, job: Job) -> tuple[list[int], int]:
        """Pages for a prompt, as the engine takes them; and how many of its tokens were there."""
        hashes = [digest.to_bytes(8, "little") for digest in job.pages]
        hits = self.pool.match(hashes)[: (job.tokens - 1) // self.page_size]
        self.pool.acquire(hits)
        fresh = self.pool.allocate(-(-job.tokens // self.page_size) - len(hits))
        return [*hits, *fresh], len(hits) * self.page_size

    def publish(self, job: Job, table: list[int]) -> None:
        """The prompt's KV is in its pages."""
        for page, digest in zip(table, job.pages, strict=False):
            self.pool.publish(page, digest.to_bytes(8, "little"))


@dataclass(eq=False)
class SimPrefill(SimWorker):
    """Computes one prompt after the other, at a fixed rate; what lies in its pages it does not compute."""

    _queue: deque[tuple[Job, Callable[[], object]]] = field(default_factory=deque)
    _working: bool = False

    def submit(self, job: Job, done: Callable[[], object]) -> None:
        """Have a prompt computed; `done` is called when its first token is drawn."""
        self._queue.append((job, done))
        self._begin()

    def _begin(self) -> None:
        if self._working or not self._queue:
            return
        self._working = True
        job, done = self._queue.popleft()
        table, job.found = self.hold(job)
        seconds = (job.tokens - job.found) * self.speed.prefill_s
        self.busy_s += seconds
        self.prefilled += job.tokens - job.found

        def end() -> None:
            self.publish(job, table)
            self.pool.release(table)
            self._working = False
            done()
            self._begin()

        self.clock.at(self.clock.now + seconds, end)


@dataclass(eq=False)
class SimDecode(SimWorker):
    """All its sequences get a token in each step; the more they are the longer it takes, and with part of a prompt."""

    _steps: float = 0.0  # done since the beginning
    _since: float = 0.0
    _running: list[tuple[float, int, Callable[[], object]]] = field(default_factory=list)
    _prompts: deque[tuple[Job, Callable[[], object]]] = field(default_factory=deque)
    _changes: int = 0

    @property
    def _step_s(self) -> float:
        speed = self.speed
        prompt_s = speed.mixed_tokens * speed.mixed * speed.prefill_s if self._prompts else 0.0
        return speed.step_s + speed.each_s * len(self._running) + prompt_s

    def begin(self, job: Job, done: Callable[[], object]) -> None:
        """A request whose first token is there decodes the rest; `done` is called at its end."""
        table, _ = self.hold(job)
        self.publish(job, table)
        self._run(job, job.output - 1, table, done)

    def compute(self, job: Job, done: Callable[[], object]) -> None:
        """Compute a prompt beside the sequences that decode; `done` is called when its first token is drawn."""
        self._advance()
        self._prompts.append((job, done))
        if len(self._prompts) == 1:
            self._next_prompt()

    def _next_prompt(self) -> None:
        job, done = self._prompts[0]
        table, job.found = self.hold(job)

        def end() -> None:
            self._prompts.popleft()
            done()
            if self._prompts:
                self._next_prompt()

        self.publish(job, table)
        self._run(job, -(-(job.tokens - job.found) // self.speed.mixed_tokens), table, end)

    def _run(self, job: Job, steps: int, table: list[int], done: Callable[[], object]) -> None:
        """Hold a table for more steps."""
        self._advance()

        def end() -> None:
            self.pool.release(table)
            done()

        heapq.heappush(self._running, (self._steps + steps, job.number, end))
        self._wait()

    def _advance(self) -> None:
        if self._running:
            self._steps += (self.clock.now - self._since) / self._step_s
        self._since = self.clock.now

    def _wait(self) -> None:
        self._changes += 1
        change = self._changes
        if self._running:
            missing = max(0.0, self._running[0][0] - self._steps)
            self.clock.at(self.clock.now + missing * self._step_s, lambda: self._end(change))

    def _end(self, change: int) -> None:
        if change != self._changes:
            return  # others have come or gone since
        self._advance()
        *_, end = heapq.heappop(self._running)
        end()
        self._wait()


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt whose tokens are not all computed; first_step: the first that may compute some beside sequences."""

    job: Job
    table: list[int]
    missing: int
    done: Callable[[], object]
    first_step: int


@dataclass(eq=False)
class SimBoth(SimWorker):
    """Prefills and decodes: each step has a token of each sequence and a chunk of a prompt, full if nothing decodes.

    The router knows of its speed what an engine would have measured by now.
    """

    _cost: StepCostModel = field(default_factory=StepCostModel)
    _prompts: deque[_Prompt] = field(default_factory=deque)
    _decoding: list[tuple[int, int, Job, list[int], Callable[[], object]]] = field(default_factory=list)
    _steps: int = 0
    _stepping: bool = False
    _budget: StepBudget = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._budget = StepBudget(
            self.step_tokens,
            self.max_running,
            0,
            mixed_batch_tokens=self.speed.mixed_tokens,
            gap_s=Slo().gap_s,
        )

    def candidate(self, *, computes: bool) -> Candidate:
        """As the router sees it; it computes prompts, whatever else it does."""
        return super().candidate(computes=True)

    def _load(self, computes: bool) -> Load:
        decode, full_s = self._cost.decode, self._cost.full_prefill
        return replace(
            super()._load(computes), token_s=full_s, compute_s=full_s, sequence_s=decode.each, step_s=decode.base
        )

    def submit(self, job: Job, done: Callable[[], object]) -> None:
        """Compute a prompt; `done` is called when its first token is drawn. The step after this one is planned."""
        table, job.found = self.hold(job)
        self._prompts.append(_Prompt(job, table, job.tokens - job.found, done, self._steps + 2 * self._stepping))
        self._step()

    compute = submit

    def begin(self, job: Job, done: Callable[[], object]) -> None:
        """A request whose first token is there decodes the rest; `done` is called at its end."""
        table, _ = self.hold(job)
        self.publish(job, table)
        heapq.heappush(self._decoding, (self._steps + job.output - 1, job.number, job, table, done))
        self._step()

    def _step(self) -> None:
        if self._stepping or not (self._prompts or self._decoding):
            return
        self._stepping, speed, decoding = True, self.speed, len(self._decoding)
        left = most = self._budget.chunk_tokens(decoding, beside=decoding > 0, cost=self._cost)
        prompt_s, enough = 0.0, enough_tokens(sum(prompt.missing for prompt in self._prompts))
        for prompt in self._prompts:
            if decoding and prompt.first_step > self._steps:
                break
            tokens = min(left, prompt.missing)
            before = prompt.job.tokens - prompt.missing + tokens / 2
            prompt_s += tokens * (speed.prefill_s + before * speed.attend_s) * (speed.mixed if decoding else 1.0)
            prompt.missing -= tokens
            left -= tokens
            if not prompt.missing and most - left >= enough:
                break
        step_s = speed.step_s + speed.each_s * decoding if decoding else 0.0
        self.busy_s += prompt_s
        self.prefilled += most - left
        self._cost.note(most - left, decoding, step_s + prompt_s)
        self.clock.at(self.clock.now + step_s + prompt_s, self._end)

    def _end(self) -> None:
        self._steps += 1
        ended = []
        while self._decoding and self._decoding[0][0] <= self._steps:
            ended.append(heapq.heappop(self._decoding)[3:])
        while self._prompts and not self._prompts[0].missing:
            prompt = self._prompts.popleft()
            self.publish(prompt.job, prompt.table)
            ended.append((prompt.table, prompt.done))
        self._stepping = False
        for table, done in ended:
            self.pool.release(table)
            done()
        self._step()
