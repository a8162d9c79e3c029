"""One prefill call: chunks and pages side by side, the first token ahead of the KV, commit."""

import asyncio
import contextlib
from dataclasses import dataclass

from kvrail.engine.aio import EngineEvents
from kvrail.engine.kv.leases import PageLease
from kvrail.engine.request.events import Admitted, Prefilled, PrefillStarted
from kvrail.engine.request.requests import EngineRequest
from kvrail.errors import KvrailError, OverloadedError, TransferAbortedError
from kvrail.grammar import Grammars
from kvrail.rpc.prefill.replies import PrefillReplies
from kvrail.runtime.logs import exemplar
from kvrail.runtime.waiting import settled
from kvrail.services.prefill.observer import PageObserver
from kvrail.telemetry.moments import Moment, Timeline
from kvrail.telemetry.spans import SpanLog
from kvrail.transfer.sending import PageSender
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

    patience_s: longest wait for pages; None: no limit. A worker that also decodes needs one: its pages can be held by
    requests that wait for KV from the very worker whose request waits here.
    """

    access: EngineAccess
    grammars: Grammars
    meters: KVMeters
    observer: PageObserver
    patience_s: float | None = None


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

    async def run(self, accepted: prefill_pb2.Accepted) -> None:
        """Compute and send side by side; commit when all has left. However it ends, no page is read any more."""
        parts, params = self._parts, sampling_from_proto(self._request.sampling)
        asked = EngineRequest(
            request_id=self._engine_id,
            prompt_ids=tuple(self._request.prompt_token_ids),
            params=params,
            prefill_only=True,
            grammar=await parts.grammars.get(params.grammar, self._request.client),
            cache_salt=self._request.cache_salt,
        )
        with parts.observer.watching(self._engine_id, self._sender):
            events = parts.access.events.open(parts.access.engine, asked)
            beating = asyncio.create_task(self._beat())
            outcome = "aborted"
            try:
                self._replies.accept(accepted)
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

    async def _follow(self, events: EngineEvents) -> None:
        """Follow the engine until the first tokens are drawn."""
        access, coming = self._parts.access, aiter(events)
        try:
            async with asyncio.timeout(self._parts.patience_s):
                admitted = await anext(coming)
        except TimeoutError:
            raise OverloadedError(NO_PAGES) from None
        assert isinstance(admitted, Admitted), "a request first gets its pages"
        self._lease = access.engine.claim_lease(self._engine_id)
        if self._lease is not None:  # else dropped meanwhile: the events end the call
            pages = access.pages(self._lease, self._sender.outgoing.num_tokens)
            cached_pages = admitted.cached_tokens // access.layout.page_size  # these can leave at once
            self._sending = asyncio.create_task(self._sender.run(pages, cached_pages))
        async for event in coming:
            match event:
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

    async def _release(self) -> None:
        """Give the pages back; nothing of the transfer runs any more."""
        if self._lease is not None:
            try:
                await settled(asyncio.create_task(asyncio.to_thread(self._parts.access.side.synchronize)))
            finally:
                self._parts.access.engine.release_lease(self._lease)
