"""The queue of prompts, and what a prompt holds of a worker once it has left the queue.

Prompts wait here and not at workers: a worker's queue is first come, first served, this one is fair between clients.
"""

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvrail.errors import DeadlineError
from kvrail.runtime.queueing import OUTPUT_WEIGHT, FairQueue, Ticket
from kvrail.services.router.fleet.policy import PlacementRequest, WorkerChoice, able, suitable
from kvrail.services.router.fleet.ways import Slo, Snapshot, choose_way
from kvrail.services.router.fleet.worker import DecodeWorker, Worker
from kvrail.services.router.fleet.workers import WorkerPool
from kvrail.services.router.generate.rates import CompletionRate
from kvrail.telemetry.router import RouterMetrics
from kvrail.values.pagehash import page_digest, page_hashes, page_space
from kvrail.values.sampling import SamplingParams

FIRST_OUTPUT = 128.0
"""Expected tokens of an answer, before any was seen."""
WEIGHT = 0.05
"""Weight of the newest answer in the running mean."""
HASHED_PAGES = 1024
"""Pages of a prompt whose digests are compared with workers' caches: 65,536 tokens of pages of 64, 2 ms."""


@dataclass(eq=False, slots=True)
class Turn:
    """A prompt in the queue, or past it."""

    ticket: Ticket
    request: PlacementRequest
    granted: asyncio.Future["Reservation"] | None = None
    since: float = 0.0  # when it began to wait

    def needs(self, kv_cache: str) -> None:
        """From now on it goes to workers with such pages; called while it is not in the queue."""
        if kv_cache != self.request.kv_cache:
            self.request, self.ticket.kind = replace(self.request, kv_cache=kv_cache), kv_cache


@dataclass(eq=False, slots=True)
class Reservation:
    """What a prompt holds of a decode worker and, until its first token, of the worker that computes it.

    prefill: prefill workers, first the one that is to compute the prompt. places: sequences that the decode worker
    computes at once. kv_cache: the form of that worker's pages. began: when, for its breaker. computing: what still
    computes the prompt, and of that `tokens` tokens. stop: ends the call to the worker. taken_back: the places, which
    were lent, went to another prompt; this one goes on later, where it stopped. left: all was given back.
    """

    turn: Turn
    worker: DecodeWorker
    prefill: Sequence[Worker]
    places: int
    kv_cache: str
    began: float
    computing: Worker | None
    tokens: int
    stop: Callable[[], object] | None = None
    taken_back: bool = False
    left: bool = False

    def stops_with(self, stop: Callable[[], object]) -> None:
        """What ends the call to the worker, should the places be taken back; at once, if they have been."""
        self.stop = stop
        if self.taken_back:
            stop()


class Dispatcher:
    """Reserves workers for prompts, in turns. Belongs to one event loop.

    share: part of all room that one client leaves to newcomers. prefill_wait_s: longest wait for a prefill worker
    before a decode worker may compute the prompt; 0: no limit. slo: limits that workers of both roles are to keep.
    """

    def __init__(
        self,
        pool: WorkerPool,
        metrics: RouterMetrics,
        share: float,
        prefill_wait_s: float = 0.0,
        slo: Slo | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue = FairQueue(share)
        self.rate = CompletionRate(clock)
        self.pool = pool
        self.metrics = metrics
        self._prefill_wait_s = prefill_wait_s or math.inf
        self._slo = slo or Slo()
        self._split: int | None = None
        self._clock = clock
        self._turns: dict[Ticket, Turn] = {}
        self._reserved: dict[Ticket, Reservation] = {}
        self._computing: Counter[str] = Counter()  # tokens of prompts on their way to their first tokens, by client
        self._output = FIRST_OUTPUT
        self._number = 0
        self._serving = False
        pool.on_change = self.serve

    def turn(
        self,
        client: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        priority: int,
        cache_salt: str = "",
        kv_cache: str = "",
    ) -> Turn:
        """A prompt's entry for the queue, which `place` puts it into."""
        size, local = self.pool.page_size, sampling.prompt_logprobs is not None
        # For log probabilities of the prompt all of it is computed, whatever is cached.
        known = prompt[: size * HASHED_PAGES] if size and not local else ()
        hashed = page_hashes(known, size, space=page_space(salt=cache_salt)) if known else []
        request = PlacementRequest(
            len(prompt),
            [page_digest(each) for each in hashed],
            size,
            sampling.n,
            min(sampling.max_tokens, round(self._output)),
            self._number,
            secrets.randbits(64),
            local,
            kv_cache,
        )
        self._number += 1
        return Turn(Ticket(client, sampling.n, len(prompt), priority, kv_cache), request)

    async def place(self, turn: Turn, timeout_s: float, *, again: bool = False) -> Reservation:
        """Wait for a reservation. Raises DeadlineError, or an error if no decode worker takes such requests.

        again: an earlier reservation failed; the prompt goes before the others of its client.
        """
        began = self._clock()
        if not again:
            turn.since = began
        loop = asyncio.get_running_loop()
        ticket, turn.granted = turn.ticket, loop.create_future()
        ticket.places = self.pool.places(turn.request.n)
        self._turns[ticket] = turn
        (self.queue.put_back if again else self.queue.add)(ticket)
        self.metrics.queue_place.observe(len(self.queue) - 1)
        self.serve()
        patience = None if math.isinf(self._prefill_wait_s) else loop.call_later(self._prefill_wait_s, self.serve)
        place: Reservation | None = None
        try:
            async with asyncio.timeout(timeout_s):
                place = await turn.granted
        except TimeoutError:
            raise DeadlineError(
                f"no worker had room within the request's remaining {timeout_s:.3g} s; {len(self.queue)} prompts wait"
            ) from None
        finally:
            if patience is not None:
                patience.cancel()
            if place is None:
                self._withdraw(turn, turn.granted)
        self.metrics.queue_seconds.observe(self._clock() - began)
        return place

    def _withdraw(self, turn: Turn, granted: "asyncio.Future[Reservation]") -> None:
        """Leave the queue; a reservation that was made at the same moment is given back."""
        if turn.ticket in self._turns:
            self._drop(turn.ticket)
            self.serve()
        elif granted.done() and not granted.cancelled() and granted.exception() is None:
            self.leave(granted.result())

    def serve(self) -> None:
        """Reserve workers for the prompts whose turn it is, while there is room."""
        if self._serving:
            return
        self._serving = True
        try:
            if self._turns and not self.pool.meeting:
                self._fail_stranded()
            while self._turns and self._serve_next():
                pass
        finally:
            self._serving = False
            self._tell()

    def _serve_next(self) -> bool:
        """Whether a prompt left the queue."""
        passed: list[Ticket] = []
        decode, prefill = self.pool.candidates()
        workers = Snapshot(decode, prefill, self._slo, self._split, self._waited())
        patience_s = workers.patience_s(self._prefill_wait_s)
        suiting = {kind: able(suitable(kind, decode)) for kind in self.queue.kinds}
        room = {kind: any(each.load.has_room() for each in those) for kind, those in suiting.items()}
        free = sum(max(0, each.load.max_running - each.load.sequences) for each in able(decode))
        for ticket in self.queue.turns(free):
            turn = self._turns[ticket]
            granted = turn.granted
            if granted is None or granted.done():  # its request has just ended
                self._drop(ticket)
                return True
            if not room[ticket.kind]:
                if self._take_back(ticket, {each.target for each in suiting[ticket.kind]}):
                    return True
                continue  # it is not passed: the others do not take what it could have
            urgent, spare_s = not self._computing[ticket.client], turn.since + patience_s - self._clock()
            choice = choose_way(self.pool.policy, turn.request, workers, urgent=urgent, spare_s=spare_s)
            if choice is not None:
                del self._turns[ticket]
                self.queue.granted(ticket, passed)
                granted.set_result(self._take(turn, choice))
                return True
            passed.append(ticket)
        return False

    def _waited(self) -> dict[str, float]:
        """Seconds that the first prompt of each kind has waited."""
        now, kinds, waited = self._clock(), self.queue.kinds, dict[str, float]()
        for ticket, turn in self._turns.items():
            waited.setdefault(ticket.kind, now - turn.since)
            if len(waited) == len(kinds):
                break
        return waited

    def _take_back(self, ticket: Ticket, targets: set[str]) -> bool:
        """Make room on one of these workers for a prompt whose client is within its share and has none on its way."""
        if self._computing[ticket.client]:
            return False
        borrower = self.queue.borrowed(ticket, lambda other: self._reserved[other].worker.target in targets)
        if borrower is None:
            return False
        ticket.took = True
        reserved = self._reserved[borrower]
        reserved.taken_back = True
        if reserved.stop is not None:
            reserved.stop()
        self.leave(reserved)
        return True

    def _take(self, turn: Turn, choice: WorkerChoice) -> Reservation:
        request, worker = turn.request, self.pool.decode[choice.decode.target]
        prefill = [self.pool.prefill[each.target] for each in choice.prefill]
        computing: Worker = prefill[0] if prefill else worker
        tokens = request.prompt_tokens - choice.computed_tokens
        began, places = self.pool.begin(worker), worker.load().places(request.n)
        worker.take(request.n, places, request.pages)
        computing.compute(tokens)
        if computing is not worker:
            computing.take(1, 1, request.pages)
        self._computing[turn.ticket.client] += tokens
        self.metrics.placed("decode", worker.role, worker.target, choice.decode.reason, worker.kv_cache)
        self.metrics.prefix_tokens["expected"].inc(choice.decode.cached_tokens)
        if choice.way is not None:
            self._split = choice.split
            self.metrics.went(*choice.way)
        if prefill:
            reason = choice.prefill[0].reason
            self.metrics.placed("prefill", computing.role, computing.target, reason, computing.kv_cache)
        made = Reservation(turn, worker, prefill, places, worker.kv_cache, began, computing, tokens)
        self._reserved[turn.ticket] = made
        return made

    def advanced(self, reserved: Reservation, tokens: int) -> None:
        """Its worker has sent `tokens` more tokens."""
        reserved.worker.breaker.succeeded(reserved.began)
        if tokens and not reserved.left:
            self._computed(reserved)
            self.queue.charge(reserved.turn.ticket.client, OUTPUT_WEIGHT * tokens)

    def _computed(self, reserved: Reservation) -> None:
        """Its prompt is computed, since the first token has come, or need not be any more."""
        computing, reserved.computing = reserved.computing, None
        if computing is None:
            return
        computing.computed(reserved.tokens)
        if computing is not reserved.worker:
            computing.leave(1, 1, reserved.turn.request.pages)
        client = reserved.turn.ticket.client
        self._computing[client] -= reserved.tokens
        if self._computing[client] <= 0:
            del self._computing[client]
        self.serve()

    def leave(self, reserved: Reservation, *, refused: bool = False) -> None:
        """Give everything back; harmless if that was done. refused: the worker had no room after all."""
        if reserved.left:
            return
        reserved.left = True
        reserved.worker.refused = refused
        self._computed(reserved)
        reserved.worker.breaker.left(reserved.began)
        turn = reserved.turn
        reserved.worker.leave(turn.request.n, reserved.places, turn.request.pages)
        self.queue.ended(turn.ticket)
        del self._reserved[turn.ticket]
        if not (refused or reserved.taken_back):
            self.rate.ended(turn.request.n)
        self.serve()

    def answered(self, tokens: int, found: int) -> None:
        """A sequence has ended with `tokens` tokens; its worker had cached `found` tokens of the prompt."""
        self.metrics.prefix_tokens["found"].inc(found)
        self._output += WEIGHT * (tokens - self._output)

    def _fail_stranded(self) -> None:
        """Fail the prompts whose kind of workers takes no requests now."""
        for kind in self.queue.kinds:
            if self.pool.healthy_decode(kind):
                continue
            error = self.pool.unavailable(kind)
            for ticket, turn in [each for each in self._turns.items() if each[0].kind == kind]:
                self._drop(ticket)
                if turn.granted is not None and not turn.granted.done():
                    turn.granted.set_exception(error)

    def _drop(self, ticket: Ticket) -> None:
        del self._turns[ticket]
        self.queue.remove(ticket)

    def _tell(self) -> None:
        self.rate.waiting(bool(self._turns))
        self.metrics.queue_length.set(len(self.queue))
        self.metrics.queue_clients.set(self.queue.clients)
