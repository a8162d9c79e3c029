"""One attempt to fetch a prompt's first tokens and KV from one prefill worker into pages that are reserved here."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from time import perf_counter

from kvrail.codec.base import Codec
from kvrail.codec.frame import FrameHeader
from kvrail.engine.batch.batch import SampledToken
from kvrail.engine.kv.leases import PageLease
from kvrail.engine.request.events import Admitted
from kvrail.engine.request.requests import EngineRequest
from kvrail.errors import IncompatibleError, KvrailError
from kvrail.rpc.prefill.call import PrefillCall
from kvrail.rpc.prefill.client import PrefillClient
from kvrail.services.decode.choice import LinkSample
from kvrail.services.decode.progress import Received
from kvrail.telemetry.lifecycle import Stage, Timeline
from kvrail.telemetry.spans import SpanLog
from kvrail.transfer.guard import Transfer
from kvrail.transfer.receiving import PageReceiver
from kvrail.transfer.silence import unless_silent
from kvrail.transfer.sizes import block_spec, first_recent_page
from kvrail.transport.base import Inlet, Peer
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
from kvrail.worker.carriers import Carriers
from kvrail.worker.observing import ReceivedKV
from kvrail.worker.pages import LeasedPages
from kvrail.worker.process import Worker

logger = logging.getLogger("kvrail.decode")


class Fetch:
    """Fetches into the pages of `admitted`; several workers may be tried one after another.

    codecs: of which a worker takes the first that it can use.
    """

    def __init__(
        self,
        worker: Worker,
        carriers: Carriers,
        executor: Executor,
        request: EngineRequest,
        admitted: Admitted,
        lease: PageLease,
        codecs: Sequence[Codec],
        timeline: Timeline,
        spans: SpanLog | None,
        trace_context: Mapping[str, str],
        silence_s: float,
    ) -> None:
        self._worker = worker
        self._carriers = carriers
        self._executor = executor
        self._request = request
        self._lease = lease
        self._held_pages = admitted.cached_tokens // worker.loaded.layout.page_size
        self._codecs = {codec.name: codec for codec in codecs}
        self._timeline = timeline
        self._spans = spans
        self._trace_context = trace_context
        self._silence_s = silence_s
        self._pages = LeasedPages(worker.cache, worker.side, lease.pages, len(request.prompt_ids))
        self._received = Received()
        self.drafting = False  # the engine was told that it may draft on what came in this attempt
        self.crossing = LinkSample()

    async def fetch(
        self,
        client: PrefillClient,
        received: Received,
        timeout_s: float | None,
        link_bytes_per_s: int,
        committed: Callable[[], None],
        avoided: Collection[str] = (),
    ) -> None:
        """Receive everything, or raise; then nothing of the attempt is written any more.

        received: filled with what was agreed on and what has come so far.
        committed: called once the pages hold everything; the call's end is heard after that, and changes nothing.
        link_bytes_per_s: of the link from there, 0 where it is not known. avoided: transports that are not offered, if
        there are others. Whatever is raised, another worker may succeed.
        """
        begin = perf_counter()
        self.drafting, self.crossing, self._received = False, LinkSample(), received
        key = secrets.randbits(64)
        request = self._prefill_request(link_bytes_per_s, key, avoided)
        async with client.prefill(request, timeout_s=timeout_s) as call:
            inlet: Inlet | None = None
            first: asyncio.Task[None] | None = None
            try:
                inlet = await self._agree(call, client.host, key)
                first = asyncio.create_task(self._take_first_tokens(call))
                await self._receive(call, inlet)
                await unless_silent(first, self._silence_s)
                self._timeline.mark(Stage.KV_COARSE)  # marked already where the codec has several stages
                self._timeline.mark(Stage.KV_COMPLETE)
                self._worker.transfers.seconds["received"].observe(perf_counter() - begin)
                committed()
                await self._hear_out(call)
            finally:
                if first is not None:
                    first.cancel()
                    await asyncio.wait([first])
                await self._close(inlet, call, client.host, key)

    async def _hear_out(self, call: PrefillCall) -> None:
        """Follow the call to its end, and put the prefill worker's spans beside those made here."""
        try:
            while await unless_silent(call.announced(), self._silence_s) is not None:
                pass
        except KvrailError as error:
            logger.info("a prefill worker's call failed after its pages had come: %s", error)
        zero = self._timeline.get(Stage.PREFILL_QUEUED)
        if self._spans is not None and zero is not None:
            self._spans.adopt(spans_from_proto(call.spans), zero)

    async def _close(self, inlet: Inlet | None, call: PrefillCall, host: str, key: int) -> None:
        """Close the way, opened or not: what was sent before it was opened must not wait for ever at the sender."""
        accepted = call.accepted_already
        if inlet is None and accepted is not None:
            try:
                inlet = await self._carriers.get(accepted.transport).inlet(Peer(accepted.transport_address, host), key)
            except KvrailError:
                return
        if inlet is not None:
            await inlet.aclose()

    def _prefill_request(self, link_bytes_per_s: int, key: int, avoided: Collection[str]) -> prefill_pb2.PrefillRequest:
        loaded = self._worker.loaded
        offered = [carrier for carrier in self._carriers.all if carrier.name not in avoided] or self._carriers.all
        return prefill_pb2.PrefillRequest(
            request_id=self._request.caller_id,
            prompt_token_ids=self._request.prompt_ids,
            trace=self._spans is not None and self._spans.told,
            trace_context=self._trace_context,
            client=self._request.client,
            cache_salt=self._request.cache_salt,
            sampling=sampling_to_proto(self._request.params),
            handshake=prefill_pb2.Handshake(
                protocol_version=PROTOCOL_VERSION,
                model_fingerprint=loaded.fingerprint,
                layout=layout_to_proto(loaded.layout),
                codecs=[
                    prefill_pb2.OfferedCodec(name=codec.name, parameters_id=codec.parameters_id)
                    for codec in self._codecs.values()
                ],
                transports=[
                    prefill_pb2.OfferedTransport(
                        name=carrier.name, address=carrier.address, on_device=carrier.on_device
                    )
                    for carrier in offered
                ],
                transfer_key=key,
                held_pages=self._held_pages,
                link_bytes_per_s=link_bytes_per_s,
                max_frame_bytes=self._worker.settings.max_frame_bytes,
            ),
        )

    async def _agree(self, call: PrefillCall, host: str, key: int) -> Inlet:
        """Check the other end's choice and open the way on which payloads will come."""
        accepted = await unless_silent(call.accepted(), self._silence_s)
        self._timeline.mark(Stage.PREFILL_QUEUED)
        codec, num_pages = self._codecs.get(accepted.codec), self._num_pages()
        chosen = (accepted.protocol_version, accepted.first_page, accepted.page_count)
        if codec is None or chosen != (PROTOCOL_VERSION, self._held_pages, num_pages):
            raise IncompatibleError(
                f"the prefill worker accepted protocol {accepted.protocol_version}, codec {accepted.codec!r} and"
                f" {accepted.page_count} pages from {accepted.first_page}; asked were protocol {PROTOCOL_VERSION},"
                f" codec {' or '.join(map(repr, self._codecs))} and {num_pages} pages from {self._held_pages}"
            )
        check_name("numerics", accepted.numerics)
        carrier = self._carriers.get(accepted.transport)
        received = self._received
        received.codec, received.lossy, received.transport = codec.name, not codec.exact, carrier.name
        received.numerics = accepted.numerics
        inlet = carrier.inlet(Peer(accepted.transport_address, host), key)
        return await unless_silent(inlet, self._silence_s)

    def _num_pages(self) -> int:
        """How many are missing here."""
        return self._worker.loaded.layout.pages_for(len(self._request.prompt_ids)) - self._held_pages

    async def _receive(self, call: PrefillCall, inlet: Inlet) -> None:
        """Have all pages written."""
        codec, layout = self._codecs[self._received.codec], self._worker.loaded.layout
        transfer = Transfer(
            self._request.caller_id,
            codec.name,
            codec.num_stages,
            block_spec(layout, self._num_pages()),
            self._held_pages,
            first_recent_page(len(self._request.prompt_ids), layout.page_size),
        )
        observer = _Watching(self._worker, self._spans, self._received, self.crossing)
        receiver = PageReceiver(
            transfer, codec, self._pages, self._executor, observer, self._silence_s, self._begin_drafting
        )
        call.on_heartbeat = receiver.not_silent
        await receiver.run(call.announced, inlet)

    def _begin_drafting(self) -> None:
        """The pages hold a coarse form of the KV."""
        if not self.drafting:
            self._timeline.mark(Stage.KV_COARSE)
            self.drafting = True
            self._worker.engine.receive_coarse_kv(self._request.request_id)

    async def _take_first_tokens(self, call: PrefillCall) -> None:
        message = await call.first_token()
        found = first_tokens_from_proto(message, self._request.params, self._worker.loaded.vocab_size)
        self._timeline.merge(marks_from_proto(message.marks), Stage.PREFILL_QUEUED)
        tokens = [SampledToken(*each) for each in found]
        self._worker.engine.receive_first_tokens(self._request.request_id, tokens)


class _Watching(ReceivedKV):
    """Counts, and times the link."""

    def __init__(self, worker: Worker, spans: SpanLog | None, received: Received, crossing: LinkSample) -> None:
        super().__init__(worker, spans)
        self._received = received
        self._crossing = crossing

    def arrived(self, payload_bytes: int, waited_s: float, flight_s: float) -> None:
        """A frame is here."""
        super().arrived(payload_bytes, waited_s, flight_s)
        self._crossing.add(payload_bytes, flight_s)

    def decoded(self, header: FrameHeader, payload_bytes: int, seconds: float) -> None:
        """A frame is in the pages."""
        super().decoded(header, payload_bytes, seconds)
        self._received.payload_bytes, self._received.raw_bytes = self.payload_bytes, self.raw_bytes
