"""What a worker serves: one engine, and on one port a service for each of its roles."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import torch

from kvrail.config.settings import DecodeSettings, PrefillSettings
from kvrail.rpc.server import RpcServer
from kvrail.security.tls import Tls
from kvrail.services.decode.fetch_attempt import FetchParts
from kvrail.services.decode.fetcher import Fetcher
from kvrail.services.decode.prefill_workers import GrpcPrefillWorkers
from kvrail.services.decode.servicer import DecodeServicer
from kvrail.services.prefill.handler import PATIENCE_S, HandlerParts
from kvrail.services.prefill.handshake import Terms
from kvrail.services.prefill.observer import PageObserver
from kvrail.services.prefill.servicer import PrefillServicer
from kvrail.transfer.streams import SideStream
from kvrail.worker.codecs import AUTO, Codecs
from kvrail.worker.monitor import Monitor
from kvrail.worker.process import Worker, build_worker
from kvrail.worker.serving import serve
from kvrail.worker.transports import Transports
from kvrail.worker.weights import forms_of


async def run(settings: PrefillSettings | DecodeSettings, monitor: Monitor, tls: Tls | None) -> None:
    """Serve until SIGTERM or SIGINT. tls: the worker's certificate. Raises from kvrail.errors."""
    sends = settings if isinstance(settings, PrefillSettings) else None
    receives = settings if isinstance(settings, DecodeSettings) else None
    codecs = Codecs(settings, allow_lossy=receives is None or receives.allow_lossy)
    asked = AUTO if receives is None else codecs.check(receives.codec)
    side = SideStream(torch.device(settings.device))
    observer = None if sends is None else PageObserver(asyncio.get_running_loop(), side)
    worker = build_worker(
        settings,
        monitor,
        side=side,
        listener=observer,
        max_drafts=0 if receives is None else receives.max_drafts,
        weights=forms_of(settings),
    )
    codecs.check_codebook(worker.model.loaded)
    transports = await Transports.start(settings, worker.model.loaded.device)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(transports.aclose)
        stack.callback(codecs.close)
        first = transports.first_codec(codecs.usual)
        codecs.prepare(first, worker.model.loaded, worker.meters.coding)
        worker.meters.transfers.expect(first)
        if asked != AUTO:
            codecs.ask_for(asked)
        prefill, decode = None, None
        if sends is not None and observer is not None:
            prefill = prefill_servicer(worker, sends, codecs, transports, observer)
        if receives is not None:
            peers = GrpcPrefillWorkers(tls)
            stack.push_async_callback(peers.close)
            fetcher = fetcher_of(worker, receives, codecs, transports, asked, first, peers)
            decode = decode_servicer(worker, fetcher, codecs)
            await stack.enter_async_context(_measuring(fetcher))

        def add(rpc: RpcServer) -> None:
            if prefill is not None:
                rpc.add_prefill(prefill)
            if decode is not None:
                rpc.add_decode(decode)

        await serve(worker, settings.port, add, tls)


def prefill_servicer(
    worker: Worker, settings: PrefillSettings, codecs: Codecs, transports: Transports, observer: PageObserver
) -> PrefillServicer:
    """What serves kvrail.v1.Prefill for a worker."""
    patience_s = PATIENCE_S if "decode" in settings.roles else None
    return PrefillServicer(
        worker.reporter(codecs.parameters, transports.names),
        Terms(worker.model, codecs, transports),
        HandlerParts(worker.access, worker.grammars, worker.meters, observer, patience_s),
        worker.calls,
        worker.tracing,
        settings,
    )


def fetcher_of(
    worker: Worker,
    settings: DecodeSettings,
    codecs: Codecs,
    transports: Transports,
    asked: str,
    first: str,
    peers: GrpcPrefillWorkers,
) -> Fetcher:
    """What fetches KV for a worker; see `Fetcher` for the codecs."""
    silence_s, frame_bytes = settings.transfer_timeout_s, settings.max_frame_bytes
    parts = FetchParts(worker.model, worker.access, worker.meters, transports, silence_s, frame_bytes)
    return Fetcher(parts, settings, codecs, asked, first, peers)


def decode_servicer(worker: Worker, fetcher: Fetcher, codecs: Codecs) -> DecodeServicer:
    """What serves kvrail.v1.Decode for a worker."""
    reporter = worker.reporter(codecs.parameters, fetcher.parts.transports.names)
    return DecodeServicer(reporter, fetcher, worker.grammars, worker.calls, worker.tracing, codecs.withheld)


@asynccontextmanager
async def _measuring(fetcher: Fetcher) -> AsyncIterator[None]:
    """Measure codecs meanwhile."""
    measuring = asyncio.create_task(fetcher.measure_codecs())
    try:
        yield
    finally:
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)
