"""Prefill workers' service: agree with the decode worker, open a transport's end, compute and send."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import grpc

from kvrail.config.settings import PrefillSettings
from kvrail.rpc.errors import maps_errors
from kvrail.rpc.prefill.replies import PrefillReplies
from kvrail.runtime.drain import ActiveCalls
from kvrail.runtime.logs import bound_request_id
from kvrail.runtime.tuning import compute_with
from kvrail.services.prefill import trace
from kvrail.services.prefill.handler import HandlerParts, PrefillHandler
from kvrail.services.prefill.handshake import Terms
from kvrail.telemetry.moments import Timeline
from kvrail.telemetry.spans import SpanLog
from kvrail.telemetry.tracing import Tracing
from kvrail.transfer.peers import Recent
from kvrail.transfer.send_queue import DIRECT_SLOTS, SLOTS, SendQueue
from kvrail.transfer.sending import Outgoing, PageSender
from kvrail.wire.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from kvrail.worker.observing import SentKV
from kvrail.worker.status import StatusReporter

ENCODER_THREADS = 4


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves kvrail.v1.Prefill."""

    def __init__(
        self,
        reporter: StatusReporter,
        terms: Terms,
        parts: HandlerParts,
        calls: ActiveCalls,
        tracing: Tracing | None,
        settings: PrefillSettings,
    ) -> None:
        """calls: takes note of each. tracing: exports its spans."""
        self._reporter = reporter
        self._terms = terms
        self._parts = parts
        self._active = calls
        self._tracing = tracing
        self._queues: Recent[tuple[str, bool], SendQueue] = Recent()
        self._max_waiting_bytes = settings.max_waiting_bytes
        self._max_frame_bytes = settings.max_frame_bytes
        self._calls = itertools.count(1)
        self._encoders = ThreadPoolExecutor(
            ENCODER_THREADS, thread_name_prefix="encode", initializer=compute_with, initargs=(1,)
        )

    @maps_errors
    async def GetStatus(
        self, request: common_pb2.StatusRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.WorkerStatus:
        """Report identity, limits and load."""
        return self._reporter.report(request)

    @maps_errors
    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext) -> None:
        """Compute a prompt; announce and send its first tokens and pages."""
        host = context.peer().rpartition(":")[0]  # without the port: one machine, one send queue
        replies = PrefillReplies()
        await replies.serve(self.answer(request, replies, host), context.write)

    async def answer(self, request: prefill_pb2.PrefillRequest, replies: PrefillReplies, receiver: str = "") -> None:
        """Answer one call through `replies`.

        receiver: the host that asks; transfers to the same one share a send queue.
        """
        with bound_request_id(request.request_id), self._active.track():
            route, accepted = self._terms.agree(request, receiver)
            payload_sender = await route.transport.sender(route.peer, route.key)
            try:
                number, timeline = next(self._calls), Timeline()
                tracing = self._tracing
                hop = trace.begin(tracing, self._terms.model.name, request, timeline) if tracing else None
                spans = SpanLog(trace.PROCESS, timeline, requested=request.trace) if request.trace or hop else None
                theirs, own = request.handshake, self._max_frame_bytes
                most = min(own, theirs.max_frame_bytes) if theirs.max_frame_bytes else own  # both ends take that
                outgoing = Outgoing(
                    request_id=request.request_id,
                    layout=self._parts.access.layout,
                    codec=route.codec,
                    num_tokens=len(request.prompt_token_ids),
                    held_pages=theirs.held_pages,
                    frame_bytes=route.frame_bytes(most, theirs.link_bytes_per_s),
                    on_device=route.on_device,
                )
                sender = PageSender(
                    outgoing,
                    payload_sender,
                    replies.announce,
                    self._queue(receiver, route.on_device),
                    number,
                    self._encoders,
                    SentKV(self._parts.meters, spans),
                )
                handler = PrefillHandler(self._parts, request, number, sender, replies, timeline, spans)
                with hop.following(lambda hop, error: trace.end(hop, spans, error)) if hop else nullcontext():
                    await handler.run(accepted)
            finally:
                await payload_sender.aclose()

    def _queue(self, receiver: str, on_device: bool) -> SendQueue:
        """What transfers to one machine share. Between GPUs they have a way of their own."""
        way = (receiver, on_device)
        slots = DIRECT_SLOTS if on_device else SLOTS
        queue = self._queues[way] = self._queues.get(way) or SendQueue(self._max_waiting_bytes, slots=slots)
        return queue
