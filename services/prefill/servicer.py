"""The story of one prefill: handshake, chunks and pages side by side, first token ahead of the KV, commit."""

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch

from kvrail.config import PrefillSettings
from kvrail.engine.aio import EventStream
from kvrail.engine.events import Admitted, PageLease, Prefilled, PrefillStarted
from kvrail.engine.requests import EngineRequest, WrittenPages
from kvrail.errors import KvrailError, TransferAbortedError, WorkerUnavailableError
from kvrail.lifecycle import Stage, Timeline
from kvrail.logs import bound_request_id
from kvrail.rpc.errors import maps_errors
from kvrail.rpc.prefill import serve_prefill
from kvrail.rpc.prefill_replies import PrefillReplies
from kvrail.transfer.order import DIRECT_SLOTS, SLOTS, Link
from kvrail.transfer.pieces import Piece
from kvrail.transfer.sending import Outgoing, PageSender
from kvrail.transfer.sizes import direct_frame_bytes, frame_bytes
from kvrail.tuning import compute_with
from kvrail.waiting import settled
from kvrail.wire.convert import logprobs_to_proto, marks_to_proto, sampling_from_proto
from kvrail.wire.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from kvrail.worker import Worker
from services.carriers import Carriers
from services.codecs import Codecs
from services.observing import SentKV
from services.pages import LeasedPages
from services.prefill.handshake import Agreement, agree

ENCODER_THREADS = 4
COMPILING_S = 30.0


class PageObserver:
    """Passes on, from the engine's thread to the loop, which pages each group of layers has completed.

    A group's KV fills a frame, so that the loop hears of a step no more often than frames can leave.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._worker: Worker | None = None
        self._senders: dict[str, PageSender] = {}
        self._step: Sequence[WrittenPages] = ()
        self._first_layer = self._group = 0

    def attach(self, worker: Worker) -> None:
        """Name the worker whose engine calls; before it starts."""
        self._worker = worker

    def layers_written(self, layers: range, written: Sequence[WrittenPages]) -> None:
        """The work of neighbouring layers of the current step is enqueued, after that of the layers before them."""
        assert self._worker is not None
        if written is not self._step:
            self._step, self._first_layer, self._group = written, 0, self._layers_per_frame(written)
        end = layers.stop
        if end + len(layers) - self._first_layer <= self._group and end < self._worker.loaded.layout.num_layers:
            return  # the next ones fit into the same frame
        mark = self._worker.side.mark()
        self._loop.call_soon_threadsafe(self._add, range(self._first_layer, end), written, mark)
        self._first_layer = end

    def watch(self, request_id: str, sender: PageSender) -> None:
        """Pass the pages of a request of the engine to `sender`."""
        self._senders[request_id] = sender

    def forget(self, request_id: str) -> None:
        """Stop passing them."""
        self._senders.pop(request_id, None)

    def _add(self, layers: range, written: Sequence[WrittenPages], ready: torch.Event | None) -> None:
        for pages in written:
            sender = self._senders.get(pages.request_id)
            if sender is not None:
                sender.add(Piece(layers.start, layers.stop, pages.first_page, pages.end_page, ready))

    def _layers_per_frame(self, written: Sequence[WrittenPages]) -> int:
        """Layers of a step's pages that fill the smallest frame of those that wait for them; 1 or more."""
        groups = []
        for pages in written:
            sender = self._senders.get(pages.request_id)
            if sender is not None:
                layout = sender.outgoing.layout
                layer_bytes = (pages.end_page - pages.first_page) * layout.page_bytes // layout.num_layers
                groups.append(sender.outgoing.frame_bytes // layer_bytes)
        return max(1, min(groups, default=1))


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
        self._max_held_bytes = int(settings.held_kv_gib * (1 << 30))
        self._calls = itertools.count(1)
        self._encoders = ThreadPoolExecutor(
            ENCODER_THREADS, thread_name_prefix="encode", initializer=compute_with, initargs=(1,)
        )

    @maps_errors
    async def GetStatus(
        self, request: common_pb2.StatusRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.WorkerStatus:
        """Report identity, limits and load."""
        return self._worker.status(self._carriers.names)

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
            await self._ready(agreed.codec.name)
            outlet = await agreed.carrier.outlet(agreed.peer, agreed.key)
            try:
                number = next(self._calls)
                sender = PageSender(
                    self._outgoing(request, agreed),
                    outlet,
                    replies.announce,
                    self._link(receiver, agreed.on_device),
                    number,
                    self._encoders,
                    SentKV(self._worker),
                )
                # An id for each call: a request that is asked for again must not meet what is left of its first call.
                await self._prefill(request, f"{request.request_id}/{number}", sender, replies, agreed)
            finally:
                await outlet.aclose()

    async def _ready(self, codec: str) -> None:
        """Wait for a codec's kernels, but not so long that the receiver takes it for silence."""
        try:
            async with asyncio.timeout(COMPILING_S):
                await self._codecs.ready(codec)
        except TimeoutError:
            raise WorkerUnavailableError(
                f"codec {codec!r} is still being compiled on this prefill worker; its next requests find it ready"
            ) from None

    async def _prefill(
        self,
        request: prefill_pb2.PrefillRequest,
        engine_id: str,
        sender: PageSender,
        replies: PrefillReplies,
        agreed: Agreement,
    ) -> None:
        """Compute and send side by side; commit when all has left."""
        timeline = Timeline()
        events = self._open(request, engine_id, sender)
        lease: list[PageLease] = []
        replies.accept(agreed.accepted)
        sending = asyncio.create_task(sender.run())
        outcome = "aborted"
        try:
            await self._follow(events, engine_id, sender, replies, timeline, lease)
            await asyncio.sleep(0)  # the last layers were told before the end, but perhaps not heard yet
            sender.close()
            await sending
            await replies.commit()
            outcome = "committed"
        except TransferAbortedError:
            raise
        except KvrailError:
            outcome = "failed"
            raise
        finally:
            self._worker.transfers.transfers["sent", outcome].inc()
            self._worker.transfers.seconds["sent"].observe(timeline.elapsed())
            self._observer.forget(engine_id)
            events.close()
            sending.cancel()
            try:
                await settled(sending)
            finally:
                for held in lease:
                    await self._release(held)

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

    def _open(self, request: prefill_pb2.PrefillRequest, engine_id: str, sender: PageSender) -> EventStream:
        """Submit to the engine; from here on its pages find the sender."""
        self._observer.watch(engine_id, sender)
        try:
            return self._worker.events.open(
                self._worker.engine,
                EngineRequest(
                    request_id=engine_id,
                    prompt_ids=tuple(request.prompt_token_ids),
                    params=sampling_from_proto(request.sampling),
                    prefill_only=True,
                ),
            )
        except BaseException:
            self._observer.forget(engine_id)
            raise

    async def _follow(
        self,
        events: EventStream,
        engine_id: str,
        sender: PageSender,
        replies: PrefillReplies,
        timeline: Timeline,
        lease: list[PageLease],
    ) -> None:
        """Follow the engine until the first tokens are drawn. The lease of the pages is put into `lease`."""
        worker = self._worker
        async for event in events:
            match event:
                case Admitted():
                    held = worker.engine.claim_lease(engine_id)
                    if held is not None:  # else dropped meanwhile: the events end the story
                        lease.append(held)
                        num_tokens = sender.outgoing.num_tokens
                        pages = LeasedPages(worker.cache, worker.side, held.pages, num_tokens)
                        cached_pages = event.cached_tokens // worker.loaded.layout.page_size
                        sender.begin(pages, cached_pages, worker.side.mark())
                case PrefillStarted():
                    timeline.mark(Stage.PREFILL_STARTED)
                case Prefilled():
                    timeline.mark(Stage.PREFILL_FINISHED)
                    replies.first_token(_first_token(event, timeline))

    async def _release(self, lease: PageLease) -> None:
        """Give the pages back; nothing of the transfer may run any more."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._encoders, self._worker.side.synchronize)
        finally:
            self._worker.engine.release_lease(lease)


def _first_token(event: Prefilled, timeline: Timeline) -> prefill_pb2.FirstToken:
    return prefill_pb2.FirstToken(
        token_ids=[token.token_id for token in event.tokens],
        logprobs=[logprobs_to_proto(token.logprobs) for token in event.tokens if token.logprobs is not None],
        marks=marks_to_proto(timeline.marks()),
    )
