"""The answer to one generation request: whole or as server-sent events, ended at once when the client goes away."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrail.errors import KvrailError
from kvrail.lifecycle import Stage, Timeline
from kvrail.metrics import RouterMetrics
from kvrail.sampling import FinishReason
from services.router.admission import Admission
from services.router.errors import error_response, outcome_of, to_http
from services.router.events import DONE, TextEvents, encode_event, encode_json, is_plain
from services.router.formats import Format, Json
from services.router.generation import Generation
from services.router.observe import RequestRecord
from services.router.schema import Request
from services.router.usage import final_usage, usage_so_far
from services.router.values import Delta, Update

log = logging.getLogger("kvrail.router.answer")

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A validated request: what to generate and how to show it."""

    generation: Generation
    format: Format


@dataclass(frozen=True, slots=True)
class Job:
    """One generation request as the endpoint hands it over.

    sequences: how much room it takes. client: who asks. prepare: validates and tokenises; raises from the error tree.
    """

    request: Request
    sequences: int
    client: str
    timeline: Timeline
    prepare: Callable[[], Awaitable[Prepared]]


class Answer(Response):
    """Runs a job while it is sent. Errors before the first token get a proper status, later ones an event."""

    def __init__(self, job: Job, admission: Admission, metrics: RouterMetrics) -> None:
        super().__init__()
        self._job = job
        self._admission = admission
        self._metrics = metrics
        self._generation: Generation | None = None
        self._watch: asyncio.Task[None] | None = None
        self._cancelled = False
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; the work is cancelled where the client disconnects first, or falls too far behind."""
        work = asyncio.create_task(self._work(scope, receive, send))
        watch = self._watch = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            gone = not work.done()
            work.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
        if not gone:
            work.result()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the job and run it, measured; what goes wrong becomes the client's error."""
        try:
            with self._admission.admitted(self._job.sequences, self._job.client, self._cancel):
                await self._measured(scope, receive, send)
        except KvrailError as error:  # not admitted
            self._metrics.outcomes[outcome_of(error)].inc()
            await error_response(error)(scope, receive, send)

    async def _measured(self, scope: Scope, receive: Receive, send: Send) -> None:
        options = self._job.request.kvrail
        record = RequestRecord(self._metrics, self._job.timeline, provisional=bool(options and options.provisional))
        outcome = "error"
        try:
            outcome = await self._run(record, send)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except KvrailError as error:
            outcome = outcome_of(error)
            if not self._started:
                await error_response(error)(scope, receive, send)
            else:
                log.warning("failed after the stream began: %s", error)
                await self._break_off(send, error)
        except Exception:
            if not self._started:
                raise  # answered 500 by the application
            log.exception("failed after the stream began")
            await self._break_off(send, KvrailError("internal error; the server's log has the cause"))
        finally:
            record.close(outcome, self._generation)

    async def _break_off(self, send: Send, error: KvrailError) -> None:
        """End a stream with an error event; clients know by the missing [DONE] too."""
        await _write(send, encode_event(to_http(error)[1]))
        await send({"type": "http.response.body", "body": b""})

    def _cancel(self) -> None:
        self._cancelled = True
        if self._generation is not None:
            self._generation.cancel()

    async def _run(self, record: RequestRecord, send: Send) -> str:
        """Generate and send; returns the outcome."""
        prepared = await self._job.prepare()
        self._generation = prepared.generation
        if self._watch is not None:
            prepared.generation.when_overflown(self._watch.cancel)  # whoever does not read counts as gone
        if self._cancelled:
            prepared.generation.cancel()
        run = self._stream if self._job.request.stream else self._whole
        return await run(prepared, record, send)

    async def _whole(self, prepared: Prepared, record: RequestRecord, send: Send) -> str:
        outcome = "stop"
        async with aclosing(prepared.generation.updates()) as batches:
            async for updates in batches:
                record.take(updates)
                for update in updates:
                    if isinstance(update, Delta):  # drafts are for streams alone
                        prepared.format.add(update)
                        outcome = _outcome(outcome, update)
        body = prepared.format.whole()
        body["usage"] = final_usage(prepared.generation, record.completion_tokens, self._job.timeline)
        payload = encode_json(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": payload})
        self._job.timeline.mark(Stage.RESPONDED)
        return outcome

    async def _stream(self, prepared: Prepared, record: RequestRecord, send: Send) -> str:
        """Send each update as an event of its own; those that came at one moment in one write."""
        outcome = "stop"
        tokens = 0
        counted = self._job.request.continuous_usage
        texts = TextEvents(lambda delta: self._chunk(delta, prepared, 0))
        async with aclosing(prepared.generation.updates()) as batches:
            async for updates in batches:
                record.take(updates)
                events = []
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
                    opening = prepared.format.opening()
                    events += [encode_event(self._with_usage(chunk, prepared, 0)) for chunk in opening]
                for update in updates:
                    if isinstance(update, Delta):
                        tokens += len(update.token_ids)
                        outcome = _outcome(outcome, update)
                        if is_plain(update) and not counted and prepared.format.verbatim:
                            events.append(texts.encode(update))
                            continue
                    chunk = self._chunk(update, prepared, tokens)
                    if chunk is not None:
                        events.append(encode_event(chunk))
                if events:
                    await _write(send, b"".join(events))
        end = b""
        if self._job.request.include_usage:
            usage = final_usage(prepared.generation, record.completion_tokens, self._job.timeline)
            end = encode_event({**prepared.format.last(), "usage": usage})
        await _write(send, end + DONE)
        await send({"type": "http.response.body", "body": b""})
        self._job.timeline.mark(Stage.RESPONDED)
        return outcome

    def _chunk(self, update: Update, prepared: Prepared, completion_tokens: int) -> Json | None:
        """The chunk for an update; None where it has nothing to show."""
        shown = prepared.format.chunk(update) if isinstance(update, Delta) else prepared.format.draft_chunk(update)
        return None if shown is None else self._with_usage(shown, prepared, completion_tokens)

    def _with_usage(self, chunk: Json, prepared: Prepared, completion_tokens: int) -> Json:
        """Add the usage field that the stream options ask for."""
        if self._job.request.continuous_usage:
            chunk["usage"] = usage_so_far(prepared.generation, completion_tokens)
        elif self._job.request.include_usage:
            chunk["usage"] = None
        return chunk


async def _write(send: Send, events: bytes) -> None:
    await send({"type": "http.response.body", "body": events, "more_body": True})


def _outcome(before: str, delta: Delta) -> str:
    """A request counts as cut off where any of its choices is."""
    return "length" if delta.finish_reason is FinishReason.LENGTH else before


async def _disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
