"""Prefill workers' service: agree, make the way on which pages leave, tell the story."""

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import grpc

from kvrail.config.settings import PrefillSettings
from kvrail.rpc.errors import maps_errors
from kvrail.rpc.prefill.client import serve_prefill
from kvrail.rpc.prefill.replies import PrefillReplies
from kvrail.runtime.logs import bound_request_id
from kvrail.runtime.tuning import compute_with
from kvrail.services.prefill.handshake import Agreement, agree
from kvrail.services.prefill.observer import PageObserver
from kvrail.services.prefill.story import PrefillStory
from kvrail.services.prefill.trace import PROCESS, PrefillTrace
from kvrail.telemetry.moments import Timeline
from kvrail.telemetry.spans import SpanLog
from kvrail.transfer.order import DIRECT_SLOTS, SLOTS, Link
from kvrail.transfer.sending import Outgoing, PageSender
from kvrail.transfer.sizes import direct_frame_bytes, frame_bytes
from kvrail.wire.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from kvrail.worker.carriers import Carriers
from kvrail.worker.codecs import Codecs
from kvrail.worker.observing import SentKV
from kvrail.worker.process import Worker

ENCODER_THREADS = 4


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves kvrail.v1.Prefill."""

    def __init__(
        self, worker: Worker, settings: PrefillSettings, codecs: Codecs, carriers: Carriers, observer: PageObserver
    ) -> None:
        self._worker = worker
        self._codecs = codecs
        self._carriers = carriers
        self._observer = observer
        self._links: dict[tuple[str, bool], Link] = {}
        self._max_held_bytes = settings.transfer_memory_mib << 20
        self._calls = itertools.count(1)
        self._encoders = ThreadPoolExecutor(
            ENCODER_THREADS, thread_name_prefix="encode", initializer=compute_with, initargs=(1,)
        )

    @maps_errors
    async def GetStatus(
        self, request: common_pb2.StatusRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.WorkerStatus:
        """Report identity, limits and load."""
        return self._worker.status(request, self._carriers.names)

    @maps_errors
    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext) -> None:
        """Compute a prompt; announce and send its first tokens and pages."""
        host = context.peer().rpartition(":")[0]  # without the port: one machine, one link
        await serve_prefill(context, lambda replies: self.answer(request, replies, host))

    async def answer(self, request: prefill_pb2.PrefillRequest, replies: PrefillReplies, receiver: str = "") -> None:
        """Tell the story of one prefill to `replies`.

        receiver: names the machine that asks; transfers to the same one share a link.
        """
        with bound_request_id(request.request_id), self._worker.calls.track():
            agreed = agree(self._worker, self._codecs, self._carriers, request, receiver)
            outlet = await agreed.carrier.outlet(agreed.peer, agreed.key)
            try:
                number, timeline = next(self._calls), Timeline()
                told = PrefillTrace.begin(self._worker, request, timeline)
                spans = SpanLog(PROCESS, timeline, requested=request.trace) if request.trace or told else None
                sender = PageSender(
                    self._outgoing(request, agreed),
                    outlet,
                    replies.announce,
                    self._link(receiver, agreed.on_device),
                    number,
                    self._encoders,
                    SentKV(self._worker, spans),
                )
                story = PrefillStory(self._worker, self._observer, request, number, sender, replies, timeline, spans)
                with told.following(spans) if told else contextlib.nullcontext():
                    await story.tell(agreed.accepted)
            finally:
                await outlet.aclose()

    def _outgoing(self, request: prefill_pb2.PrefillRequest, agreed: Agreement) -> Outgoing:
        handshake, own = request.handshake, self._worker.settings.max_frame_bytes
        most = min(own, handshake.max_frame_bytes) if handshake.max_frame_bytes else own  # what both ends take
        return Outgoing(
            request_id=request.request_id,
            layout=self._worker.loaded.layout,
            codec=agreed.codec,
            num_tokens=len(request.prompt_token_ids),
            held_pages=handshake.held_pages,
            frame_bytes=(
                direct_frame_bytes(most)
                if agreed.on_device
                else frame_bytes(handshake.link_bytes_per_s, most, agreed.codec.num_stages)
            ),
            on_device=agreed.on_device,
        )

    def _link(self, receiver: str, on_device: bool) -> Link:
        """What transfers to one machine share. Between GPUs they have a way of their own."""
        way = (receiver, on_device)
        if way not in self._links:
            self._links[way] = Link(self._max_held_bytes, slots=DIRECT_SLOTS if on_device else SLOTS)
        return self._links[way]
