"""The answer to one generation request: whole or as server-sent events, ended at once when the client goes away."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrail.errors import KvrailError, RequestCancelledError
from kvrail.runtime.turns import Turns
from kvrail.services.router.answer.admission import Admission
from kvrail.services.router.answer.eventstream import EventStream
from kvrail.services.router.answer.leaving import disconnected, ended_first
from kvrail.services.router.answer.observe import RequestRecord
from kvrail.services.router.answer.trace import RequestTrace
from kvrail.services.router.errors import error_response, outcome_of
from kvrail.services.router.generate.generation import Generation
from kvrail.services.router.openai.events import encode_json, encode_long
from kvrail.services.router.openai.usage import final_usage
from kvrail.services.router.openai.writers import Writer
from kvrail.services.router.values import SPENT, Delta, Json, Scored
from kvrail.telemetry.moments import Moment, Timeline
from kvrail.telemetry.router import RouterMetrics
from kvrail.values.sampling import FinishReason

log = logging.getLogger("kvrail.router.answer")

MANY_SCORES = 4096
"""Log probabilities of prompts in one answer that are written within 20 ms."""
LEAST_HEAD_S = 0.01
"""What a request whose body took long still gets, so that a refusal which takes no time has a status."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A validated request: what to generate and how to write it."""

    generation: Generation
    writer: Writer


@dataclass(frozen=True, slots=True)
class Job:
    """One generation request as the endpoint hands it over.

    sequences: how much room it takes. client: who asks. provisional: whether drafts are shown. prepare: validates and
    tokenises; raises from the error tree. failure: the event that tells of an error before that is done. abandon:
    called where the client leaves. trace: of the request, where one is told.
    """

    stream: bool
    provisional: bool
    sequences: int
    client: str
    timeline: Timeline
    prepare: Callable[[], Awaitable[Prepared]]
    failure: Callable[[KvrailError], bytes]
    abandon: Callable[[], object] = lambda: None
    trace: RequestTrace | None = None


@dataclass(frozen=True, slots=True)
class Speech:
    """When a stream speaks although nothing is to say: seconds since the request came, and of silence."""

    head_after_s: float
    keep_alive_s: float


class Answer(Response):
    """Runs a job while it is sent. Errors before the headers left get a proper status, later ones an event."""

    def __init__(self, job: Job, admission: Admission, metrics: RouterMetrics, speech: Speech, writing: Turns) -> None:
        """writing: turns at writing long answers."""
        super().__init__()
        self._writing = writing
        self._job = job
        self._admission = admission
        self._metrics = metrics
        self._speech = speech
        self._prepared: Prepared | None = None
        self._watch: asyncio.Task[None] | None = None
        self._events: EventStream | None = None
        self._cancelled = False
        self._why: KvrailError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; the work is cancelled where the client disconnects first, or falls too far behind."""
        work = asyncio.create_task(self._work(scope, receive, send))
        watch = self._watch = asyncio.create_task(disconnected(receive))
        if await ended_first(work, watch):
            work.result()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer in one of the two ways."""
        if not self._job.stream:
            await self._admitted(scope, receive, send)
            return
        left_s = max(LEAST_HEAD_S, self._speech.head_after_s - self._job.timeline.elapsed())
        async with EventStream(send, head_after_s=left_s, keep_alive_s=self._speech.keep_alive_s) as events:
            self._events = events
            await self._admitted(scope, receive, send)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the job and run it."""
        try:
            with self._admission.admitted(self._job.sequences, self._job.client, self.cancel):
                await self._measured(scope, receive, send)
        except KvrailError as error:  # not admitted
            self._metrics.outcomes[outcome_of(error)].inc()
            if self._job.trace is not None:
                self._job.trace.end(outcome_of(error), None, 0)
            await self._fail(error, scope, receive, send)

    async def _measured(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the job, counted; what goes wrong becomes the client's error."""
        record = RequestRecord(self._metrics, self._job.timeline, provisional=self._job.provisional)
        outcome = "error"
        try:
            outcome = await self._run(record, send)
        except asyncio.CancelledError:
            outcome = "cancelled"
            self._job.abandon()
            raise
        except KvrailError as error:
            if self._why is not None and isinstance(error, RequestCancelledError):
                error = self._why
            outcome = outcome_of(error)
            await self._fail(error, scope, receive, send)
        except Exception:
            if self._events is None or not self._events.started:
                raise  # answered 500 by the application
            log.exception("failed after the stream began")
            await self._fail(KvrailError("internal error; the server's log has the cause"), scope, receive, send)
        finally:
            generation = None if self._prepared is None else self._prepared.generation
            scope["state"][SPENT] = record.close(outcome, generation)
            if self._job.trace is not None:
                self._job.trace.end(outcome, generation, record.completion_tokens)

    async def _fail(self, error: KvrailError, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell the client: by a status, or where the headers have left by the stream's last event."""
        events = self._events
        tell = self._job.failure if self._prepared is None else self._prepared.writer.failure
        last = tell(error)  # also where it is not sent: what is kept of the answer is failed with it
        if events is None or not events.started:
            await error_response(error)(scope, receive, send)
            return
        log.warning("failed after the stream began: %s", error)
        await events.write(last)
        await events.end()

    def cancel(self, why: KvrailError | None = None) -> None:
        """End the work; the client gets an error: `why`, or that the server shuts down."""
        self._cancelled = True
        self._why = why
        if self._prepared is not None:
            self._prepared.generation.cancel()

    async def _run(self, record: RequestRecord, send: Send) -> str:
        """Generate and send; returns the outcome."""
        prepared = self._prepared = await self._job.prepare()
        if self._watch is not None:
            prepared.generation.when_overflown(self._watch.cancel)  # whoever does not read counts as gone
        if self._cancelled:
            prepared.generation.cancel()
        if self._events is None:
            return await self._whole(prepared, record, send)
        return await self._stream(prepared, record, self._events)

    async def _whole(self, prepared: Prepared, record: RequestRecord, send: Send) -> str:
        outcome = "stop"
        async with aclosing(prepared.generation.updates()) as batches:
            async for updates in batches:
                record.take(updates)
                for update in updates:
                    if isinstance(update, Delta | Scored):  # drafts are for streams alone
                        prepared.writer.add(update)
                    if isinstance(update, Delta):
                        outcome = _outcome(outcome, update)
        payload = await self._encoded(prepared, self._usage(prepared, record))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": payload})
        self._job.timeline.mark(Moment.RESPONDED)
        return outcome

    async def _encoded(self, prepared: Prepared, usage: Json) -> bytes:
        """The body; one with many log probabilities of prompts is made beside the event loop, one at a time."""
        writer = prepared.writer
        if prepared.generation.plan.scores <= MANY_SCORES:
            return encode_json(writer.whole(usage))
        return await self._writing.run(
            self._job.client, lambda: encode_long(writer.whole(usage)), cost=prepared.generation.plan.scores
        )

    async def _stream(self, prepared: Prepared, record: RequestRecord, out: EventStream) -> str:
        """Send what came at one moment in one write."""
        outcome = "stop"
        opening = prepared.writer.opening()
        if prepared.writer.greets:
            await out.greet(opening)
            opening = b""
        async with aclosing(prepared.generation.updates()) as batches:
            async for updates in batches:
                record.take(updates)
                for update in updates:
                    if isinstance(update, Delta):
                        outcome = _outcome(outcome, update)
                if events := opening + prepared.writer.events(updates):
                    await out.write(events)
                opening = b""
        await out.write(opening + prepared.writer.closing(self._usage(prepared, record)))
        await out.end()
        self._job.timeline.mark(Moment.RESPONDED)
        return outcome

    def _usage(self, prepared: Prepared, record: RequestRecord) -> Json:
        return final_usage(prepared.generation, record.completion_tokens, self._job.timeline)


def _outcome(before: str, delta: Delta) -> str:
    """A request counts as cut off where any of its choices is."""
    return "length" if delta.finish_reason is FinishReason.LENGTH else before
