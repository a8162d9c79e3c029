"""One attempt to fetch a prompt's first tokens and KV from one prefill worker into pages that are reserved here."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter

from kvrail.codec.base import Codec
from kvrail.codec.frame import FrameHeader
from kvrail.engine.batch.batch import SampledToken
from kvrail.engine.kv.leases import PageLease
from kvrail.errors import IncompatibleError, KvrailError
from kvrail.rpc.prefill.client import GrpcPrefillClient
from kvrail.runtime.limits import usable_cores
from kvrail.runtime.logs import exemplar
from kvrail.runtime.tuning import compute_with
from kvrail.runtime.waiting import settled
from kvrail.services.decode.choice import LinkSample
from kvrail.services.decode.progress import Progress, Received
from kvrail.telemetry.moments import Moment
from kvrail.transfer.guard import Transfer
from kvrail.transfer.receiving import PageReceiver
from kvrail.transfer.silence import unless_silent
from kvrail.transfer.sizes import block_spec, first_recent_page
from kvrail.transport.base import PayloadReceiver, Peer, Transport
from kvrail.wire import PROTOCOL_VERSION
from kvrail.wire.checks import check_name
from kvrail.wire.convert import (
    first_tokens_from_proto,
    layout_to_proto,
    marks_from_proto,
    sampling_to_proto,
    spans_from_proto,
)
from kvrail.wire.v1 import prefill_pb2
from kvrail.worker.access import EngineAccess
from kvrail.worker.observing import KVMeters, pages_of
from kvrail.worker.status import ServedModel
from kvrail.worker.transports import Transports

logger = logging.getLogger("kvrail.decode")

DECODER_THREADS = min(8, max(4, usable_cores() // 2))


@dataclass(slots=True)
class FetchParts:
    """What every attempt of a decode worker uses.

    silence_s: longest silence of a prefill worker. executor: its threads check and decode.
    """

    model: ServedModel
    access: EngineAccess
    meters: KVMeters
    transports: Transports
    silence_s: float
    max_frame_bytes: int
    executor: Executor = field(
        default_factory=lambda: ThreadPoolExecutor(DECODER_THREADS, "decode", compute_with, (1,))
    )


class FetchAttempt:
    """Fetches into leased pages from one worker: inside `asked`, `receive` and the rest.

    codecs: the worker takes the first of these that it can use. received: what was agreed on and what has come so far.
    As the transfer's observer it counts that, for metrics, usage and traces; times the link; has the request draft.
    """

    def __init__(
        self, parts: FetchParts, progress: Progress, lease: PageLease, cached_tokens: int, codecs: Sequence[Codec]
    ) -> None:
        self._parts = parts
        self._progress = progress
        self._request = progress.request
        self._timeline = progress.timeline
        layout = parts.access.layout
        self._held_pages = cached_tokens // layout.page_size
        self._num_pages = layout.pages_for(len(self._request.prompt_ids)) - self._held_pages  # those that are missing
        self._codecs = {codec.name: codec for codec in codecs}
        self._pages = parts.access.pages(lease, len(self._request.prompt_ids))
        self._key = secrets.randbits(64)
        self._payloads: PayloadReceiver | None = None
        self._first: asyncio.Task[None] | None = None
        self.received = Received()
        self.drafting = False  # the engine may draft on what came
        self.crossing = LinkSample()

    @asynccontextmanager
    async def asked(
        self, client: GrpcPrefillClient, timeout_s: float | None, link_bytes_per_s: int, offered: Sequence[Transport]
    ) -> AsyncIterator[None]:
        """Ask a worker to compute the prompt and send its KV. After the block nothing of the attempt is written.

        link_bytes_per_s: of the link from there, 0 if it is not known. offered: transports by which it may send.
        """
        self._begun = perf_counter()
        self._host = client.host
        parts, progress = self._parts, self._progress
        request = prefill_pb2.PrefillRequest(
            request_id=self._request.caller_id,
            prompt_token_ids=self._request.prompt_ids,
            trace=progress.spans is not None and progress.spans.requested,
            trace_context={} if progress.trace is None else progress.trace.context,
            client=self._request.client,
            cache_salt=self._request.cache_salt,
            sampling=sampling_to_proto(self._request.params),
            handshake=prefill_pb2.Handshake(
                protocol_version=PROTOCOL_VERSION,
                model_fingerprint=parts.model.loaded.fingerprint,
                layout=layout_to_proto(parts.access.layout),
                codecs=[
                    prefill_pb2.OfferedCodec(name=codec.name, parameters_id=codec.parameters_id)
                    for codec in self._codecs.values()
                ],
                transports=[
                    prefill_pb2.OfferedTransport(
                        name=transport.name, address=transport.address, on_device=transport.on_device
                    )
                    for transport in offered
                ],
                transfer_key=self._key,
                held_pages=self._held_pages,
                link_bytes_per_s=link_bytes_per_s,
                max_frame_bytes=parts.max_frame_bytes,
            ),
        )
        async with client.prefill(request, timeout_s=timeout_s) as self._call:
            try:
                yield
            finally:
                try:
                    if self._first is not None:
                        self._first.cancel()
                        await settled(self._first)
                finally:
                    await self._close()

    async def receive(self) -> None:
        """Receive everything, or raise; whatever is raised, another worker may succeed."""
        parts, request, layout = self._parts, self._request, self._parts.access.layout
        codec, payloads = await self._agree()
        self._first = asyncio.create_task(self._take_first_tokens())
        transfer = Transfer(
            request.caller_id,
            codec.name,
            codec.num_stages,
            block_spec(layout, self._num_pages),
            self._held_pages,
            first_recent_page(len(request.prompt_ids), layout.page_size),
            codec.parameters_id,
        )
        receiver = PageReceiver(transfer, codec, self._pages, parts.executor, self, parts.silence_s)
        self._call.on_heartbeat = receiver.not_silent
        await receiver.run(self._call.announced, payloads)
        await unless_silent(self._first, parts.silence_s)
        self._timeline.mark(Moment.KV_COARSE)  # marked already where the codec has several stages
        self._timeline.mark(Moment.KV_COMPLETE)
        parts.meters.transfers.seconds["received"].observe(perf_counter() - self._begun, example=exemplar())

    async def follow_to_end(self) -> None:
        """Follow the call to its end, and put the prefill worker's spans beside those made here."""
        call, spans = self._call, self._progress.spans
        try:
            while await unless_silent(call.announced(), self._parts.silence_s) is not None:
                pass
        except KvrailError as error:
            logger.info("a prefill worker's call failed after its pages had come: %s", error)
        zero = self._timeline.get(Moment.PREFILL_QUEUED)
        if spans is not None and zero is not None:
            spans.adopt(spans_from_proto(call.spans), zero)

    async def _close(self) -> None:
        """Close the transport's end, opened or not: the sender must not wait for ever for it to be opened."""
        accepted = self._call.accepted_already
        if accepted is not None and not self.received.transport:  # else that was tried
            try:
                self._payloads = await self._open(accepted)
            except KvrailError:
                return
        if self._payloads is not None:
            await self._payloads.aclose()

    async def _open(self, accepted: prefill_pb2.Accepted) -> PayloadReceiver:
        transport = self._parts.transports.get(accepted.transport)
        return await transport.receiver(Peer(accepted.transport_address, self._host), self._key)

    async def _agree(self) -> tuple[Codec, PayloadReceiver]:
        """Check the other end's choice and open the transport's end; returns the codec and that end."""
        accepted = await unless_silent(self._call.accepted(), self._parts.silence_s)
        self._timeline.mark(Moment.PREFILL_QUEUED)
        codec, num_pages = self._codecs.get(accepted.codec), self._num_pages
        chosen = (accepted.protocol_version, accepted.first_page, accepted.page_count)
        if codec is None or chosen != (PROTOCOL_VERSION, self._held_pages, num_pages):
            raise IncompatibleError(
                f"the prefill worker accepted protocol {accepted.protocol_version}, codec {accepted.codec!r} and"
                f" {accepted.page_count} pages from {accepted.first_page}; asked were protocol {PROTOCOL_VERSION},"
                f" codec {' or '.join(map(repr, self._codecs))} and {num_pages} pages from {self._held_pages}"
            )
        check_name("numerics", accepted.numerics)
        received, transport = self.received, self._parts.transports.get(accepted.transport)
        received.codec, received.lossy, received.transport = codec.name, not codec.exact, transport.name
        received.numerics = accepted.numerics
        self._payloads = await unless_silent(self._open(accepted), self._parts.silence_s)
        return codec, self._payloads

    async def _take_first_tokens(self) -> None:
        message = await self._call.first_token()
        found = first_tokens_from_proto(message, self._request.params, self._parts.model.loaded.vocab_size)
        self._timeline.merge(marks_from_proto(message.marks), Moment.PREFILL_QUEUED)
        tokens = [SampledToken(*each) for each in found]
        with self._parts.access.engine.change() as requests:
            requests.receive_first_tokens(self._request.request_id, tokens)

    def arrived(self, payload_bytes: int, waited_s: float, crossing_s: float) -> None:
        """A frame is here."""
        if self._progress.spans is not None:
            self._progress.spans.add("wait for a frame", "wait", waited_s, bytes=payload_bytes)
        self.crossing.add(payload_bytes, crossing_s)

    def decoded(self, header: FrameHeader, payload_bytes: int, seconds: float) -> None:
        """A frame is in the pages."""
        spans, meters = self._progress.spans, self._parts.meters
        if spans is not None:
            spans.add("decode", pages_of(header), seconds, bytes=payload_bytes, stage=header.stage)
        raw_bytes = header.spec.raw_bytes if header.stage == header.num_stages - 1 else 0
        meters.coding.decoded(header.codec, seconds)
        meters.transfers.crossed("received", header.codec, raw_bytes=raw_bytes, payload_bytes=payload_bytes)
        self.received.payload_bytes += payload_bytes
        self.received.raw_bytes += raw_bytes

    def coarse(self) -> None:
        """The pages hold a coarse form of the KV."""
        if not self.drafting:
            self._timeline.mark(Moment.KV_COARSE)
            self.drafting = True
            with self._parts.access.engine.change() as requests:
                requests.receive_coarse_kv(self._request.request_id)

    def kept(self, change: int) -> None:
        """Earlier stages are kept until the last has come, or are no more."""
        self._parts.meters.transfers.kept_bytes.inc(change)
