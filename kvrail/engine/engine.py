"""The engine: requests in, events out, one step after another.

One thread steps; any thread may submit, abort or report on a transfer. A lock guards requests, queues and pages; it is
held only while they change, never while the model computes. A request that is dropped while a step computes it keeps
its pages until that step is over.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from torch import Tensor

from kvrail.engine.batch.batch import Feed
from kvrail.engine.kv.leases import PageLease
from kvrail.engine.kv.pages import PageCounts
from kvrail.engine.kv.prefix_events import Cursor, KVEvents
from kvrail.engine.request.events import Delivery, LayerListener
from kvrail.engine.request.requests import EngineRequest, ModelLimits, check_request
from kvrail.engine.sampling.masks import MaskFinder
from kvrail.engine.sampling.sampler import Sampler
from kvrail.engine.schedule.launch_delay import LaunchDelay
from kvrail.engine.schedule.planning import Step
from kvrail.engine.schedule.scheduler import Scheduler
from kvrail.engine.schedule.tracker import RequestTracker
from kvrail.engine.step.closing import PageCloser
from kvrail.engine.step.in_flight import InFlightStep
from kvrail.errors import KvrailError, OverloadedError, WorkerUnavailableError
from kvrail.telemetry.worker import EngineMetrics
from kvrail.text import Tokenizer
from kvrail.values.pagehash import page_hashes

if TYPE_CHECKING:
    from kvrail.engine.step.runner import ModelRunner

logger = logging.getLogger("kvrail.engine")

MAX_FAILURES = 3
"""Failed steps in a row after which the engine gives up: the device is broken, not a request."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Load of the engine, in sequences. receiving: those that run but only wait for their KV."""

    running: int
    receiving: int
    waiting: int
    pages: PageCounts
    healthy: bool


class Engine:
    """Continuous batching over one model on one device.

    deliver: called with batches of events, in order, from any thread; must not block. listener: learns which pages each
    layer of a prefill completes. max_drafts: most tokens that a sequence drafts on coarse KV; 0 turns drafting off.
    closer: where full pages are closed.
    """

    def __init__(
        self,
        runner: "ModelRunner",
        sampler: Sampler,
        scheduler: Scheduler,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
        metrics: EngineMetrics,
        deliver: Callable[[Delivery], None],
        listener: LayerListener | None = None,
        max_drafts: int = 64,
        closer: PageCloser | None = None,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._scheduler = scheduler
        self._limits = limits
        self._tracker = RequestTracker(scheduler, limits, tokenizer, metrics, max_drafts)
        self._metrics = metrics
        self._sink = deliver
        self._listener = listener
        self._closer = closer
        self._changed = threading.Condition(threading.RLock())
        self._delivering = threading.Lock()  # taken before the other, if both are
        self._in_flight: InFlightStep | None = None
        self._masks = MaskFinder(limits.vocab_size, limits.eos_token_ids)
        self._landed = 0.0
        self._failures = 0
        self._stepping_since: float | None = None
        self._preemptions = 0
        self.step_cost = scheduler.cost
        self._launch_delay = LaunchDelay()
        self.steps = 0  # that have ended
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start stepping in a thread."""
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop stepping and wait for the thread; what still runs is failed."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            self._tracker.fail(self._tracker.ids(), WorkerUnavailableError("the worker has stopped"))
        self._deliver()

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequestError, ContextLengthError or OverloadedError; then nothing is kept."""
        pool = self._scheduler.pool
        check_request(request, self._limits, pool)
        hashes = page_hashes(request.prompt_ids, pool.page_size, space=request.space)  # a long prompt's take time
        with self.change():
            if not self.alive:
                raise WorkerUnavailableError("the engine has stopped; restart the worker")
            if not self._scheduler.can_wait():
                raise OverloadedError(f"{self._scheduler.num_waiting} requests are waiting already; try again later")
            self._tracker.open(request, hashes)

    def abort(self, request_id: str) -> None:
        """Drop a request, wherever it is; no further event comes. Unknown ids are ignored: it may just have ended."""
        with self.change():
            self._tracker.close(request_id)

    @contextmanager
    def change(self) -> Iterator[RequestTracker]:
        """Hold the lock for a change of requests' state; then admit what fits now, wake the thread and deliver."""
        with self._changed:
            yield self._tracker
            self._tracker.admit()
            self._changed.notify()
        self._deliver()

    def claim_lease(self, request_id: str) -> PageLease | None:
        """Take over the hold on an admitted request's pages; None if it was dropped. Give it to `release_lease`."""
        with self._changed:
            return self._tracker.leases.claim(request_id)

    def release_lease(self, lease: PageLease) -> None:
        """Give back a hold on pages, after the last read or write of them has completed."""
        with self.change():
            self._tracker.leases.release(lease)

    def status(self) -> EngineStatus:
        """Load and health now."""
        with self._changed:
            queue, pages = self._scheduler, self._scheduler.pool.counts()
            return EngineStatus(queue.num_running, queue.num_receiving, queue.num_waiting, pages, self.alive)

    def kv_events(self, cursor: Cursor, limit: int) -> KVEvents:
        """At most `limit` events of the prefix cache behind a cursor."""
        with self._changed:
            return self._scheduler.pool.events.since(cursor, limit)

    @property
    def alive(self) -> bool:
        """Whether it takes requests; once it has given up it never does again."""
        return not self._stopping and self._failures < MAX_FAILURES

    @property
    def max_running(self) -> int:
        """Most sequences that it runs at once."""
        return self._scheduler.budget.max_running

    @property
    def step_seconds(self) -> float:
        """For how long the present step has run; 0 between steps."""
        since = self._stepping_since
        return 0.0 if since is None else perf_counter() - since

    def check(self) -> None:
        """Raise AssertionError unless free + used + cached = total and, when nothing runs, used = 0."""
        with self._changed:
            self._scheduler.check()
            if self._tracker.idle:
                assert self._scheduler.pool.counts().used == 0, "pages are held, but no request is live"

    def pending(self) -> bool:
        """Whether a step would compute or emit anything."""
        with self._changed:
            closing = self._closer is not None and self._closer.pending
            return closing or self._in_flight is not None or self._scheduler.has_work() or self._tracker.has_drawn

    def owes_a_step(self) -> bool:
        """Whether requests wait for a step alone."""
        with self._changed:
            return self._tracker.owes_a_step

    def step(self) -> None:
        """Take one step to its end.

        While the device computes it, the next step is planned and enqueued, unless that depends on this one's draws.
        Text is made of the tokens that the step before drew.
        """
        if not self._runner.launches_async:
            self._emit_drawn()
        if self._closer is not None:
            self._closer.close_pages(
                self._changed,
                lambda: self._in_flight is None and not self._scheduler.has_work(),
                launches=self._runner.launches_async,
            )
        failures = self._failures
        now, self._in_flight = self._in_flight, None
        if now is None:
            with self._changed:
                step = self._tracker.plan()
            self._deliver()
            now = self._launch(step)
        elif now.undrawn:
            now = self._draw(now)
        if now is not None:
            with self._changed:
                due = self._scheduler.awaits_next_step
            if due:
                self._launch_delay.wait(now.near_end, self._emit_drawn)
            self._in_flight = self._launch_ahead(now)
        if self._runner.launches_async or now is None:
            self._emit_drawn()
        if now is not None:
            self._land(now)
            if self._failures == failures:  # neither this step nor the one behind it has failed
                self._failures = 0

    def _launch(self, step: Step, drawn: Tensor | None = None) -> InFlightStep | None:
        """Enqueue a step; None if there is nothing to compute or that failed. drawn: what the step before draws.

        If it takes tokens from these draws, a step with a grammar is sampled later: its masks depend on them.
        """
        if not step.work:
            return None
        begin = perf_counter()
        feed = Feed(drawn, step.sources) if drawn is not None and step.sources else None
        waits = feed is not None and step.constrained()
        try:
            masks = None if waits else self._masks.begin(step)
            draws = self._sampler.params_of(step.drawn_in_order()) if self._runner.launches_async else ()
            listener = self._listener
            on_layer = listener.begin(step.written) if listener is not None and step.written else None
            logits = self._runner.execute(step.slices, on_layer, feed, draws)
            launched = InFlightStep(step, begin, masks, logits, self._runner.extras)
        except Exception as error:  # noqa: BLE001 whatever broke a step, its requests must fail with it
            self._step_failed([step], error)
            return None
        return launched if waits else self._draw(launched)

    def _draw(self, computed: InFlightStep) -> InFlightStep | None:
        """Enqueue a computed step's draws; None if that failed."""
        try:
            computed.draw(self._sampler)
        except Exception as error:  # noqa: BLE001 see _launch
            self._step_failed([computed.step], error)
            return None
        return computed

    def _launch_ahead(self, now: InFlightStep) -> InFlightStep | None:
        """Enqueue the step behind `now`; None if it depends on what that draws."""
        begin, sample = perf_counter(), now.sample
        if not self._runner.launches_async or (sample is not None and sample.tokens is None):
            return None
        with self._changed:
            if self._stopping:
                return None
            step = self._tracker.plan_ahead(now.step)
        self._deliver()
        behind = None if step is None else self._launch(step, None if sample is None else sample.tokens)
        self._launch_delay.launched(perf_counter() - begin)
        return behind

    def _land(self, computed: InFlightStep) -> None:
        """Wait for a step's draws and take them in."""
        try:
            tokens, scores = computed.land(), computed.scores()
        except Exception as error:  # noqa: BLE001 see _launch
            behind, self._in_flight = self._in_flight, None
            self._step_failed([each.step for each in (computed, behind) if each is not None], error)
            return
        with self._changed:
            self._tracker.settle(computed.step, tokens, scores)
            self.steps += 1
            if self._in_flight is not None:
                self._in_flight.find_masks(self._masks)  # while the device computes it
        self._deliver()
        now = perf_counter()
        self._record(computed.step, now - max(computed.begin, self._landed))  # enqueued ahead, it waited for its turn
        self._landed = now

    def _loop(self) -> None:
        self._runner.bind_thread()
        while True:
            with self._changed:
                while not (self._stopping or self.pending()):
                    self._changed.wait()
                if self._stopping:
                    break
            self._stepping_since = perf_counter()
            try:
                self.step()
            except Exception as error:  # noqa: BLE001 the state can no longer be trusted
                self._give_up(error)
                return
            finally:
                self._stepping_since = None
        last, self._in_flight = self._in_flight, None
        if last is not None and self._draw(last):
            self._land(last)  # its pages are written until then
        self._masks.close()

    def _give_up(self, error: Exception) -> None:
        """End for good: every request fails, and no further one is taken."""
        logger.critical("the engine has broken down", exc_info=error)
        with self._changed:
            self._failures = MAX_FAILURES
            self._tracker.report_lost(WorkerUnavailableError("the engine has broken down"))
        self._deliver()

    def _deliver(self) -> None:
        """Hand over all events so far, in the order of the changes, whichever thread made them."""
        with self._delivering:
            with self._changed:
                events = self._tracker.take_events()
            self._sink(events)

    def _record(self, step: Step, seconds: float) -> None:
        self._metrics.step_seconds.observe(seconds)
        self._metrics.step_tokens.observe(sum(item.count for item in step.work))
        # Output that is verified, or computed once more, costs what a prompt does.
        chunks = [w for w in step.work if w.count > 1 or w.start < len(w.sequence.prompt_ids)]
        self._metrics.prompt_tokens.inc(sum(max(0, min(w.count, len(w.sequence.prompt_ids) - w.start)) for w in chunks))
        self.step_cost.note(sum(w.count for w in chunks), len(step.work) - len(chunks), seconds)
        if not chunks:
            self._launch_delay.landed(seconds)
        self._metrics.preemptions.inc(self._scheduler.preemptions - self._preemptions)
        self._preemptions = self._scheduler.preemptions
        while self._scheduler.preemptions_of_ended:
            self._metrics.sequence_preemptions.observe(self._scheduler.preemptions_of_ended.pop())

    def report_load(self) -> None:
        """Update the gauges; called when metrics are read."""
        status = self.status()
        self._metrics.set_load(status.running, status.waiting, status.receiving)
        self._metrics.set_pages(free=status.pages.free, used=status.pages.used, cached=status.pages.cached)
        if self._closer is not None:
            self._closer.report(self._metrics)

    def _emit_drawn(self) -> None:
        with self._changed:
            self._tracker.emit_drawn()
        self._deliver()

    def _step_failed(self, steps: Sequence[Step], error: Exception) -> None:
        computing = {item.sequence.request_id for step in steps for item in step.work}
        logger.exception("a step failed; its %d requests are failed", len(computing))
        known = (
            error
            if isinstance(error, KvrailError)
            else WorkerUnavailableError(f"the engine failed: {type(error).__name__}; another worker can go on")
        )
        with self._changed:
            self._failures += 1
            self._tracker.abandon(steps)
            self._tracker.fail(computing, known)
            if not self.alive:
                logger.critical("%d steps in a row have failed: the engine gives up", self._failures)
                self._tracker.fail(self._tracker.ids(), WorkerUnavailableError("the engine has given up"))
        self._deliver()
