"""The engine: requests in, events out, one step after another.

One thread steps; any thread may submit, abort or report on a transfer. A lock guards the books (requests, scheduler,
pages) and is held only while they change, never while the model computes. A request that is dropped while its step
computes keeps its pages until that step is over.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from kvrail.engine.batch.batch import Drawing, Feed, SampledToken
from kvrail.engine.kv.leases import PageLease
from kvrail.engine.kv.pages import PageCounts
from kvrail.engine.kv.prefix_events import Cursor, KVEvents
from kvrail.engine.request.events import Delivery, Failed
from kvrail.engine.request.requests import EngineRequest, ModelLimits, WrittenPages, check_request
from kvrail.engine.sampling.masks import MaskFinder
from kvrail.engine.schedule.book import RequestBook
from kvrail.engine.schedule.late import LateLaunch
from kvrail.engine.schedule.pace import StepPace
from kvrail.engine.schedule.planning import Step
from kvrail.engine.schedule.scheduler import Scheduler
from kvrail.engine.step.flight import Draws, Flight, Runner
from kvrail.errors import KvrailError, OverloadedError, WorkerUnavailableError
from kvrail.telemetry.worker import EngineMetrics
from kvrail.text import Tokenizer
from kvrail.values.pagehash import page_hashes

logger = logging.getLogger("kvrail.engine")

MAX_FAILURES = 3
"""Failed steps in a row after which the engine gives up: the device is broken, not a request."""


LayerObserver = Callable[[range, Sequence[WrittenPages]], None]
"""Called on the engine's thread once some layers' work of a prefill step is enqueued: (layers, pages they complete).
Over a step the ranges follow on one another, from the first layer to the last."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Load of the engine. receiving: of the sequences that run, those that only wait for their KV."""

    running: int
    receiving: int
    waiting: int
    pages: PageCounts
    healthy: bool


class Engine:
    """Continuous batching over one model on one device.

    deliver: called with batches of events, in order, from any thread; must not block. max_drafts: tokens that a
    sequence drafts at most on coarse KV; 0 turns drafting off.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: Draws,
        scheduler: Scheduler,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
        metrics: EngineMetrics,
        deliver: Callable[[Delivery], None],
        on_layer: LayerObserver | None = None,
        max_drafts: int = 64,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._scheduler = scheduler
        self._limits = limits
        self._book = RequestBook(scheduler, limits, tokenizer, metrics, max_drafts)
        self._metrics = metrics
        self._sink = deliver
        self._on_layer = on_layer
        self._changed = threading.Condition(threading.RLock())
        self._outbox: deque[Delivery] = deque()  # filled under the lock, so that the order is that of the changes
        self._delivering = threading.Lock()
        self._flight: Flight | None = None
        self._masks = MaskFinder(limits.vocab_size, limits.eos_token_ids)
        self._landed = 0.0
        self._failures = 0
        self._stepping_since: float | None = None
        self._preemptions = 0
        self.pace = StepPace()
        self._late = LateLaunch()
        self.steps = 0  # that have come to their end
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
            self._outbox.append(self._book.fail(self._book.ids(), WorkerUnavailableError("the worker has stopped")))
        self._deliver()

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequestError, ContextLengthError or OverloadedError; then nothing is kept."""
        pool = self._scheduler.pool
        check_request(request, self._limits, pool)
        hashes = page_hashes(request.prompt_ids, pool.page_size, space=request.cache_space)  # a long prompt's take time
        with self._changed:
            if not self.alive:
                raise WorkerUnavailableError("the engine has stopped; restart the worker")
            if not self._scheduler.can_wait():
                raise OverloadedError(f"{self._scheduler.num_waiting} requests are waiting already; try again later")
            self._book.open(request, hashes)
            self._outbox.append(self._book.admit())
            self._changed.notify()
        self._deliver()

    def abort(self, request_id: str) -> None:
        """Drop a request, wherever it is. No further events come. Unknown ids are ignored: it may just have ended."""
        self._change(lambda: self._book.close(request_id))

    def claim_lease(self, request_id: str) -> PageLease | None:
        """Take over the hold on an admitted request's pages; None where it was dropped. Give it to `release_lease`."""
        with self._changed:
            return self._book.leases.claim(request_id)

    def receive_first_tokens(self, request_id: str, tokens: Sequence[SampledToken]) -> None:
        """The first token of each of the n sequences, drawn by the prefill worker; their output is emitted at once."""
        with self._changed:
            self._outbox.append(self._book.receive_first_tokens(request_id, tokens))
        self._change(lambda: self._book.begin_drafting(request_id))

    def receive_coarse_kv(self, request_id: str) -> None:
        """The prompt's pages hold a coarse form of its KV: once the first token is here, the request drafts on it.

        A request with n > 1 does not draft. Unknown ids are ignored.
        """
        self._change(lambda: self._book.receive_coarse_kv(request_id))

    def receive_kv(self, request_id: str) -> None:
        """A transfer has filled the prompt's pages exactly; the first tokens came before it. Drafts are verified."""
        self._change(lambda: self._book.receive_kv(request_id))

    def drop_drafts(self, request_id: str) -> None:
        """Another transfer begins to overwrite the pages: forget the drafts, make none before `receive_coarse_kv`."""
        self._change(lambda: self._book.drop_drafts(request_id))

    def compute_here(self, request_id: str) -> None:
        """A transfer failed for good; drafts are forgotten and the prompt's KV is computed by this engine."""
        self._change(lambda: self._book.compute_here(request_id))

    def release_lease(self, lease: PageLease) -> None:
        """Give back a hold on pages, after the last read or write of them has completed."""
        self._change(lambda: self._book.leases.release(lease))

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
    def step_seconds(self) -> float:
        """For how long the present step has run; 0 between steps."""
        since = self._stepping_since
        return 0.0 if since is None else perf_counter() - since

    def check(self) -> None:
        """Raise AssertionError unless free + used + cached = total and, when nothing runs, used = 0."""
        with self._changed:
            self._scheduler.check()
            if self._book.idle:
                assert self._scheduler.pool.counts().used == 0, "pages are held by nobody's request"

    def pending(self) -> bool:
        """Whether a step would do anything: compute, or emit what was drawn."""
        with self._changed:
            return self._flight is not None or self._scheduler.has_work() or self._book.has_drawn

    def owes_a_step(self) -> bool:
        """Whether requests wait for a step and for nothing else."""
        with self._changed:
            return self._book.owes_a_step

    def step(self) -> None:
        """Take one step to its end.

        While the device computes it, the next is planned and enqueued, if that can be done without knowing what it
        draws, and the text of tokens drawn before is made.
        """
        if not self._runner.launches_async:
            self._emit_drawn()
        failures = self._failures
        flight, self._flight = self._flight, None
        if flight is None:
            flight = self._launch(self._plan())
        elif flight.undrawn:
            flight = self._draw(flight)
        if flight is not None:
            with self._changed:
                due = self._scheduler.awaits_next_step
            if due:
                self._late.wait(flight.near_end, self._emit_drawn)
            self._flight = self._launch_ahead(flight)
        if self._runner.launches_async or flight is None:
            self._emit_drawn()
        if flight is not None:
            self._land(flight)
            if self._failures == failures:  # neither this step nor the one behind it has failed
                self._failures = 0

    def _plan(self) -> Step:
        with self._changed:
            self._outbox.append(self._book.admit())
            step, started = self._book.plan()
            self._outbox.append(started)
        self._deliver()
        return step

    def _launch(self, step: Step, before: Drawing | None = None) -> Flight | None:
        """Enqueue a step; None where nothing is to be computed or that failed. before: draws it takes tokens from.

        Behind such draws, whatever a grammar decides about is left undrawn: its masks need these tokens.
        """
        if not step.work:
            return None
        begin = perf_counter()
        feed = Feed(before.tokens, step.sources) if before is not None and step.sources else None
        waits = feed is not None and step.constrained()
        try:
            flight = Flight(step, begin, None if waits else self._masks.begin(step))
            draws = self._sampler.params_of(step.drawn_in_order()) if self._runner.launches_async else ()
            flight.computed(self._runner.execute(step.slices, self._observer(step), feed, draws), self._runner.extras)
        except Exception as error:  # noqa: BLE001 whatever broke a step, its requests must hear of it
            self._step_failed([step], error)
            return None
        return flight if waits else self._draw(flight)

    def _draw(self, flight: Flight) -> Flight | None:
        """Enqueue a computed step's draws; None where that failed."""
        try:
            flight.draw(self._sampler)
        except Exception as error:  # noqa: BLE001 see _launch
            self._step_failed([flight.step], error)
            return None
        return flight

    def _launch_ahead(self, flight: Flight) -> Flight | None:
        """Enqueue the step behind `flight`; None where it depends on what that draws."""
        begin, drawing = perf_counter(), flight.drawing
        if not self._runner.launches_async or (drawing is not None and drawing.tokens is None):
            return None
        with self._changed:
            if self._stopping:
                return None
            self._outbox.append(self._book.admit())
            planned = self._book.plan_ahead(flight.step)
            if planned is not None:
                self._outbox.append(planned[1])
        self._deliver()
        behind = None if planned is None else self._launch(planned[0], drawing)
        self._late.launched(perf_counter() - begin)
        return behind

    def _land(self, flight: Flight) -> None:
        """Wait for a step's draws and book them."""
        try:
            tokens, scores = flight.land(), flight.scores()
        except Exception as error:  # noqa: BLE001 see _launch
            behind, self._flight = self._flight, None
            self._step_failed([each.step for each in (flight, behind) if each is not None], error)
            return
        with self._changed:
            self._outbox.append(self._book.settle(flight.step, tokens, scores))
            self.steps += 1
            if self._flight is not None:
                self._flight.find_masks(self._masks)  # while the device computes it
        self._deliver()
        now = perf_counter()
        self._record(flight.step, now - max(flight.begin, self._landed))  # enqueued ahead, it waited for its turn
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
            except Exception as error:  # noqa: BLE001 the books can no longer be trusted
                self._give_up(error)
                return
            finally:
                self._stepping_since = None
        flight, self._flight = self._flight, None
        if flight is not None and self._draw(flight):
            self._land(flight)  # its pages are written until then
        self._masks.close()

    def _give_up(self, error: Exception) -> None:
        """End for good: every request is failed, and none is taken any more."""
        logger.critical("the engine has broken down", exc_info=error)
        with self._changed:
            self._failures = MAX_FAILURES
            lost = Failed(WorkerUnavailableError("the engine has broken down"))
            self._outbox.append([(request_id, lost) for request_id in self._book.ids()])
        self._deliver()

    def _change(self, change: Callable[[], object]) -> None:
        """Change the books, admit what fits now, wake the thread."""
        with self._changed:
            change()
            self._outbox.append(self._book.admit())
            self._changed.notify()
        self._deliver()

    def _deliver(self) -> None:
        """Hand over what has happened, in order, whichever thread comes first."""
        with self._delivering:
            while self._outbox:
                self._sink(self._outbox.popleft())

    def _observer(self, step: Step) -> Callable[[int], None] | None:
        observe = self._on_layer
        if observe is None or not step.written:
            return None
        begin = 0

        def tell(layer: int) -> None:
            nonlocal begin
            layers, begin = range(begin, layer + 1), layer + 1
            observe(layers, step.written)

        return tell

    def _record(self, step: Step, seconds: float) -> None:
        self._metrics.step_seconds.observe(seconds)
        self._metrics.step_tokens.observe(sum(item.count for item in step.work))
        prompt = [w.count for w, s in zip(step.work, step.slices, strict=True) if s.start < len(w.sequence.prompt_ids)]
        self._metrics.prompt_tokens.inc(sum(prompt))
        self.pace.note(sum(prompt), len(step.work) - len(prompt), seconds)
        if not prompt:
            self._late.landed(seconds)
        self._metrics.preemptions.inc(self._scheduler.preemptions - self._preemptions)
        self._preemptions = self._scheduler.preemptions

    def report_load(self) -> None:
        """Bring the gauges up to date; called when metrics are read."""
        status = self.status()
        self._metrics.set_load(status.running, status.waiting, status.receiving)
        self._metrics.set_pages(free=status.pages.free, used=status.pages.used, cached=status.pages.cached)

    def _emit_drawn(self) -> None:
        with self._changed:
            self._outbox.append(self._book.emit_drawn())
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
            self._book.abandon(steps)
            self._outbox.append(self._book.fail(computing, known))
            if not self.alive:
                logger.critical("%d steps in a row have failed: the engine gives up", self._failures)
                lost = WorkerUnavailableError("the engine has given up")
                self._outbox.append(self._book.fail(self._book.ids(), lost))
        self._deliver()
