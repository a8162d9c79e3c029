"""One attempt to fetch a prompt's first tokens and KV from one prefill worker into pages that are reserved here."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from time import perf_counter
from typing import Protocol, TypeVar

from codec.assembly import FrameGuard, Transfer
from codec.base import BlockSpec, Codec, CodecError
from codec.frame import unpack
from kvrail.engine.batch import SampledToken
from kvrail.engine.events import Admitted, PageLease
from kvrail.engine.requests import EngineRequest
from kvrail.errors import FrameError, IncompatibleError, WorkerUnavailableError
from kvrail.lifecycle import Stage, Timeline
from kvrail.transport.call import PrefillCall
from kvrail.wire import PROTOCOL_VERSION
from kvrail.wire.convert import layout_to_proto, logprobs_from_proto, marks_from_proto, sampling_to_proto
from kvrail.wire.v1 import prefill_pb2
from kvrail.worker import Worker
from services.decode.choice import LinkWatch
from services.decode.kept import KeptStages
from services.decode.progress import Received
from services.frames import expectation, first_recent_page, max_payload_bytes
from services.pages import paged_block

logger = logging.getLogger("kvrail.decode")

T = TypeVar("T")


class PrefillCaller(Protocol):
    """A client of one prefill worker, over any transport."""

    def prefill(self, request: prefill_pb2.PrefillRequest, *, timeout_s: float | None = None) -> PrefillCall:
        """Begin a call; it opens at the event loop's next turn."""


class Fetch:
    """Fetches into the pages of `admitted`; several workers may be tried one after another."""

    def __init__(
        self,
        worker: Worker,
        executor: Executor,
        request: EngineRequest,
        admitted: Admitted,
        lease: PageLease,
        codec: Codec,
        timeline: Timeline,
        silence_s: float,
    ) -> None:
        self._worker = worker
        self._executor = executor
        self._request = request
        self._lease = lease
        self._held_pages = admitted.cached_tokens // worker.loaded.layout.page_size
        self._codec = codec
        self._timeline = timeline
        self._silence_s = silence_s
        self._ready = worker.side.mark()  # steps that still use these pages from before are enqueued ahead of this
        self.received = Received(codec.name, not codec.exact)
        self.drafting = False  # the engine was told that it may draft on what came in this attempt
        self.watch = LinkWatch()

    async def fetch(self, client: PrefillCaller, timeout_s: float | None, link_bytes_per_s: int) -> None:
        """Receive everything, or raise. link_bytes_per_s: of the link from there, 0 where it is not known.

        WorkerUnavailableError, TransferAbortedError or OverloadedError: another worker may succeed. FrameError or
        IncompatibleError: something is wrong.
        """
        begin = perf_counter()
        self.drafting, self.watch = False, LinkWatch()
        async with client.prefill(self._prefill_request(link_bytes_per_s), timeout_s=timeout_s) as call:
            num_stages, max_frame_bytes = self._codec.num_stages, self._worker.settings.max_frame_bytes
            call.reserve(expectation(self._request.request_id, self._spec(), num_stages, max_frame_bytes))
            guard = await self._agree(call)
            first = asyncio.create_task(self._take_first_tokens(call))
            try:
                with KeptStages(self._worker.transfers) as kept:
                    await self._take_frames(call, guard, kept)
                await first
            finally:
                first.cancel()
                await asyncio.wait([first])
            if not guard.complete():
                raise FrameError(f"the transfer ended with {guard.missing()} pages of layers missing")
        await self._in_thread(self._worker.side.synchronize)
        self._timeline.mark(Stage.KV_COARSE)  # marked already where the codec has several stages
        self._timeline.mark(Stage.KV_COMPLETE)
        self._worker.transfers.seconds["received"].observe(perf_counter() - begin)

    async def release(self) -> None:
        """Give the pages back to the engine alone, once nothing is being written any more."""
        try:
            await self._in_thread(self._worker.side.synchronize)
        finally:
            self._worker.engine.release_lease(self._lease)

    def _prefill_request(self, link_bytes_per_s: int) -> prefill_pb2.PrefillRequest:
        loaded = self._worker.loaded
        return prefill_pb2.PrefillRequest(
            request_id=self._request.request_id,
            prompt_token_ids=self._request.prompt_ids,
            sampling=sampling_to_proto(self._request.params),
            handshake=prefill_pb2.Handshake(
                protocol_version=PROTOCOL_VERSION,
                model_fingerprint=loaded.fingerprint,
                layout=layout_to_proto(loaded.layout),
                codecs=[prefill_pb2.OfferedCodec(name=self._codec.name, parameters_id=self._codec.parameters_id)],
                transports=[self._worker.settings.transport],
                held_pages=self._held_pages,
                link_bytes_per_s=link_bytes_per_s,
                max_frame_bytes=self._worker.settings.max_frame_bytes,
            ),
        )

    async def _agree(self, call: PrefillCall) -> FrameGuard:
        """Check the other end's choice and make room for exactly what it announced."""
        accepted = await self._within_silence(call.accepted())
        self._timeline.mark(Stage.PREFILL_QUEUED)
        codec, spec = self._codec, self._spec()
        chosen = (accepted.protocol_version, accepted.codec, accepted.first_page, accepted.page_count)
        if chosen != (PROTOCOL_VERSION, codec.name, self._held_pages, spec.num_pages):
            raise IncompatibleError(
                f"the prefill worker accepted protocol {accepted.protocol_version}, codec {accepted.codec!r} and"
                f" {accepted.page_count} pages from {accepted.first_page}; asked were protocol {PROTOCOL_VERSION},"
                f" codec {codec.name!r} and {spec.num_pages} pages from {self._held_pages}"
            )
        self.received = Received(codec.name, not codec.exact)
        recent_page = first_recent_page(len(self._request.prompt_ids), spec.page_size)
        return FrameGuard(
            Transfer(self._request.request_id, codec.name, codec.num_stages, spec, self._held_pages, recent_page)
        )

    def _spec(self) -> BlockSpec:
        """Shape of all that is missing here, as one block."""
        layout = self._worker.loaded.layout
        return BlockSpec(
            dtype=layout.dtype,
            num_layers=layout.num_layers,
            num_pages=layout.pages_for(len(self._request.prompt_ids)) - self._held_pages,
            page_size=layout.page_size,
            num_kv_heads=layout.num_kv_heads,
            key_dim=layout.key_dim,
            value_dim=layout.value_dim,
            scaled=layout.scaled,
        )

    async def _take_first_tokens(self, call: PrefillCall) -> None:
        message = await call.first_token()
        logprobs = [logprobs_from_proto(item) for item in message.logprobs]
        if len(message.token_ids) != self._request.params.n or len(logprobs) not in (0, len(message.token_ids)):
            raise FrameError(
                f"{len(message.token_ids)} first tokens with {len(logprobs)} log probabilities came;"
                f" n is {self._request.params.n}"
            )
        self._timeline.merge(marks_from_proto(message.marks), Stage.PREFILL_QUEUED)
        tokens = [
            SampledToken(token_id, logprobs[number] if logprobs else None)
            for number, token_id in enumerate(message.token_ids)
        ]
        self._worker.engine.receive_first_tokens(self._request.request_id, tokens)

    async def _take_frames(self, call: PrefillCall, guard: FrameGuard, kept: KeptStages) -> None:
        while True:
            asked = perf_counter()
            frame = await self._within_silence(call.receive())
            if frame is None:
                return
            if self._timeline.get(Stage.PREFILL_FINISHED) is not None:
                self.watch.frame(len(frame), asked, perf_counter())
            await self._in_thread(self._land, frame, guard, kept)
            if guard.coarse_complete() and not guard.complete() and not self.drafting:
                await self._in_thread(self._worker.side.synchronize)
                self._timeline.mark(Stage.KV_COARSE)
                self.drafting = True
                self._worker.engine.receive_coarse_kv(self._request.request_id)

    def _land(self, frame: memoryview, guard: FrameGuard, kept: KeptStages) -> None:
        """Check a frame and decode it into the pages. Raises FrameError; then no page was touched."""
        worker = self._worker
        try:
            header, payload = unpack(frame, max_payload_bytes(worker.settings.max_frame_bytes))
            guard.admit(header)
            spec = header.spec
            layers = range(header.first_layer, header.first_layer + spec.num_layers)
            page_ids = self._lease.pages[header.first_page : header.first_page + spec.num_pages]
            begin = perf_counter()
            with worker.side.after(self._ready):
                pages = paged_block(worker.cache, layers, page_ids)
                self._codec.decode(header.stage, kept.add(header, payload), pages)
            worker.coding.decoded(self._codec.name, perf_counter() - begin)
        except CodecError as error:
            raise FrameError(f"request {self._request.request_id}: {error}") from error
        raw_bytes = spec.raw_bytes if header.stage == header.num_stages - 1 else 0
        worker.transfers.received(header.codec, raw_bytes=raw_bytes, payload_bytes=payload.nbytes)
        self.received.raw_bytes += raw_bytes
        self.received.payload_bytes += payload.nbytes

    async def _within_silence(self, awaitable: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._silence_s):  # unlike wait_for, Python 3.11's too, it loses no cancellation
                return await awaitable
        except TimeoutError:
            raise WorkerUnavailableError(f"the prefill worker was silent for {self._silence_s:g} s") from None

    async def _in_thread(self, function: Callable[..., None], *args: object) -> None:
        """Run in a helper thread; a cancelled caller still waits, since pages may be being written."""
        work = asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise
