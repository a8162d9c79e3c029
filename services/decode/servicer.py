"""The story of one generation: reserve, fetch or compute the prompt's KV, decode, report."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import grpc
import grpc.aio

from codec.base import Codec
from kvrail.config import DecodeSettings
from kvrail.engine.aio import EventStream
from kvrail.engine.events import Admitted
from kvrail.engine.requests import EngineRequest
from kvrail.errors import (
    InvalidRequestError,
    KvrailError,
    OverloadedError,
    TransferAbortedError,
    WorkerUnavailableError,
)
from kvrail.logs import bound_request_id
from kvrail.rpc.errors import maps_errors
from kvrail.tuning import compute_with
from kvrail.wire.convert import sampling_from_proto
from kvrail.wire.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from kvrail.worker import Worker
from services.codecs import AUTO, CodecChoiceError, CodecCost, Codecs
from services.decode.choice import Chooser
from services.decode.progress import Progress
from services.decode.transfer import Fetch, PrefillCaller

logger = logging.getLogger("kvrail.decode")

DECODER_THREADS = 2
MAX_REQUEST_ID_CHARS = 64


class PrefillWorkers(Protocol):
    """How to reach prefill workers (services.decode.prefill_workers; in one process, tests give their own)."""

    def client(self, address: str) -> PrefillCaller:
        """A client of the worker at `address`."""


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Serves kvrail.v1.Decode."""

    def __init__(
        self,
        worker: Worker,
        settings: DecodeSettings,
        codecs: Codecs,
        default_codec: str,
        prefill_workers: PrefillWorkers,
        costs: Mapping[str, CodecCost],
    ) -> None:
        """default_codec: a codec's name, or AUTO. costs: of codecs; measured when they are first needed where empty."""
        self._worker = worker
        self._settings = settings
        self._codecs = codecs
        self._default_codec = default_codec
        self._decoders = ThreadPoolExecutor(
            DECODER_THREADS, thread_name_prefix="decode", initializer=compute_with, initargs=(1,)
        )
        self._prefill_workers = prefill_workers
        fallback = codecs.default() if default_codec == AUTO else default_codec
        self._chooser = Chooser(worker.transfers, settings.max_drafts, fallback, costs)
        self._measuring = asyncio.Lock()

    @maps_errors
    async def GetStatus(
        self, request: common_pb2.StatusRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.WorkerStatus:
        """Report identity, limits and load."""
        status = self._worker.status()
        status.codecs.append(AUTO)
        status.withheld_codecs.extend(self._codecs.withheld)
        return status

    @maps_errors
    async def Generate(self, request: decode_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Generate one request's output; when the client leaves, this is cancelled and everything returns."""
        with bound_request_id(request.request_id), self._worker.calls.track():
            codec = self._check(request)
            asked = EngineRequest(
                request_id=request.request_id,
                prompt_ids=tuple(request.prompt_token_ids),
                params=sampling_from_proto(request.sampling),
                remote=bool(request.prefill_workers),
                resumed_ids=tuple(request.resumed_token_ids),
                provisional=True,  # whoever asks: when drafts are made is measured
            )
            progress = Progress(asked, request.provisional)
            events = self._worker.events.open(self._worker.engine, asked)
            fetching: asyncio.Task[None] | None = None
            try:
                async for event in events:
                    reply = progress.take(event)
                    if isinstance(event, Admitted) and event.awaits_kv:
                        fetching = asyncio.create_task(
                            self._fetch(request, asked, event, codec, events, progress, context)
                        )
                    if reply is not None:
                        await context.write(reply)
                self._learn(progress)
            finally:
                events.close()
                if fetching is not None:
                    fetching.cancel()
                    await asyncio.wait([fetching])

    def _learn(self, progress: Progress) -> None:
        """Measure a request that has come to its end."""
        if (share := progress.hidden_share()) is not None:
            self._worker.transfers.hidden_share.observe(share)
        self._chooser.observe_steps(*progress.steps_after())
        self._chooser.observe_drafts(progress.drafts.proposed, progress.drafts.accepted)

    def _check(self, request: decode_pb2.GenerateRequest) -> str:
        """Refuse what can never work; returns the name of the codec to ask for, or AUTO."""
        self._worker.check_model(request.model)
        if not 0 < len(request.request_id) <= MAX_REQUEST_ID_CHARS:
            raise InvalidRequestError(
                f"request_id has {len(request.request_id)} characters; give 1 to {MAX_REQUEST_ID_CHARS}",
                param="request_id",
            )
        try:
            name = request.codec or self._default_codec
            return AUTO if name == AUTO else self._codecs.get(name).name
        except CodecChoiceError as error:
            raise InvalidRequestError(str(error), param="codec") from None

    async def _choose(
        self, name: str, workers: Sequence[str], asked: EngineRequest, admitted: Admitted, progress: Progress
    ) -> Codec:
        """The codec called `name`; for AUTO the one that suits what is missing here and the link."""
        if name != AUTO:
            return self._codecs.get(name)
        async with self._measuring:
            if not self._chooser.costs:
                measuring = asyncio.get_running_loop().run_in_executor(
                    self._decoders, self._codecs.measure, self._worker.loaded
                )
                self._chooser.costs = await measuring
        layout = self._worker.loaded.layout
        pages = layout.pages_for(len(asked.prompt_ids)) - admitted.cached_tokens // layout.page_size
        choice = self._chooser.choose(workers, pages * layout.page_bytes)
        progress.codec_reason = choice.sentence
        return self._codecs.get(choice.codec)

    async def _fetch(
        self,
        request: decode_pb2.GenerateRequest,
        asked: EngineRequest,
        admitted: Admitted,
        codec_name: str,
        events: EventStream,
        progress: Progress,
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Fill the prompt's pages from the first prefill worker that can; else let the engine compute them."""
        engine, metrics = self._worker.engine, self._worker.transfers
        try:
            codec = await self._choose(codec_name, request.prefill_workers, asked, admitted, progress)
        except Exception:
            logger.exception("measuring the codecs failed")
            events.fail(KvrailError("the decode worker failed to choose a codec; its log has the cause"))
            return
        lease = engine.claim_lease(asked.request_id)
        if lease is None:
            return  # dropped meanwhile: the stream ends by itself
        silence_s = self._settings.transfer_timeout_s
        fetch = Fetch(self._worker, self._decoders, asked, admitted, lease, codec, progress.timeline, silence_s)
        outcome = "aborted"
        try:
            for number, address in enumerate(request.prefill_workers):
                if number:
                    metrics.fallbacks["alternate"].inc()
                try:
                    client, link = self._prefill_workers.client(address), self._chooser.link_bytes_per_s(address)
                    await fetch.fetch(client, context.time_remaining(), link)
                except (WorkerUnavailableError, TransferAbortedError, OverloadedError) as error:
                    logger.warning("prefill worker %s failed: %s", address, error)
                    if fetch.drafting:  # the next transfer writes the same pages
                        engine.drop_drafts(asked.request_id)
                    continue
                outcome = "committed"
                progress.prefill_worker = address
                progress.received = fetch.received
                self._chooser.observe_link(address, codec.name, fetch.watch.sample())
                if not codec.exact:
                    metrics.lossy_requests.inc()
                engine.receive_kv(asked.request_id)
                return
            metrics.fallbacks["local"].inc()
            outcome = "failed"
            logger.warning("no prefill worker could be used; the prompt is computed here")
            engine.compute_here(asked.request_id)
        except KvrailError as error:
            outcome = "failed"
            events.fail(error)
        except Exception:
            outcome = "failed"
            logger.exception("fetching KV failed")
            events.fail(KvrailError("the decode worker failed to receive KV; its log has the cause"))
        finally:
            metrics.transfers["received", outcome].inc()
            await fetch.release()
