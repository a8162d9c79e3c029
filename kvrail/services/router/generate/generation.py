"""The streams of one request to decode workers: their places, moving where one is lost, merging, cancelling."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace

from kvrail.errors import (
    DeadlineError,
    IncompatibleError,
    OverloadedError,
    RequestCancelledError,
    WorkerUnavailableError,
)
from kvrail.rpc.trunk import ReplyStream
from kvrail.services.router.fleet.worker import DecodeWorker
from kvrail.services.router.fleet.workers import WorkerPool
from kvrail.services.router.generate.dispatch import Dispatcher, Place, Turn
from kvrail.services.router.plan.translate import Plan
from kvrail.services.router.values import Delta, Drafted, Ended, Scored, Settled, Update, Updates
from kvrail.telemetry.lifecycle import Stage, Timeline
from kvrail.telemetry.router import RouterMetrics
from kvrail.telemetry.spans import Span
from kvrail.values.sampling import PromptLogprobs
from kvrail.wire.checks import check_drafts, check_number, check_output, check_summary
from kvrail.wire.convert import (
    finish_reason_from_proto,
    marks_from_proto,
    output_logprobs_from_proto,
    prompt_logprobs_from_proto,
    spans_from_proto,
)
from kvrail.wire.v1 import decode_pb2

MAX_MOVES = 2
"""Times that a request goes on elsewhere: one that kills workers must not visit them all."""
MAX_REFUSALS = 8
"""Times that workers may say that they are full before the client hears it; each is half a second's wait, or a place
that has become free."""
MERGE_QUEUE = 64
"""Batches of updates of several prompts that wait for a slow client before what feeds them does."""


class _Call:
    """What the streams of one request share: where they may go, until when, and whether they were told to stop."""

    def __init__(
        self, dispatcher: Dispatcher, pool: WorkerPool, metrics: RouterMetrics, timeline: Timeline, timeout_s: float
    ) -> None:
        self.dispatcher = dispatcher
        self.pool = pool
        self.metrics = metrics
        self.timeline = timeline
        self.cancelled = False
        self.on_overflow: Callable[[], object] | None = None
        self._timeout_s = timeout_s
        self._open: set[ReplyStream | Turn] = set()

    def check(self) -> float:
        """Seconds left; raises DeadlineError or RequestCancelledError."""
        if self.cancelled:
            raise RequestCancelledError("the server ended the request because it shuts down; retry")
        left = self._timeout_s - self.timeline.elapsed()
        if left <= 0:
            raise DeadlineError(f"the request took longer than the {self._timeout_s:g} s that this server allows")
        return left

    @contextlib.asynccontextmanager
    async def place(self, turn: Turn, *, again: bool) -> AsyncIterator[Place]:
        """A prompt's place, once it is its turn; free again when left."""
        self._open.add(turn)
        try:
            place = await self.dispatcher.place(turn, self.check(), again=again)
        finally:
            self._open.discard(turn)
        try:
            yield place
        except IncompatibleError:  # what the worker said cannot be
            place.worker.breaker.failed(place.began)
            raise
        finally:
            place.leave()

    @contextlib.asynccontextmanager
    async def stream(self, worker: DecodeWorker, request: decode_pb2.GenerateRequest) -> AsyncIterator[ReplyStream]:
        """One call to a decode worker, cancelled when left."""
        timeout_s = self.check()
        async with worker.client.generate(request, timeout_s=timeout_s, on_overflow=self.on_overflow) as stream:
            self._open.add(stream)
            try:
                yield stream
            finally:
                self._open.discard(stream)

    def cancel(self) -> None:
        self.cancelled = True
        for each in list(self._open):
            each.cancel()


class _PromptStream:
    """One prompt's output, from the first decode worker that gives any."""

    def __init__(
        self, call: _Call, request: decode_pb2.GenerateRequest, turn: Turn, first_index: int, plan: Plan
    ) -> None:
        self._silent, self._special_stops = plan.silent, plan.special_stops
        self._call = call
        self._request = request
        self._turn = turn
        self._first_index = first_index
        self._n = request.sampling.n
        self._unscored = len(request.prompt_token_ids) - 1 if request.sampling.HasField("prompt_logprobs") else 0
        self._drafts: dict[int, Settled] = {}  # of each choice that has any, as if all were wrong
        self._unfinished = set(range(first_index, first_index + self._n))  # choices that have not ended
        self._vocab_size = 0  # of the worker that has it
        self._tokens = 0  # of all choices, since the last batch
        self._numerics: set[str] = set()  # of all workers that it was given to
        self.ended: Ended | None = None

    @property
    def invariant(self) -> bool:
        """Whether all of its output has the bits that any of its workers would have given it."""
        return self.ended is not None and self._numerics == {self.ended.summary.numerics} != {""}

    async def updates(self) -> AsyncGenerator[Updates]:
        """What the replies tell, in order; raises from the error tree.

        Where a worker is lost, another one continues what was said; where it has no room after all, the prompt waits
        again, before the others of its client.
        """
        losses = refusals = 0
        if self._request.sampling.HasField("prompt_logprobs") and not self._unscored:
            yield self._scored(PromptLogprobs(1, (), ()))  # of a single token, which no worker has anything to say of
        while True:
            self._keep_to_the_weights()
            async with self._call.place(self._turn, again=bool(losses or refusals)) as place:
                try:
                    async with aclosing(self._from(place)) as batches:
                        async for updates in batches:
                            yield updates
                    return
                except WorkerUnavailableError as error:
                    losses += 1
                    place.worker.breaker.failed(place.began)
                    self._call.pool.lost(place.worker, str(error))
                    pool = self._call.pool
                    stays = losses > MAX_MOVES or not (pool.meeting or pool.healthy_decode())
                    if not self._unfinished:
                        return  # only the summary is missing
                    if stays:
                        raise
                except OverloadedError:
                    refusals += 1
                    if refusals > MAX_REFUSALS:
                        raise
                    place.leave(refused=True)
            self._call.metrics.failovers.inc()
            if self._drafts:
                yield list(self._drafts.values())
                self._drafts.clear()

    async def _from(self, place: Place) -> AsyncGenerator[Updates]:
        """What the worker of a place says."""
        worker, self.ended = place.worker, None
        self._numerics.add(worker.numerics)
        self._vocab_size = worker.vocab_size
        del self._request.prefill_workers[:]
        del self._request.prefill_instances[:]
        self._request.prefill_workers.extend(each.target for each in place.prefill)
        self._request.prefill_instances.extend(each.instance for each in place.prefill)
        dispatched = self._call.timeline.mark(Stage.DISPATCHED)
        offset = self._call.timeline.elapsed() - dispatched
        async with self._call.stream(worker, self._request) as stream:
            while replies := await stream.read_waiting():
                updates: list[Update] = []
                for reply in replies:
                    news = reply.WhichOneof("news")
                    if news == "summary":
                        self.ended = self._end(reply.summary, offset)
                        place.ended(reply.summary.completion_tokens, reply.summary.cached_tokens)
                    elif news == "prompt_logprobs":
                        for scored in self._scored(self._scores(reply.prompt_logprobs)):
                            yield [scored]
                            await asyncio.sleep(0)  # each is some work, and others wait
                    elif news:
                        updates.append(self._draft_news(reply))
                    if reply.token_ids or reply.text or reply.finish_reason:
                        updates.append(self._delta(reply))
                place.succeeded(self._tokens)
                self._tokens = 0
                if updates:
                    yield updates
        if self._unfinished or self.ended is None:
            raise WorkerUnavailableError(f"decode worker {worker.target} ended the stream before the output's end")

    def _keep_to_the_weights(self) -> None:
        """Have the request refused where other weights are served; raises where nobody has those that it began on."""
        now = self._call.pool.fingerprint
        begun = self._request.resumed or self._request.scored_tokens
        if begun and self._request.model_fingerprint != now:
            raise WorkerUnavailableError("other weights have been loaded since this request began; ask again")
        self._request.model_fingerprint = now

    def _index(self, reply: decode_pb2.GenerateReply) -> int:
        if reply.index >= self._n:
            raise IncompatibleError(f"the decode worker sent sequence {reply.index} of a request with n {self._n}")
        return self._first_index + reply.index

    def _end(self, summary: decode_pb2.GenerateSummary, offset: float) -> Ended:
        if self.ended is not None:
            raise IncompatibleError("the decode worker sent a second summary")
        sampling = self._request.sampling
        check_summary(summary, len(self._request.prompt_token_ids), self._n * sampling.max_tokens)
        return Ended(summary, offset, marks_from_proto(summary.marks), spans_from_proto(summary.spans))

    def _scores(self, message: decode_pb2.PromptLogprobs) -> PromptLogprobs:
        """Log probabilities of the prompt, of which note is taken for a failover."""
        found, told = prompt_logprobs_from_proto(message, self._vocab_size), self._request.scored_tokens
        top, count = self._request.sampling.prompt_logprobs, len(found.logprobs)
        if found.first != told + 1 or count > self._unscored or found.top != top:
            raise IncompatibleError(
                f"the decode worker sent log probabilities of {count} tokens from {found.first} on, with {found.top} "
                f"likely ones each; awaited are {self._unscored} from {told + 1} on, with {top}"
            )
        self._request.scored_tokens = told + count
        self._unscored -= count
        return found

    def _scored(self, found: PromptLogprobs) -> list[Scored]:
        return [Scored(self._first_index + i, found) for i in range(self._n)]

    def _draft_news(self, reply: decode_pb2.GenerateReply) -> Drafted | Settled:
        index, drafted, verified = self._index(reply), reply.drafted, reply.verified
        check_drafts(reply, self._request, self._vocab_size)
        if reply.HasField("verified"):
            self._drafts.pop(index, None)
            return Settled(index, verified.position, verified.proposed, verified.accepted)
        before = self._drafts.get(index, Settled(index, drafted.position, 0, 0))
        self._drafts[index] = replace(before, proposed=before.proposed + len(drafted.token_ids))
        return Drafted(index, drafted.position, drafted.token_ids, drafted.text)

    def _delta(self, reply: decode_pb2.GenerateReply) -> Delta:
        """The reply's output, kept for a failover. Protobuf lists are slow to walk: those that nobody reads are not."""
        index, sampling = self._index(reply), self._request.sampling
        check_output(reply, sampling, self._vocab_size)
        if index not in self._unfinished:
            raise IncompatibleError(f"the decode worker sent output of sequence {reply.index}, which has ended")
        self._tokens += len(reply.token_ids)
        token_ids, logprobs = reply.token_ids, reply.logprobs
        finish_reason = finish_reason_from_proto(reply.finish_reason) if reply.finish_reason else None
        if self._unscored:
            raise IncompatibleError(
                f"the decode worker sent output before the log probabilities of {self._unscored} of the prompt's tokens"
            )
        if not self._request.resumed:
            self._request.resumed.extend(decode_pb2.Resumed() for _ in range(self._n))
        resumed = self._request.resumed[reply.index]
        resumed.token_ids.extend(token_ids)
        check_number("the number of a sequence's tokens", len(resumed.token_ids), sampling.max_tokens)
        if finish_reason is not None:
            resumed.ended = True
            self._unfinished.discard(index)
        if self._silent:
            return Delta(index, "", (), (), finish_reason, None)
        return Delta(
            index,
            reply.text,
            token_ids,
            output_logprobs_from_proto(logprobs, sampling, self._vocab_size) if logprobs else (),
            finish_reason,
            self._stop_reason(reply.stop_reason) if reply.stop_reason else None,
        )

    def _stop_reason(self, said: str) -> str | int:
        """The stop string, or the token id; an id that a stop string stood for is told as that string."""
        if said in self._request.sampling.stop:
            return said
        return self._special_stops.get(int(said), int(said))


class Generation:
    """All output of one HTTP request, over all its prompts. Leaving `updates` ends the calls that still run."""

    def __init__(
        self,
        plan: Plan,
        wire_id: str,
        *,
        model: str,
        client: str,
        dispatcher: Dispatcher,
        pool: WorkerPool,
        metrics: RouterMetrics,
        timeline: Timeline,
        timeout_s: float,
        trace_context: Mapping[str, str],
    ) -> None:
        """trace_context: headers of W3C Trace Context for the workers; none where no trace is told."""
        self.model = model
        self._call = _Call(dispatcher, pool, metrics, timeline, timeout_s)
        self._timeline = timeline
        self.plan = plan
        self._streams = []
        for i, (prompt, sampling, wire) in enumerate(zip(plan.prompts, plan.sampling, plan.wire, strict=True)):
            request = decode_pb2.GenerateRequest(
                request_id=wire_id if len(plan.prompts) == 1 else f"{wire_id}-{i}",
                model=model,
                prompt_token_ids=prompt,
                sampling=wire,
                codec=plan.codec,
                provisional=plan.provisional,
                trace=plan.traced,
                client=client,
                trace_context=trace_context,
                cache_salt=plan.cache_salt,
            )
            turn = dispatcher.turn(client, prompt, sampling, plan.priority, plan.cache_salt)
            self._streams.append(_PromptStream(self._call, request, turn, i * plan.n, plan))
        timeline.mark(Stage.PLANNED)

    def cancel(self) -> None:
        """End all calls; `updates` then raises RequestCancelledError."""
        self._call.cancel()

    def when_overflown(self, give_up: Callable[[], object]) -> None:
        """Call `give_up` where a prompt's call is ended because more of its output waits than may; before `updates`."""
        self._call.on_overflow = give_up

    @property
    def summaries(self) -> list[decode_pb2.GenerateSummary]:
        """What workers said at the end of each prompt's stream that has ended."""
        return [stream.ended.summary for stream in self._streams if stream.ended is not None]

    @property
    def invariant(self) -> bool:
        """Whether every prompt's output has the bits that any of its workers would have given it."""
        return all(stream.invariant for stream in self._streams)

    def spans(self) -> list[Span]:
        """What workers did, in seconds since the request came; empty where no trace was asked for."""
        zero = self._timeline.get(Stage.DISPATCHED) or 0.0
        return [
            replace(span, begin=zero + stream.ended.offset + span.begin)
            for stream in self._streams
            if stream.ended is not None
            for span in stream.ended.spans
        ]

    async def updates(self) -> AsyncGenerator[Updates]:
        """Output of all choices as it comes; raises the first error of any. Close it to cancel."""
        try:
            source = self._streams[0].updates() if len(self._streams) == 1 else self._merged()
            async with aclosing(source) as batches:
                async for updates in batches:
                    yield updates
        except RequestCancelledError:
            self._call.check()  # says so where it was this server that cancelled
            raise
        self._adopt_marks()

    async def _merged(self) -> AsyncGenerator[Updates]:
        """Updates of all prompts through one bounded queue; None marks the end of one."""
        queue: asyncio.Queue[Updates | Exception | None] = asyncio.Queue(MERGE_QUEUE)

        async def pump(stream: _PromptStream) -> None:
            try:
                async with aclosing(stream.updates()) as batches:
                    async for updates in batches:
                        await queue.put(updates)
                await queue.put(None)
            except Exception as error:  # noqa: BLE001 - raised again where the queue is read
                await queue.put(error)

        tasks = [asyncio.create_task(pump(stream)) for stream in self._streams]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _adopt_marks(self) -> None:
        """Take over the marks of the stream that finished last: it decided how long the request took."""
        found = []
        for stream in self._streams:
            if stream.ended is not None:
                found.append([(stage, stream.ended.offset + seconds) for stage, seconds in stream.ended.marks])
        if found:
            last = max(found, key=lambda marks: max((seconds for _, seconds in marks), default=0.0))
            self._timeline.merge(last, anchor=Stage.DISPATCHED)
