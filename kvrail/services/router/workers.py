"""The router's view of its workers: one task each asks for load and identity; the policy's decisions read it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Protocol

import grpc.aio

from kvrail.breaker import Breaker
from kvrail.config import RouterSettings
from kvrail.errors import KvrailError, WorkerUnavailableError
from kvrail.metrics import RouterMetrics
from kvrail.rpc.channel import open_channel
from kvrail.rpc.client import DecodeClient, PrefillStatusClient
from kvrail.services.router.compatibility import (
    Identity,
    choose_fingerprint,
    codec_mismatch,
    incompatibility,
    page_mismatch,
)
from kvrail.services.router.policy import POLICIES, Ask, Candidate, Load, WorkerState, able
from kvrail.services.router.prefixes import WorkerPages
from kvrail.services.router.translate import Limits
from kvrail.tls import Tls
from kvrail.wire import PROTOCOL_VERSION
from kvrail.wire.v1 import common_pb2

log = logging.getLogger("kvrail.router.workers")

STATUS_TIMEOUT_S = 3.0
"""A worker that does not say how it is for so long counts as lost."""
GIVEN_UP_S = 12.0
"""A decode worker that says nothing for so long has hung: what runs there goes on elsewhere."""
STARTUP_GRACE_S = 30.0
"""How long a router that has just started looks for workers before it does without those that never answered."""
STARTUP_WAIT_S = 2.0
"""How long a request waits for that at most: it comes when the router has been up for an instant."""


class StatusClient(Protocol):
    """The one call that both kinds of worker answer alike."""

    async def get_status(self, asked: common_pb2.StatusRequest, *, timeout_s: float) -> common_pb2.WorkerStatus:
        """Ask for identity, limits and load, and for news of pages."""


class Worker:
    """One worker: its channel, what it last said, and what it has of this router.

    requests: prompts that it has of us, backlog: their tokens that it has still to compute. refused: it has said that
    it is full, and nothing has changed since. pages: those that it holds.
    """

    def __init__(self, role: str, target: str, channel: grpc.aio.Channel, client: StatusClient) -> None:
        self.role = role
        self.target = target
        self.channel = channel
        self.state = WorkerState.UNKNOWN
        self.detail = "has not answered yet"
        self.answer: common_pb2.WorkerStatus | None = None
        self.failure = ""
        self.heard = False  # ever
        self.breaker = Breaker()
        self._instance = 0
        self._last_heard = monotonic()
        self._client = client
        self.requests = self.backlog = 0
        self.refused = False
        self.pages = WorkerPages()
        self._sequences = self._places = 0  # of our requests; the second: computed at once
        self._most = 0  # sequences of ours that it may have counted at its last answer
        self._others = 0  # of other routers

    async def ask(self) -> None:
        """Ask the worker how it is; what it had of us then may have ended, or come, while it answered."""
        self._most = self._sequences
        try:
            answer = await self._client.get_status(self.pages.question(), timeout_s=STATUS_TIMEOUT_S)
        except KvrailError as error:
            self.lost(str(error))
            return
        known = answer.instance == self._instance
        if not known:  # a new process owes nothing
            self._instance, self.breaker = answer.instance, Breaker()
        if known and answer.HasField("held_pages"):
            self.pages.take(answer.held_pages)
        else:
            self.pages.forget()
        self._others = max(0, answer.running + answer.waiting - self._most)
        answer.ClearField("held_pages")
        self.answer, self.failure, self.refused = answer, "", False
        self.heard, self._last_heard = True, monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since it last said how it is."""
        return monotonic() - self._last_heard

    def lost(self, reason: str) -> None:
        """Take note that the worker did not answer."""
        self.answer, self.failure = None, reason

    @property
    def instance(self) -> int:
        """Which start of its process has answered; 0: none yet."""
        return self._instance

    @property
    def numerics(self) -> str:
        """Workers that have the same compute the same bits; empty where bits depend on a batch's company."""
        return "" if self.answer is None else self.answer.model.numerics

    def take(self, sequences: int, places: int, pages: Sequence[int]) -> None:
        """A prompt goes to this worker. places: of its sequences, those that are computed at once."""
        self.requests += 1
        self._sequences += sequences
        self._places += places
        self._most = max(self._most, self._sequences)
        self.pages.expect(pages)

    def leave(self, sequences: int, places: int, pages: Sequence[int]) -> None:
        """It is done there, or lost."""
        self.requests -= 1
        self._sequences -= sequences
        self._places -= places
        self.pages.settle(pages)

    def load(self, *, computes: bool = True) -> Load:
        """How busy it is. computes: whether it computes the prompts that it gets by itself."""
        if self.answer is None:
            return Load()
        answer, pace = self.answer, self.answer.pace
        return Load(
            requests=self.requests,
            sequences=self._places + self._others,
            backlog=self.backlog,
            max_running=answer.max_running,
            refused=self.refused,
            pages_free=answer.pages_free,
            token_s=pace.prefill_each if computes else pace.fetch_each,
            sequence_s=pace.decode_each,
            step_tokens=answer.max_batch_tokens,
        )

    def candidate(self, *, computes: bool = True) -> Candidate:
        """What the policy needs to know."""
        return Candidate(self.target, self.state, self.load(computes=computes), self.pages)

    def describe(self) -> dict[str, Any]:
        """The worker's entry in /health."""
        entry: dict[str, Any] = {"state": self.state.value}
        if self.detail:
            entry["detail"] = self.detail
        if self.answer is not None:
            for field in ("running", "waiting", "pages_total", "pages_free", "pages_cached"):
                entry[field] = getattr(self.answer, field)
            entry["codecs"] = list(self.answer.codecs)
            entry["invariant"] = bool(self.numerics)
            entry["numerics"] = self.numerics or None
        return entry


class DecodeWorker(Worker):
    """A worker that generates."""

    def __init__(self, target: str, tls: Tls | None = None) -> None:
        channel = open_channel(target, tls=tls, role="decode")
        self.client = DecodeClient(channel, peer=f"decode worker {target}")
        super().__init__("decode", target, channel, self.client)


class PrefillWorker(Worker):
    """A worker that decode workers call; the router only looks at its load."""

    def __init__(self, target: str, tls: Tls | None = None) -> None:
        channel = open_channel(target, tls=tls, role="prefill")
        super().__init__("prefill", target, channel, PrefillStatusClient(channel, peer=f"prefill worker {target}"))


class WorkerPool:
    """All workers of the configuration. Start and close it inside the event loop."""

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics, tls: Tls | None = None) -> None:
        self._model = settings.model_name
        self._interval = settings.status_interval_s
        self._metrics = metrics
        self.decode = {target: DecodeWorker(target, tls) for target in settings.decode_workers}
        self.prefill = {target: PrefillWorker(target, tls) for target in settings.prefill_workers}
        self.fingerprint = ""
        self.on_change: Callable[[], object] = lambda: None
        self.policy = POLICIES[settings.policy]
        self._tasks: list[asyncio.Task[None]] = []
        self._settled = asyncio.Event()
        self._grace: asyncio.TimerHandle | None = None

    @property
    def workers(self) -> Sequence[Worker]:
        """Decode workers, then prefill workers."""
        return [*self.decode.values(), *self.prefill.values()]

    def start(self) -> None:
        """Begin to watch; returns at once, whether or not any worker is up."""
        self._grace = asyncio.get_running_loop().call_later(STARTUP_GRACE_S, self._settled.set)
        for worker in self.workers:
            self._metrics.worker_up(worker.role, worker.target, False)
            self._tasks.append(asyncio.create_task(self._watch(worker), name=f"watch {worker.target}"))

    async def close(self) -> None:
        """Stop watching and close the channels, which ends what still runs on them."""
        if self._grace is not None:
            self._grace.cancel()
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for decode in self.decode.values():
            await decode.client.close()
        for worker in self.workers:
            await worker.channel.close()

    async def _watch(self, worker: Worker) -> None:
        while True:
            await worker.ask()
            self.reconsider()
            if isinstance(worker, DecodeWorker) and worker.silent_s > GIVEN_UP_S:
                worker.client.give_up(f"decode worker {worker.target} has said nothing for {worker.silent_s:.0f} s")
            await asyncio.sleep(self._interval)

    def reconsider(self) -> None:
        """Decide anew which workers can get requests."""
        self.fingerprint = choose_fingerprint(
            self.fingerprint, self._fingerprints(self.decode.values()), self._fingerprints(self.prefill.values())
        )
        for worker in self.workers:
            state, detail = self._judge(worker)
            if state is not worker.state or detail != worker.detail:
                self._announce(worker, state, detail)
        if all(worker.heard for worker in self.workers):
            self._settled.set()
        self.on_change()

    def _fingerprints(self, workers: Iterable[Worker]) -> list[str]:
        """What those of `workers` that answer have loaded."""
        answers = [worker.answer for worker in workers if worker.answer is not None]
        return [answer.model.fingerprint for answer in answers if answer.model.name == self._model]

    def _judge(self, worker: Worker) -> tuple[WorkerState, str]:
        """A worker's state and why."""
        answer = worker.answer
        if answer is None:
            return (WorkerState.DOWN, worker.failure) if worker.failure else (worker.state, worker.detail)
        why = incompatibility(
            Identity(answer.model.name, answer.model.fingerprint, answer.protocol_version),
            model=self._model,
            fingerprint=self.fingerprint,
            protocol_version=PROTOCOL_VERSION,
        )
        if not why and worker.role == "prefill":
            takers = [decode.answer for decode in self.decode.values() if decode.answer is not None]
            why = page_mismatch(answer.layout, [taker.layout for taker in takers])
            why = why or codec_mismatch(answer.codec_parameters, [taker.codec_parameters for taker in takers])
        if why:
            return WorkerState.INCOMPATIBLE, why
        if answer.draining:
            return WorkerState.DRAINING, "finishes what it has"
        if not worker.breaker.allows:
            return WorkerState.FAILING, f"failed {worker.breaker.failures} requests in a row; one at a time tries again"
        return WorkerState.HEALTHY, ""

    def _announce(self, worker: Worker, state: WorkerState, detail: str) -> None:
        if worker.state is WorkerState.UNKNOWN and state is WorkerState.DOWN:
            log.info("waiting for %s worker %s", worker.role, worker.target)
        elif state is not worker.state:
            level = logging.ERROR if state is WorkerState.INCOMPATIBLE else logging.INFO
            level = logging.WARNING if state is WorkerState.DOWN else level
            log.log(level, "%s worker %s is %s: %s", worker.role, worker.target, state, detail or "takes requests")
        if state is not worker.state:
            self._metrics.worker_up(worker.role, worker.target, state is WorkerState.HEALTHY)
        worker.state, worker.detail = state, detail

    @property
    def healthy(self) -> bool:
        """Whether any decode worker takes requests."""
        return any(worker.state is WorkerState.HEALTHY for worker in self.decode.values())

    @property
    def complete(self) -> bool:
        """Whether all workers take requests."""
        return all(worker.state is WorkerState.HEALTHY for worker in self.workers)

    @property
    def starting(self) -> bool:
        """Whether workers are still to be found: not each has answered once, unless the grace for that is over.

        Without any decode worker ever, it starts for as long as that takes.
        """
        return not self._settled.is_set() or not any(worker.heard for worker in self.decode.values())

    async def settle(self) -> None:
        """Wait a little while the workers are still to be found; then a request goes the way that there is."""
        if not self._settled.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STARTUP_WAIT_S):
                    await self._settled.wait()

    def healthy_decode(self) -> list[DecodeWorker]:
        """Decode workers that take requests, the best first for a request of which nothing is known."""
        return [self.decode[placement.target] for placement in self.policy.order(Ask(1), self.candidates()[0])]

    def unavailable(self) -> WorkerUnavailableError:
        """Why no decode worker takes requests."""
        states = ", ".join(f"{worker.target} is {worker.state}" for worker in self.decode.values())
        return WorkerUnavailableError(f"no decode worker takes requests now ({states}); retry, or start one")

    def candidates(self) -> tuple[list[Candidate], list[Candidate]]:
        """Decode and prefill workers as the policy sees them."""
        prefill = [worker.candidate() for worker in self.prefill.values()]
        alone = not able(prefill)
        return [worker.candidate(computes=alone) for worker in self.decode.values()], prefill

    def places(self, n: int) -> int:
        """Of a prompt's n sequences those that are computed at once wherever it goes; n where no worker is there."""
        return min((each.load.places(n) for each in able(self.candidates()[0])), default=n)

    @property
    def page_size(self) -> int:
        """Tokens of a page on the decode workers; 0: not known."""
        return next((w.answer.layout.page_size for w in self.decode.values() if w.answer is not None), 0)

    def begin(self, worker: Worker) -> float:
        """A request goes to `worker`; gives what its breaker is told of it."""
        began = worker.breaker.begin()
        if not worker.breaker.closed:
            self.reconsider()  # this one tries; nobody else does
        return began

    def limits(self) -> Limits:
        """What holds on every decode worker that takes requests; raises WorkerUnavailableError where there is none."""
        answers = [worker.answer for worker in self.healthy_decode() if worker.answer is not None]
        if not answers:
            raise self.unavailable()
        return Limits(
            context=min(answer.model.max_model_len for answer in answers),
            vocabulary=min(answer.model.vocab_size for answer in answers),
            codecs=frozenset[str].intersection(*(frozenset(answer.codecs) for answer in answers)),
            withheld_codecs=frozenset[str]().union(*(answer.withheld_codecs for answer in answers)),
        )

    def lost(self, worker: Worker, reason: str) -> None:
        """Take `worker` out until it answers again."""
        worker.lost(reason)
        self.reconsider()
