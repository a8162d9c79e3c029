"""How a generation request is answered: `RequestHandler.respond` is all of it, from the admission to the last byte."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, aclosing, nullcontext
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrail.config.settings import RouterSettings
from kvrail.errors import KvrailError
from kvrail.runtime.turns import Turns
from kvrail.services.router.answer import trace
from kvrail.services.router.answer.admission import Admission
from kvrail.services.router.answer.calls import MAX_NAME_CHARS, ApiCall
from kvrail.services.router.answer.leaving import Cancellation, disconnected, ended_first
from kvrail.services.router.answer.observe import RequestRecord
from kvrail.services.router.answer.recent import RecentRequests
from kvrail.services.router.answer.sse import SseStream
from kvrail.services.router.errors import error_response, outcome_of, refuse
from kvrail.services.router.generate.dispatch import Dispatcher
from kvrail.services.router.generate.generation import Generation
from kvrail.services.router.generate.prompt import Route
from kvrail.services.router.openai.events import encode_json, encode_long
from kvrail.services.router.openai.renaming import renamed
from kvrail.services.router.openai.usage import final_usage
from kvrail.services.router.openai.writers import Writer
from kvrail.services.router.plan.translate import Plan
from kvrail.services.router.values import SPENT, Delta, Scored
from kvrail.telemetry.moments import Moment
from kvrail.telemetry.router import RouterMetrics
from kvrail.telemetry.tracing import Tracing

log = logging.getLogger("kvrail.router.answer")

MANY_SCORES = 4096
"""Log probabilities of prompts in one answer that are written within 20 ms."""
MIN_HEAD_S = 0.01
"""Wait for a request whose body took long, so that a refusal that takes no time still has a status."""


class Answer(Response):
    """The response of a generation endpoint: to send it is to answer the request."""

    def __init__(self, handler: "RequestHandler", call: ApiCall) -> None:
        super().__init__()
        self._handler = handler
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; all work ends when the client disconnects, or falls too far behind the output."""
        watch = asyncio.create_task(disconnected(receive))
        work = asyncio.create_task(self._handler.respond(self._call, scope, receive, send))
        self._call.cancellation = Cancellation(work, watch)  # the work begins at the loop's next turn
        if await ended_first(work, watch):
            work.result()


class RequestHandler:
    """Answers generation requests of every API."""

    def __init__(
        self,
        settings: RouterSettings,
        admission: Admission,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        recent: RecentRequests,
        tracing: Tracing | None,
    ) -> None:
        self._settings = settings
        self._admission = admission
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._recent = recent
        self._tracing = tracing
        self._writing = Turns()  # of clients, at writing long answers

    async def respond(self, call: ApiCall, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit a request, plan it, have it placed and generated, and write its answer.

        An error before the headers have left gets a status, a later one is the stream's last event.
        """
        self._begin_trace(call)
        sse = self._sse(call, send) if call.request.stream else None
        record: RequestRecord | None = None
        generation: Generation | None = None
        outcome, last_event = "error", call.failure
        fail = partial(self._fail, sse=sse, scope=scope, receive=receive, send=send)
        async with sse or nullcontext():
            with ExitStack() as admitted:  # until the answer, or the error, has left
                try:
                    self._check_size(call)
                    admitted.enter_context(
                        self._admission.admitted(call.sequences, call.client, call.cancellation.cancel)
                    )
                    record = RequestRecord(self._metrics, call.timeline, provisional=call.provisional)
                    call.check_model()
                    with _part(call, "admit"):
                        await self._dispatcher.pool.settle()
                    with _part(call, "tokenise"), renamed(call.rename):
                        plan = await call.parts.planner.plan(call.request, call.client)
                    generation = self._generation(call, plan)  # places each prompt once its output is read
                    writer = call.writer(plan)
                    last_event = writer.failure
                    if sse is None:
                        await self._write_whole(call, generation, writer, record, send)
                    else:
                        await self._write_stream(call, generation, writer, record, sse)
                    outcome = record.outcome
                except asyncio.CancelledError:
                    if (error := call.cancellation.taken()) is None:
                        outcome = "cancelled"
                        call.left()
                        raise
                    outcome = outcome_of(error)
                    await fail(error, last_event)
                except KvrailError as error:
                    outcome = outcome_of(error)
                    await fail(error, last_event)
                except Exception:
                    if sse is None or not sse.started:
                        raise  # answered 500 by the application
                    log.exception("failed after the stream began")
                    await fail(KvrailError("internal error; the server's log has the cause"), last_event)
                finally:
                    self._close(call, outcome, record, generation, scope)

    def _begin_trace(self, call: ApiCall) -> None:
        if self._tracing is not None:
            request, state = call.request, call.state
            model = (request.model or self._settings.model_name)[:MAX_NAME_CHARS]
            call.trace = trace.begin(
                self._tracing, call.operation, request, model, state.headers, state.request_id, call.timeline
            )

    def _check_size(self, call: ApiCall) -> None:
        """Refuse more sequences than a client can have."""
        most, n = self._admission.most, call.request.n or 1
        if call.sequences > most:
            refuse(
                "n" if call.prompts == 1 else "prompt",
                f"{call.prompts} prompts of n = {n} are {call.sequences} sequences, more than the {most} that "
                "one client may have at once; send them in several requests",
            )

    def _sse(self, call: ApiCall, send: Send) -> SseStream:
        settings = self._settings
        left_s = max(MIN_HEAD_S, settings.stream_head_s - call.timeline.elapsed())
        return SseStream(send, head_after_s=left_s, keep_alive_s=settings.keep_alive_s)

    def _generation(self, call: ApiCall, plan: Plan) -> Generation:
        settings, context = self._settings, call.trace.context if call.trace else {}
        timeout_s, leave = settings.request_timeout_s, call.cancellation.leave
        route = Route(self._dispatcher, call.timeline, timeout_s, on_overflow=leave)
        return Generation(
            plan, route, call.wire_id, model=settings.model_name, client=call.client, trace_context=context
        )

    async def _write_whole(
        self, call: ApiCall, generation: Generation, writer: Writer, record: RequestRecord, send: Send
    ) -> None:
        """Collect all output and send one body."""
        async with aclosing(generation.updates()) as batches:
            async for updates in batches:
                record.take(updates)
                for update in updates:
                    if isinstance(update, Delta | Scored):  # drafts are for streams alone
                        writer.add(update)
        usage = final_usage(generation, record.completion_tokens)
        if (scores := generation.plan.scores) <= MANY_SCORES:
            payload = encode_json(writer.whole(usage))
        else:  # beside the event loop, one at a time
            payload = await self._writing.run(call.client, lambda: encode_long(writer.whole(usage)), cost=scores)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": payload})
        call.timeline.mark(Moment.RESPONDED)

    async def _write_stream(
        self, call: ApiCall, generation: Generation, writer: Writer, record: RequestRecord, sse: SseStream
    ) -> None:
        """Send what came at one moment in one write."""
        opening = writer.opening()
        if writer.greets:
            await sse.greet(opening)
            opening = b""
        async with aclosing(generation.updates()) as batches:
            async for updates in batches:
                record.take(updates)
                if events := opening + writer.events(updates):
                    await sse.write(events)
                opening = b""
        usage = final_usage(generation, record.completion_tokens)
        await sse.write(opening + writer.closing(usage))
        await sse.end()
        call.timeline.mark(Moment.RESPONDED)

    async def _fail(
        self,
        error: KvrailError,
        last_event: Callable[[KvrailError], bytes],
        *,
        sse: SseStream | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Send an error: as a status, or as the stream's last event if the headers have left."""
        event = last_event(error)  # made even if it is not sent: it also marks a kept response as failed
        if sse is None or not sse.started:
            await error_response(error)(scope, receive, send)
            return
        log.warning("failed after the stream began: %s", error)
        await sse.write(event)
        await sse.end()

    def _close(
        self, call: ApiCall, outcome: str, record: RequestRecord | None, generation: Generation | None, scope: Scope
    ) -> None:
        """Count a request that has ended. record: None if it was not admitted."""
        if record is None:
            self._metrics.outcomes[outcome].inc()
        else:
            scope["state"][SPENT] = record.close(outcome, generation)
        self._recent.add(
            call.state.request_id,
            call.client,
            outcome,
            total_s=call.timeline.get(Moment.RESPONDED) or call.timeline.elapsed(),
            first_token_s=None if record is None else record.first_token_s,
            parts_s=call.timeline.parts(),
        )
        if call.trace is not None:
            trace.end(call.trace, outcome, generation, 0 if record is None else record.completion_tokens)


def _part(call: ApiCall, name: str) -> AbstractContextManager[None]:
    return call.trace.part(name) if call.trace else nullcontext()
