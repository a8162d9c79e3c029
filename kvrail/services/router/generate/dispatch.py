"""Where a prompt waits until it is its turn and a worker has room, and what it holds from then on.

What workers have no room for waits here, not with them: a worker's queue is first come, first served, this one is fair.
"""

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrail.errors import DeadlineError, KvrailError, RequestCancelledError
from kvrail.runtime.queueing import OUTPUT_WEIGHT, FairQueue, Ticket
from kvrail.services.router.fleet.policy import Ask, Choice, able, choose
from kvrail.services.router.fleet.worker import DecodeWorker, PrefillWorker, Worker
from kvrail.services.router.fleet.workers import WorkerPool
from kvrail.services.router.generate.rates import Pace
from kvrail.telemetry.router import RouterMetrics
from kvrail.values.pagehash import page_digest, page_hashes, page_space
from kvrail.values.sampling import SamplingParams

FIRST_OUTPUT = 128.0
"""Tokens that an answer has, before any was seen."""
WEIGHT = 0.05
"""Of the newest answer in their running mean."""
HASHED_PAGES = 1024
"""Pages of a prompt that are looked for on workers: 65,536 tokens of pages of 64, which takes the router 2 ms."""


@dataclass(eq=False, slots=True)
class Turn:
    """A prompt that waits for its turn, or has had it."""

    ticket: Ticket
    ask: Ask
    granted: asyncio.Future["Place"] | None = None
    since: float = 0.0  # when it began to wait

    def cancel(self) -> None:
        """The server gives up what waits."""
        if self.granted is not None and not self.granted.done():
            self.granted.set_exception(
                RequestCancelledError("the server ended the request because it shuts down; retry")
            )


@dataclass(eq=False, slots=True)
class Place:
    """A prompt's place with a decode worker and, until its first token, with the worker that computes it.

    prefill: prefill workers, the one that is to compute the prompt first. places: what it takes of the decode worker's.
    began: what the worker's breaker is told.
    """

    dispatcher: "Dispatcher"
    turn: Turn
    worker: DecodeWorker
    prefill: Sequence[PrefillWorker]
    places: int
    began: float
    _computing: Worker | None
    _tokens: int
    _left: bool = field(default=False)

    def succeeded(self, tokens: int) -> None:
        """The worker has sent so many tokens."""
        self.worker.breaker.succeeded(self.began)
        if tokens:
            self.computed()
            self.dispatcher.queue.charge(self.turn.ticket.client, OUTPUT_WEIGHT * tokens)

    def computed(self) -> None:
        """The first token has come: nothing of the prompt is to be computed any more."""
        if self._computing is not None:
            computing, self._computing = self._computing, None
            computing.computed(self._tokens)
            if computing is not self.worker:
                computing.leave(1, 1, self.turn.ask.pages)
            self.dispatcher.first_token(self.turn.ticket.client, self._tokens)

    def ended(self, tokens: int, found: int) -> None:
        """All output is there: so many tokens, of a prompt of which the worker had found so many."""
        self.dispatcher.answered(tokens // self.turn.ask.n, found)

    def leave(self, *, refused: bool = False) -> None:
        """Nothing runs there any more. refused: the worker had no room after all."""
        if self._left:
            return
        self._left = True
        self.worker.refused = refused
        self.computed()
        self.worker.breaker.left(self.began)
        self.worker.leave(self.turn.ask.n, self.places, self.turn.ask.pages)
        self.dispatcher.left(self.turn, ended=not refused)


class Dispatcher:
    """Gives prompts their places. Belongs to one event loop.

    share: of all places, that a greedy client leaves to newcomers. prefill_wait_s: that a prompt waits for a prefill
    worker before a decode worker may compute it; 0: as long as it takes.
    """

    def __init__(
        self,
        pool: WorkerPool,
        metrics: RouterMetrics,
        share: float,
        prefill_wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue = FairQueue(share)
        self.pace = Pace(clock)
        self._pool = pool
        self._metrics = metrics
        self._prefill_wait_s = prefill_wait_s or math.inf
        self._clock = clock
        self._turns: dict[Ticket, Turn] = {}
        self._computing: Counter[str] = Counter()  # tokens of prompts on their way to their first tokens, by client
        self._output = FIRST_OUTPUT
        self._number = 0
        self._serving = False
        pool.on_change = self.serve

    def turn(
        self, client: str, prompt: Sequence[int], sampling: SamplingParams, priority: int, cache_salt: str = ""
    ) -> Turn:
        """What waits for a prompt of a client; `place` lets it wait."""
        size, local = self._pool.page_size, sampling.prompt_logprobs is not None
        # Where log probabilities of the prompt are wanted, all of it is computed, whatever is cached.
        hashed = (
            page_hashes(prompt[: size * HASHED_PAGES], size, space=page_space(salt=cache_salt))
            if size and not local
            else []
        )
        ask = Ask(
            len(prompt),
            [page_digest(each) for each in hashed],
            size,
            sampling.n,
            min(sampling.max_tokens, round(self._output)),
            self._number,
            secrets.randbits(64),
            local,
        )
        self._number += 1
        return Turn(Ticket(client, sampling.n, len(prompt), priority), ask)

    async def place(self, turn: Turn, timeout_s: float, *, again: bool = False) -> Place:
        """Wait for a place. Raises DeadlineError, or WorkerUnavailableError where no decode worker takes requests.

        again: a place came to nothing; the prompt goes before the others of its client.
        """
        began = self._clock()
        if not again:
            turn.since = began
        loop = asyncio.get_running_loop()
        ticket, turn.granted = turn.ticket, loop.create_future()
        ticket.places = self._pool.places(turn.ask.n)
        self._turns[ticket] = turn
        (self.queue.put_back if again else self.queue.add)(ticket)
        self._metrics.queue_place.observe(len(self.queue) - 1)
        self.serve()
        patience = None if math.isinf(self._prefill_wait_s) else loop.call_later(self._prefill_wait_s, self.serve)
        place: Place | None = None
        try:
            async with asyncio.timeout(timeout_s):
                place = await turn.granted
        except TimeoutError:
            raise DeadlineError(
                f"no worker had room within the {timeout_s:.3g} s that were left to the request; {len(self.queue)} wait"
            ) from None
        finally:
            if patience is not None:
                patience.cancel()
            if place is None:
                self._withdraw(turn, turn.granted)
        self._metrics.queue_seconds.observe(self._clock() - began)
        return place

    def _withdraw(self, turn: Turn, granted: "asyncio.Future[Place]") -> None:
        """Nobody waits any more; a place that has just been given is free again."""
        if turn.ticket in self._turns:
            self._drop(turn.ticket)
            self.serve()
        elif granted.done() and not granted.cancelled() and granted.exception() is None:
            granted.result().leave()

    def serve(self) -> None:
        """Give places to those whose turn it is, as long as there are any."""
        if self._serving:
            return
        self._serving = True
        try:
            if self._turns and not (self._pool.meeting or able(self._pool.candidates()[0])):
                self._fail(self._pool.unavailable())
            while self._turns and self._serve_next():
                pass
        finally:
            self._serving = False
            self._tell()

    def _serve_next(self) -> bool:
        """Whether somebody got a place, or waits no more."""
        passed: list[Ticket] = []
        decode, prefill = self._pool.candidates()
        loads = [each.load for each in able(decode)]
        if not any(load.has_room() for load in loads):
            return False
        free = sum(max(0, load.max_running - load.sequences) for load in loads)
        for ticket in self.queue.turns(free):
            turn = self._turns[ticket]
            granted = turn.granted
            if granted is None or granted.done():  # it has just been given up
                self._drop(ticket)
                return True
            urgent, spare_s = not self._computing[ticket.client], turn.since + self._prefill_wait_s - self._clock()
            choice = choose(self._pool.policy, turn.ask, decode, prefill, urgent=urgent, spare_s=spare_s)
            if choice is not None:
                del self._turns[ticket]
                self.queue.granted(ticket, passed)
                granted.set_result(self._take(turn, choice))
                return True
            passed.append(ticket)
        return False

    def _take(self, turn: Turn, choice: Choice) -> Place:
        ask, worker = turn.ask, self._pool.decode[choice.decode.target]
        prefill = [self._pool.prefill[each.target] for each in choice.prefill]
        computing: Worker = prefill[0] if prefill else worker
        tokens = ask.prompt_tokens - choice.computed_tokens
        began, places = self._pool.begin(worker), worker.load().places(ask.n)
        worker.take(ask.n, places, ask.pages)
        computing.compute(tokens)
        if computing is not worker:
            computing.take(1, 1, ask.pages)
        self._computing[turn.ticket.client] += tokens
        self._metrics.placed("decode", worker.target, choice.decode.reason)
        self._metrics.prefix_tokens["expected"].inc(choice.decode.cached_tokens)
        if prefill:
            self._metrics.placed("prefill", computing.target, choice.prefill[0].reason)
        return Place(self, turn, worker, prefill, places, began, computing, tokens)

    def first_token(self, client: str, tokens: int) -> None:
        """So many tokens of a client's prompts need not be computed any more."""
        self._computing[client] -= tokens
        if self._computing[client] <= 0:
            del self._computing[client]
        self.serve()

    def left(self, turn: Turn, *, ended: bool) -> None:
        """A prompt holds no place any more. ended: it had one, and something came of it."""
        self.queue.ended(turn.ticket)
        if ended:
            self.pace.ended(turn.ask.n)
        self.serve()

    def answered(self, tokens: int, found: int) -> None:
        """A sequence had so many tokens, and its worker had found so many of its prompt."""
        self._metrics.prefix_tokens["found"].inc(found)
        self._output += WEIGHT * (tokens - self._output)

    def _fail(self, error: KvrailError) -> None:
        """Tell everybody who waits."""
        for ticket, turn in list(self._turns.items()):
            self._drop(ticket)
            if turn.granted is not None and not turn.granted.done():
                turn.granted.set_exception(error)

    def _drop(self, ticket: Ticket) -> None:
        del self._turns[ticket]
        self.queue.remove(ticket)

    def _tell(self) -> None:
        self.pace.waiting(bool(self._turns))
        self._metrics.queue_length.set(len(self.queue))
        self._metrics.queue_clients.set(self.queue.clients)
