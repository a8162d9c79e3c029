"""The router's view of its workers: one task for each polls its status; the policy's decisions read it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeVar, cast

from kvrail.config.settings import RouterSettings
from kvrail.errors import InvalidRequestError, KvrailError, WorkerUnavailableError
from kvrail.security.tls import Tls
from kvrail.services.router.fleet.changes import Changes
from kvrail.services.router.fleet.compatibility import (
    Identity,
    choose_fingerprint,
    codec_mismatch,
    incompatibility,
    page_mismatch,
)
from kvrail.services.router.fleet.demand import DemandClock
from kvrail.services.router.fleet.discovery import Discovery
from kvrail.services.router.fleet.policy import POLICIES, Candidate, WorkerState, able, places
from kvrail.services.router.fleet.worker import NOT_ASKED, BothWorker, DecodeWorker, PrefillWorker, Worker
from kvrail.services.router.plan.translate import Limits
from kvrail.telemetry.router import RouterMetrics
from kvrail.values.kv_cache import suits
from kvrail.wire import PROTOCOL_VERSION

log = logging.getLogger("kvrail.router.workers")

GIVEN_UP_S = 12.0
"""A decode worker that is silent for longer has hung: other workers continue its requests."""
STATUS_INTERVAL_S = 0.5
"""Between two looks at each worker's load. Between two of them the policy counts what it has sent there itself."""
STARTUP_GRACE_S = 30.0
"""How long a router that has just started waits for workers that have never answered."""
STARTS_WITHIN_S = 600.0
"""A worker that has never answered is starting, and after this time down; large models take minutes to load."""
STARTUP_WAIT_S = 2.0
"""Longest wait of a request for that: it comes just after the router has started."""
KEPT_S = 60.0
"""A worker whose name no longer resolves stays while it answers, and this much longer."""


W = TypeVar("W", bound=Worker)
Make = Callable[[str, Tls | None, DemandClock], W]


class WorkerPool:
    """All workers that the settings name, by address or by a DNS name. Start and close it inside the event loop.

    decode, prefill: the present ones, by host:port; one of both roles is in both.
    leaving: those that finish their requests, by role and host:port.
    """

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics, tls: Tls | None = None) -> None:
        self._model = settings.model_name
        self._interval = STATUS_INTERVAL_S
        self._metrics = metrics
        self._tls = tls
        self._clock = DemandClock()
        self.decode: dict[str, DecodeWorker] = {}
        self.prefill: dict[str, Worker] = {}
        self.leaving: dict[tuple[str, str], Worker] = {}
        self._decode_names = Discovery("decode", settings.decode_workers, self._gather)
        self._prefill_names = Discovery("prefill", settings.prefill_workers, self._gather)
        self._both_names = Discovery("both", settings.workers, self._gather)
        self._names = (self._decode_names, self._prefill_names, self._both_names)
        self.fingerprint = ""
        self.on_change: Callable[[], object] = lambda: None
        self.policy = POLICIES[settings.policy]
        self.changes = Changes()
        self._watches: dict[Worker, asyncio.Task[None]] = {}
        self._settled, self._met = asyncio.Event(), asyncio.Event()
        self._decode_answered = False  # ever
        self._grace: asyncio.TimerHandle | None = None

    @property
    def workers(self) -> Sequence[Worker]:
        """Workers that decode, then those that only prefill; none that is leaving."""
        return list(dict.fromkeys([*self.decode.values(), *self.prefill.values()]))

    def start(self) -> None:
        """Begin to watch; returns at once, whether or not any worker is up."""
        self._grace = asyncio.get_running_loop().call_later(STARTUP_GRACE_S, self._settled.set)
        self._gather()
        for names in self._names:
            names.start()

    async def close(self) -> None:
        """Stop watching and close the channels, which ends what still runs on them."""
        if self._grace is not None:
            self._grace.cancel()
        for names in self._names:
            await names.close()
        for task in self._watches.values():
            task.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        for worker in [*self.workers, *self.leaving.values()]:
            await worker.close()

    def _gather(self) -> None:
        """Add workers with new addresses; workers whose address is gone begin to leave."""
        before = self.workers
        both = self._present(self._both_names, before, BothWorker, ())
        self.decode = self._present(self._decode_names, before, DecodeWorker, both) | both
        self.prefill = {**self._present(self._prefill_names, before, PrefillWorker, both), **both}
        for worker in set(before).difference(self.workers):
            log.info("%s leaves, with %d requests to finish", worker, worker.requests)
            worker.leaving = True
            self.leaving[worker.role, worker.target] = worker
        self.reconsider()

    def _present(self, names: Discovery, before: Iterable[Worker], make: Make[W], both: Container[str]) -> dict[str, W]:
        """The workers of one role now; known ones are kept. both: addresses that workers of both roles have."""
        known = {worker.target: cast(W, worker) for worker in before if worker.role == names.role}
        names.forget([target for target, worker in known.items() if worker.silent_s > KEPT_S])
        targets = [target for target in names.targets if target not in both]
        return {target: known.get(target) or self._join(names.role, target, make) for target in targets}

    def _join(self, role: str, target: str, make: Make[W]) -> W:
        if (back := self.leaving.pop((role, target), None)) is not None:
            back.leaving = False
            return cast(W, back)
        worker = make(target, self._tls, self._clock)
        self._metrics.worker_up(role, target, False)
        self._watches[worker] = asyncio.create_task(self._watch(worker), name=f"watch {target}")
        return worker

    async def _watch(self, worker: Worker) -> None:
        while not worker.leaving or worker.requests:
            before = worker.instance if worker.answered else None
            answered = worker.answer is not None
            try:
                await worker.ask()
                self._note(worker, before, answered)
                self.reconsider()
            except Exception:
                log.exception("%s: its status could not be used; it is asked again", worker)
            if isinstance(worker, DecodeWorker) and worker.silent_s > GIVEN_UP_S:
                worker.client.give_up(f"decode worker {worker.target} has been silent for {worker.silent_s:.0f} s")
            await asyncio.sleep(self._interval)
        log.info("%s has left", worker)
        del self.leaving[worker.role, worker.target], self._watches[worker]
        self._metrics.worker_gone(worker.role, worker.target)
        self.changes.add("left", worker.role, worker.target)
        await worker.close()

    def _note(self, worker: Worker, before: int | None, answered: bool) -> None:
        """Remember what a status says that is new.

        before: the process that answered last; None: none did. answered: whether the last status came.
        """
        role, target, answer = worker.role, worker.target, worker.answer
        if answer is None:
            if answered:
                self.changes.add("lost", role, target, worker.failure)
            return
        if before is None:
            self.changes.add("joined", role, target)
        elif worker.instance != before:
            self.changes.add("restarted", role, target)
        elif not answered:
            self.changes.add("back", role, target)
        self.changes.compile(role, target, answer.report.compiling)
        if role != "prefill" and worker.state is not WorkerState.DUPLICATE:
            self._metrics.cluster_prefix_queried.inc(worker.queried)
            self._metrics.cluster_prefix_hit.inc(worker.hit)

    def reconsider(self) -> None:
        """Decide again which workers can get requests."""
        self.fingerprint = choose_fingerprint(
            self.fingerprint, self._fingerprints(self.decode.values()), self._fingerprints(self.prefill.values())
        )
        for worker in [*self.workers, *self.leaving.values()]:
            state, detail = self._judge(worker)
            if state is not worker.state or detail != worker.detail:
                self._announce(worker, state, detail)
        self._decode_answered = self._decode_answered or any(worker.answered for worker in self.decode.values())
        if all(names.found for names in self._names) and all(worker.answered for worker in self.workers):
            self._settled.set()
        if self.healthy or not self.meeting:
            self._met.set()
        else:
            self._met.clear()
        self.on_change()

    def _fingerprints(self, workers: Iterable[Worker]) -> list[str]:
        """Fingerprints of the workers that answer."""
        answers = [worker.answer for worker in workers if worker.answer is not None]
        return [answer.model.fingerprint for answer in answers if answer.model.name == self._model]

    def _judge(self, worker: Worker) -> tuple[WorkerState, str]:
        """A worker's state and why."""
        answer = worker.answer
        if answer is None:
            if not worker.failure:
                return worker.state, worker.detail
            if worker.wrong:
                return WorkerState.INCOMPATIBLE, worker.failure
            early = not worker.answered and worker.silent_s < STARTS_WITHIN_S
            return WorkerState.STARTING if early else WorkerState.DOWN, worker.failure
        if worker.leaving:
            return WorkerState.DRAINING, "no DNS name has its address any more; finishes its requests"
        if twin := self._twin(worker):
            return WorkerState.DUPLICATE, f"is the worker at {twin.target}"
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
            return WorkerState.DRAINING, "finishes its requests"
        if not worker.breaker.allows:
            return WorkerState.FAILING, f"failed {worker.breaker.failures} requests in a row; single requests probe it"
        return WorkerState.HEALTHY, ""

    def _twin(self, worker: Worker) -> Worker | None:
        """The worker before this one that is the same process: a host may have addresses of both families."""
        for each in self.workers:
            if each is worker:
                return None
            alike = each.role == worker.role or "both" in (each.role, worker.role)
            if alike and each.answer is not None and each.instance == worker.instance != 0:
                return each
        return None

    def _announce(self, worker: Worker, state: WorkerState, detail: str) -> None:
        if state is WorkerState.STARTING:
            if worker.detail == NOT_ASKED:
                log.info("waiting for %s", worker)
        elif state is not worker.state:
            level = logging.ERROR if state is WorkerState.INCOMPATIBLE else logging.INFO
            level = logging.WARNING if state is WorkerState.DOWN else level
            log.log(level, "%s is %s: %s", worker, state, detail or "takes requests")
        if state is not worker.state:
            self._metrics.worker_up(worker.role, worker.target, state is WorkerState.HEALTHY)
        worker.state, worker.detail = state, detail

    @property
    def healthy(self) -> bool:
        """Whether any decode worker takes requests."""
        return any(worker.state is WorkerState.HEALTHY for worker in self.decode.values())

    @property
    def complete(self) -> bool:
        """Whether all known workers take requests."""
        usual = (WorkerState.HEALTHY, WorkerState.DUPLICATE)
        return not self.unresolved and all(worker.state in usual for worker in self.workers)

    @property
    def unresolved(self) -> dict[str, str]:
        """DNS names of workers that do not resolve now, as they are written in the settings: why."""
        return {name: failure for names in self._names for name, failure in names.failures.items()}

    def describe(self, role: str) -> dict[str, Any]:
        """The workers' entries in /health, leaving ones included."""
        leaving = [worker for (theirs, _), worker in self.leaving.items() if theirs == role]
        present = [worker for worker in self.workers if worker.role == role]
        return {worker.target: worker.describe() for worker in [*leaving, *present]}

    def names(self) -> dict[str, Any]:
        """The DNS names' entries in /health."""
        return {name: entry for names in self._names for name, entry in names.describe().items()}

    @property
    def starting(self) -> bool:
        """Whether some worker has never answered and the grace for that is not over, or no decode worker ever has."""
        return not self._settled.is_set() or not self._decode_answered

    @property
    def meeting(self) -> bool:
        """Whether a decode worker has just joined and has not answered yet."""
        return any(worker.answer is None and not worker.failure for worker in self.decode.values())

    async def settle(self) -> None:
        """Wait a little for workers that are still to be found."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STARTUP_WAIT_S):
                await self._settled.wait()
                await self._met.wait()

    def healthy_decode(self, kv_cache: str = "") -> list[DecodeWorker]:
        """Decode workers that take requests which ask for `kv_cache`."""
        return able([worker for worker in self.decode.values() if suits(worker.kv_cache, kv_cache)])

    def unavailable(self, kv_cache: str = "") -> KvrailError:
        """Why no decode worker takes requests that ask for `kv_cache`: none does now, or none has such pages."""
        workers = [worker for worker in self.decode.values() if worker.state is not WorkerState.INCOMPATIBLE]
        forms = {worker.kv_cache for worker in workers if worker.kv_cache}
        starting = any(worker.state is WorkerState.STARTING for worker in workers)
        if forms and not starting and not any(suits(form, kv_cache) for form in forms):
            return InvalidRequestError(
                f"kvrail.kv_cache: {kv_cache!r} is not served here; decode workers keep their KV pages as"
                f" {' or '.join(sorted(forms))}",
                param="kvrail.kv_cache",
            )
        states = [f"{worker.target} is {worker.state}" for worker in self.decode.values()]
        states += [
            f"{name} {failure}"
            for names in (self._decode_names, self._both_names)
            for name, failure in names.failures.items()
        ]
        kind = f" that keeps KV pages as {kv_cache!r}" if kv_cache else ""
        return WorkerUnavailableError(
            f"no decode worker{kind} takes requests now ({', '.join(states)}); retry, or start one"
        )

    def candidates(self) -> tuple[list[Candidate], list[Candidate]]:
        """Decode and prefill workers as the policy sees them; a worker of both roles is the same in both."""
        able_to = [each for each in self.prefill.values() if not isinstance(each, BothWorker) or each.prefills]
        prefill: dict[Worker, Candidate] = {each: each.candidate() for each in able_to}
        alone = not able(prefill.values())
        decode = [prefill.get(each) or each.candidate(computes=alone) for each in self.decode.values()]
        return decode, list(prefill.values())

    def places(self, n: int) -> int:
        """How many of a prompt's n sequences every worker computes at once; n without workers."""
        answers = (each.answer for each in able(self.decode.values()))
        return min((places(n, each.max_running) for each in answers if each is not None), default=n)

    @property
    def page_size(self) -> int:
        """Tokens of a page on the decode workers; 0: not known."""
        return next((w.answer.layout.page_size for w in self.decode.values() if w.answer is not None), 0)

    def begin(self, worker: Worker) -> float:
        """A request goes to `worker`; returns when it began, for the breaker."""
        began = worker.breaker.begin()
        if not worker.breaker.closed:
            self.reconsider()  # this request probes it; others do not
        return began

    def limits(self, kv_cache: str = "") -> Limits:
        """The limits that every decode worker can keep that takes requests which ask for `kv_cache`.

        Raises WorkerUnavailableError if there is none, InvalidRequestError if there will be none either.
        """
        answers = [worker.answer for worker in self.healthy_decode(kv_cache) if worker.answer is not None]
        if not answers:
            raise self.unavailable(kv_cache)
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
