"""The story of one prefill: handshake, chunks and pages side by side, first token ahead of the KV, commit."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch

from kvrail.config import PrefillSettings
from kvrail.engine.aio import EventStream
from kvrail.engine.events import Admitted, Prefilled, PrefillStarted
from kvrail.engine.requests import EngineRequest, WrittenPages
from kvrail.errors import KvrailError, TransferAbortedError
from kvrail.lifecycle import Stage, Timeline
from kvrail.logs import bound_request_id
from kvrail.rpc.errors import maps_errors
from kvrail.transport.grpc import serve_prefill
from kvrail.transport.replies import PrefillReplies
from kvrail.tuning import compute_with
from kvrail.wire.convert import logprobs_to_proto, marks_to_proto, sampling_from_proto
from kvrail.wire.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from kvrail.worker import Worker
from services.codecs import Codecs
from services.frames import frame_bytes
from services.prefill.handshake import agree
from services.prefill.link import Link
from services.prefill.pieces import Piece
from services.prefill.shipment import Shipment

ENCODER_THREADS = 2


class PageObserver:
    """Passes on, from the engine's thread to the loop, which pages layers have completed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._worker: Worker | None = None
        self._shipments: dict[str, Shipment] = {}

    def attach(self, worker: Worker) -> None:
        """Name the worker whose engine calls; before it starts."""
        self._worker = worker

    def layers_written(self, layers: range, written: Sequence[WrittenPages]) -> None:
        """The work of neighbouring layers of the current step is enqueued."""
        assert self._worker is not None
        self._loop.call_soon_threadsafe(self._add, layers, written, self._worker.side.mark())

    def _add(self, layers: range, written: Sequence[WrittenPages], ready: torch.Event | None) -> None:
        for pages in written:
            shipment = self._shipments.get(pages.request_id)
            if shipment is not None:
                shipment.add(Piece(layers.start, layers.stop, pages.first_page, pages.end_page, ready))

    def watch(self, request_id: str, shipment: Shipment) -> None:
        """Pass a request's pages to `shipment`."""
        self._shipments[request_id] = shipment

    def forget(self, request_id: str) -> None:
        """Stop passing them."""
        self._shipments.pop(request_id, None)


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves kvrail.v1.Prefill."""

    def __init__(self, worker: Worker, settings: PrefillSettings, codecs: Codecs, observer: PageObserver) -> None:
        self._worker = worker
        self._codecs = codecs
        self._observer = observer
        self._links: dict[str, Link] = {}
        self._max_held_bytes = int(settings.held_kv_gib * (1 << 30))
        self._answered = 0
        self._encoders = ThreadPoolExecutor(
            ENCODER_THREADS, thread_name_prefix="encode", initializer=compute_with, initargs=(1,)
        )

    @maps_errors
    async def GetStatus(
        self, request: common_pb2.StatusRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.WorkerStatus:
        """Report identity, limits and load."""
        return self._worker.status()

    @maps_errors
    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext) -> None:
        """Compute a prompt; stream first tokens and pages."""
        host = context.peer().rpartition(":")[0]  # without the port: one machine, one link
        await serve_prefill(context, lambda replies: self.answer(request, replies, host))

    async def answer(self, request: prefill_pb2.PrefillRequest, replies: PrefillReplies, receiver: str = "") -> None:
        """Tell the story of one prefill to `replies`, over whichever transport they leave.

        receiver: names the machine that they go to; transfers to the same one share a link.
        """
        with bound_request_id(request.request_id), self._worker.calls.track():
            timeline = Timeline()
            timeline.mark(Stage.PREFILL_QUEUED)
            codec, accepted = agree(self._worker, self._codecs, request)
            held_pages = request.handshake.held_pages
            self._answered += 1
            shipment = Shipment(
                self._worker,
                self._encoders,
                self._link(receiver),
                self._answered,
                codec,
                request.request_id,
                len(request.prompt_token_ids),
                held_pages,
                frame_bytes(request.handshake.link_bytes_per_s, self._max_frame_bytes(request), codec.num_stages),
            )
            events = self._open(request, shipment)
            replies.accept(accepted)
            shipping = asyncio.create_task(shipment.run(replies))
            outcome = "aborted"
            try:
                await self._follow(events, shipment, replies, timeline)
                shipment.close()
                await shipping
                await replies.commit(marks_to_proto(timeline.marks()))
                outcome = "committed"
            except TransferAbortedError:
                raise
            except KvrailError:
                outcome = "failed"
                raise
            finally:
                self._worker.transfers.transfers["sent", outcome].inc()
                self._observer.forget(request.request_id)
                events.close()
                shipping.cancel()
                await asyncio.gather(shipping, return_exceptions=True)
                await shipment.release()

    def _max_frame_bytes(self, request: prefill_pb2.PrefillRequest) -> int:
        """What both ends take."""
        own, asked = self._worker.settings.max_frame_bytes, request.handshake.max_frame_bytes
        return min(own, asked) if asked else own

    def _link(self, receiver: str) -> Link:
        if receiver not in self._links:
            self._links[receiver] = Link(self._max_held_bytes)
        return self._links[receiver]

    def _open(self, request: prefill_pb2.PrefillRequest, shipment: Shipment) -> EventStream:
        """Submit to the engine; from here on its pages find the shipment."""
        self._observer.watch(request.request_id, shipment)
        try:
            return self._worker.events.open(
                self._worker.engine,
                EngineRequest(
                    request_id=request.request_id,
                    prompt_ids=tuple(request.prompt_token_ids),
                    params=sampling_from_proto(request.sampling),
                    prefill_only=True,
                ),
            )
        except BaseException:
            self._observer.forget(request.request_id)
            raise

    async def _follow(
        self, events: EventStream, shipment: Shipment, replies: PrefillReplies, timeline: Timeline
    ) -> None:
        """Follow the engine until the first tokens are drawn; they overtake every frame."""
        async for event in events:
            match event:
                case Admitted():
                    shipment.begin(event.cached_tokens)
                case PrefillStarted():
                    timeline.mark(Stage.PREFILL_STARTED)
                case Prefilled():
                    timeline.mark(Stage.PREFILL_FINISHED)
                    replies.first_token(_first_token(event, timeline))


def _first_token(event: Prefilled, timeline: Timeline) -> prefill_pb2.FirstToken:
    return prefill_pb2.FirstToken(
        token_ids=[token.token_id for token in event.tokens],
        logprobs=[logprobs_to_proto(token.logprobs) for token in event.tokens if token.logprobs is not None],
        marks=marks_to_proto(timeline.marks()),
    )
