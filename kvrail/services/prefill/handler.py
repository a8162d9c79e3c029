"""One prefill call: chunks and pages side by side, the first token ahead of the KV, commit."""

import asyncio
import contextlib
import math
from dataclasses import dataclass

from kvrail.engine.aio import EngineEvents
from kvrail.engine.kv.leases import PageLease
from kvrail.engine.request.events import Admitted, Prefilled, PrefillStarted
from kvrail.engine.request.requests import EngineRequest
from kvrail.errors import KvrailError, OverloadedError, TransferAbortedError
from kvrail.grammar import Grammar, Grammars
from kvrail.rpc.prefill.replies import PrefillReplies
from kvrail.runtime.logs import exemplar
from kvrail.runtime.waiting import settled
from kvrail.services.prefill.observer import PageObserver
from kvrail.telemetry.moments import Moment, Timeline
from kvrail.telemetry.spans import SpanLog
from kvrail.transfer.sending import PageSender
from kvrail.values.sampling import SamplingParams
from kvrail.wire.convert import logprobs_to_proto, marks_to_proto, sampling_from_proto, spans_to_proto
from kvrail.wire.v1 import prefill_pb2
from kvrail.worker.access import EngineAccess
from kvrail.worker.observing import KVMeters

HEARTBEAT_S = 5.0
NO_PAGES = "this worker had no pages for the prompt in time; compute it elsewhere"
PATIENCE_S = 2.0
"""Seconds that a prompt from another worker waits for pages on a worker that also decodes."""
HUNG_S = 30.0
"""A step that takes longer may never end; then the receiver had better ask elsewhere."""


@dataclass(frozen=True, slots=True)
class HandlerParts:
    """What all calls of a prefill worker use.

    patience_s: longest wait for pages. A worker that also decodes needs it: its pages can be held by requests that
    wait for KV from the very worker whose request waits here.
    """

    access: EngineAccess
    grammars: Grammars
    meters: KVMeters
    observer: PageObserver
    patience_s: float = math.inf


class PrefillHandler:
    """One call of a prefill worker, from its acceptance to its commit.

    number: of the call; a request that is asked for again must not meet what is left of its first call. timeline: begun
    when the call came. spans: if a trace is asked for.
    """

    def __init__(
        self,
        parts: HandlerParts,
        request: prefill_pb2.PrefillRequest,
        number: int,
        sender: PageSender,
        replies: PrefillReplies,
        timeline: Timeline,
        spans: SpanLog | None,
    ) -> None:
        self._parts = parts
        self._request = request
        self._engine_id = f"{request.request_id}/p{number}"  # the engine may also decode it
        self._sender = sender
        self._replies = replies
        self._timeline = timeline
        self._spans = spans
        self._lease: PageLease | None = None
        self._sending: asyncio.Task[None] | None = None  # from the moment that the request has pages
        self._impatience: asyncio.TimerHandle | None = None

    async def run(self, accepted: prefill_pb2.Accepted) -> None:
        """Compute and send side by side; commit when all has left. However it ends, no page is read any more."""
        parts, params = self._parts, sampling_from_proto(self._request.sampling)
        events = self._open(params, await parts.grammars.get(params.grammar, self._request.client))
        self._replies.accept(accepted)
        if parts.patience_s < math.inf:
            loop = asyncio.get_running_loop()
            self._impatience = loop.call_later(parts.patience_s, events.fail, OverloadedError(NO_PAGES))
        beating = asyncio.create_task(self._beat())
        outcome = "aborted"
        try:
            await self._follow(events)
            beating.cancel()  # from here on there is something to send
            await parts.observer.passed_on()  # the last layers were reported before the end
            self._sender.close()
            assert self._sending is not None, "what was computed had pages"
            await self._sending
            spans = self._spans.all() if self._spans is not None and self._spans.requested else []
            await self._replies.commit(spans_to_proto(spans))
            outcome = "committed"
        except TransferAbortedError:
            raise
        except KvrailError:
            outcome = "failed"
            raise
        finally:
            metrics = parts.meters.transfers
            metrics.transfers["sent", outcome].inc()
            metrics.seconds["sent"].observe(self._timeline.elapsed(), example=exemplar())
            parts.observer.forget(self._engine_id)
            self._admitted()
            events.close()
            beating.cancel()
            try:
                if self._sending is not None:
                    self._sending.cancel()
                    await settled(self._sending)
            finally:
                await self._release()

    async def _beat(self) -> None:
        """Say that the call is alive, unless the engine has hung: to wait for one's turn is no silence."""
        with contextlib.suppress(TransferAbortedError):  # the sender raises it too
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                if self._parts.access.engine.step_seconds < HUNG_S:
                    self._replies.heartbeat()

    def _open(self, params: SamplingParams, grammar: Grammar | None) -> EngineEvents:
        """Submit to the engine; from here on its pages find the sender."""
        self._parts.observer.watch(self._engine_id, self._sender)
        try:
            return self._parts.access.events.open(
                self._parts.access.engine,
                EngineRequest(
                    request_id=self._engine_id,
                    prompt_ids=tuple(self._request.prompt_token_ids),
                    params=params,
                    prefill_only=True,
                    grammar=grammar,
                    cache_salt=self._request.cache_salt,
                ),
            )
        except BaseException:
            self._parts.observer.forget(self._engine_id)
            raise

    async def _follow(self, events: EngineEvents) -> None:
        """Follow the engine until the first tokens are drawn."""
        access = self._parts.access
        async for event in events:
            match event:
                case Admitted():  # its pages are here: those of a cached prefix can leave at once
                    self._admitted()
                    self._lease = access.engine.claim_lease(self._engine_id)
                    if self._lease is not None:  # else dropped meanwhile: the events end the call
                        pages = access.pages(self._lease, self._sender.outgoing.num_tokens)
                        cached_pages = event.cached_tokens // access.layout.page_size
                        self._sending = asyncio.create_task(self._sender.run(pages, cached_pages))
                case PrefillStarted():
                    self._timeline.mark(Moment.PREFILL_STARTED)
                case Prefilled():
                    self._timeline.mark(Moment.PREFILL_FINISHED)
                    found = [token.logprobs for token in event.tokens if token.logprobs is not None]
                    self._replies.first_token(
                        prefill_pb2.FirstToken(
                            token_ids=[token.token_id for token in event.tokens],
                            logprobs=map(logprobs_to_proto, found),
                            marks=marks_to_proto(self._timeline.marks()),
                        )
                    )

    def _admitted(self) -> None:
        if self._impatience is not None:
            self._impatience.cancel()

    async def _release(self) -> None:
        """Give the pages back; nothing of the transfer runs any more."""
        if self._lease is not None:
            try:
                await settled(asyncio.create_task(asyncio.to_thread(self._parts.access.side.synchronize)))
            finally:
                self._parts.access.engine.release_lease(self._lease)
