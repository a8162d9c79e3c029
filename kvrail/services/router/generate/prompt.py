"""One prompt's output, from the decode workers that generate it."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from kvrail.errors import (
    DeadlineError,
    IncompatibleError,
    KvrailError,
    OverloadedError,
    RequestCancelledError,
    WorkerUnavailableError,
)
from kvrail.services.router.generate.dispatch import Dispatcher, Reservation, Turn
from kvrail.services.router.generate.output import PromptOutput
from kvrail.services.router.values import Update, Updates
from kvrail.telemetry.moments import Moment, Timeline
from kvrail.values.kv_cache import EXACT, is_exact
from kvrail.wire.v1 import decode_pb2

MAX_MOVES = 2
"""Times that a request moves to another worker: one that kills workers must not visit them all."""
MAX_REFUSALS = 8
"""Times that workers may refuse a request as full before the client gets the error; each takes half a second, or until
a worker has room."""


@dataclass(frozen=True, slots=True)
class Route:
    """What the prompts of one request share.

    timeout_s: from when the request came. on_overflow: called if output is dropped because the client does not read.
    """

    dispatcher: Dispatcher
    timeline: Timeline
    timeout_s: float
    on_overflow: Callable[[], object]

    def time_left(self) -> float:
        """Seconds until the deadline; raises DeadlineError once it has passed."""
        left = self.timeout_s - self.timeline.elapsed()
        if left <= 0:
            raise DeadlineError(f"the request took longer than the {self.timeout_s:g} s that this server allows")
        return left


class PromptStream:
    """One prompt's output. If its worker is lost, another one continues it."""

    def __init__(self, route: Route, request: decode_pb2.GenerateRequest, turn: Turn, output: PromptOutput) -> None:
        self._route = route
        self._request = request
        self._turn = turn
        self.output = output
        self._losses = self._refusals = 0  # workers that were lost, or had no room after all
        self._numerics: set[str] = set()  # of all workers that had the prompt
        self._asked = turn.request.kv_cache
        self.forms: dict[str, None] = {}  # of pages, of the workers that had the prompt since its output began
        self.lossy = False  # a codec took bits from the KV of one of these

    @property
    def invariant(self) -> bool:
        """Whether all of the output has the bits that any of its workers would have given it."""
        ended = self.output.ended
        if self.lossy or ended is None or not (len(self.forms) == 1 or self._exact):
            return False
        return self._numerics == {ended.summary.numerics} != {""}

    @property
    def _begun(self) -> bool:
        return bool(self._request.resumed or self._request.scored_tokens)

    @property
    def _exact(self) -> bool:
        return all(map(is_exact, self.forms))

    @property
    def _needed(self) -> str:
        """The pages that the rest of the output needs: what began on exact ones stays on such."""
        return self._asked or (EXACT if self._begun and self._exact else "")

    async def updates(self) -> AsyncGenerator[Updates]:
        """The updates in order; raises from the error tree.

        If a worker is lost, another one continues the output. If a worker has no room after all, or the prompt's place
        was lent and is taken back, it waits again, before the others of its client.
        """
        output, route = self.output, self._route
        if self._request.sampling.HasField("prompt_logprobs") and len(self._request.prompt_token_ids) == 1:
            yield output.nothing_scored()
        again = False
        while True:
            weights = route.dispatcher.pool.fingerprint
            if self._begun and self._request.model_fingerprint != weights:
                raise WorkerUnavailableError("other weights have been loaded since this request began; ask again")
            self._request.model_fingerprint = weights  # workers of others refuse the request
            self._turn.needs(self._needed)
            reserved = await route.dispatcher.place(self._turn, route.time_left(), again=again)
            again = True
            try:
                async with aclosing(self._generated(reserved)) as batches:
                    async for updates in batches:
                        yield updates
                return
            except (WorkerUnavailableError, OverloadedError, IncompatibleError, RequestCancelledError) as error:
                if not self._continues(reserved, error):
                    return
            finally:
                route.dispatcher.leave(reserved)
            if output.drafts:
                yield list(output.drafts.values())
                output.drafts.clear()

    def _continues(self, reserved: Reservation, error: KvrailError) -> bool:
        """Whether a worker is to continue after this error of one; raises it if none can.

        False: only the summary, or the call's end, is missing.
        """
        if isinstance(error, RequestCancelledError):
            if not reserved.taken_back:
                raise error
            return bool(self.output.unfinished)
        if isinstance(error, OverloadedError):
            self._refusals += 1
            if self._refusals > MAX_REFUSALS:
                raise error
            self._route.dispatcher.leave(reserved, refused=True)
            return True
        reserved.worker.breaker.failed(reserved.began)
        if isinstance(error, IncompatibleError):
            raise error
        self._losses += 1
        pool = self._route.dispatcher.pool
        pool.lost(reserved.worker, str(error))
        if not self.output.unfinished:
            return False
        if self._losses > MAX_MOVES or not (pool.meeting or pool.healthy_decode(self._needed)):
            raise error
        self._route.dispatcher.metrics.failovers.inc()
        return True

    async def _generated(self, reserved: Reservation) -> AsyncGenerator[Updates]:
        """What the worker generates."""
        worker, output, route = reserved.worker, self.output, self._route
        output.start(worker.vocab_size)
        self._address(reserved)
        dispatched = route.timeline.mark(Moment.DISPATCHED)
        offset = route.timeline.elapsed() - dispatched
        call = worker.client.events.submit(self._request, timeout_s=route.time_left(), on_overflow=route.on_overflow)
        reserved.stops_with(call.cancel)
        async with call as stream:
            while replies := await stream.read_waiting():
                updates: list[Update] = []
                for reply in replies:
                    news = reply.WhichOneof("news")
                    if news == "summary":
                        summary, n = reply.summary, self._request.sampling.n
                        output.end(summary, offset)
                        route.dispatcher.answered(summary.completion_tokens // n, summary.cached_tokens)
                    elif news == "prompt_logprobs":
                        for scored in output.scored(reply.prompt_logprobs):
                            yield [scored]
                            await asyncio.sleep(0)  # each is some work, and others wait
                    elif news:
                        updates.append(output.draft(reply))
                    if reply.token_ids or reply.text or reply.finish_reason:
                        self.lossy |= reply.lossy
                        updates.append(output.delta(reply))
                route.dispatcher.advanced(reserved, output.new_tokens)
                output.new_tokens = 0
                if updates:
                    yield updates
        if output.unfinished or output.ended is None:
            raise WorkerUnavailableError(f"decode worker {worker.target} ended the stream before the output's end")

    def _address(self, reserved: Reservation) -> None:
        """Have the request say where it goes, and remember what computes it."""
        request = self._request
        self._numerics.add(reserved.worker.numerics)
        if not self._begun:
            self.forms.clear()
            self.lossy = False
        self.forms[reserved.kv_cache] = None
        request.kv_cache = reserved.kv_cache
        del request.prefill_workers[:], request.prefill_instances[:]
        request.prefill_workers.extend(each.target for each in reserved.prefill)
        request.prefill_instances.extend(each.instance for each in reserved.prefill)
