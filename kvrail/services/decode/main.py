"""Runs a decode worker."""

import asyncio

from kvrail.config.settings import DecodeSettings
from kvrail.services.decode.fetcher import Fetcher
from kvrail.services.decode.prefill_workers import GrpcPrefillWorkers
from kvrail.services.decode.servicer import DecodeServicer
from kvrail.worker.codecs import AUTO, Codecs
from kvrail.worker.process import build_worker, certificate, run_worker, serve
from kvrail.worker.transports import Transports
from kvrail.worker.weights import forms_of


def run(settings: DecodeSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit code."""
    return run_worker(settings, "decode", _main(settings))


async def _main(settings: DecodeSettings) -> None:
    tls = certificate(settings, "decode")
    codecs = Codecs(settings, allow_lossy=settings.allow_lossy)
    asked = codecs.check(settings.codec)
    worker = build_worker(
        settings,
        codecs=codecs.parameters,
        max_drafts=settings.max_drafts,
        detokenize=True,
        weights=forms_of(settings),
    )
    codecs.check_codebook(worker.loaded)
    prefill_workers = GrpcPrefillWorkers(tls)
    transports = await Transports.to_receive(settings, worker.loaded.device)
    first = transports.first_codec(codecs.usual)
    codecs.prepare(first, worker.loaded, worker.coding)
    worker.transfers.expect(first)
    if asked != AUTO:
        codecs.ask_for(asked)
    fetcher = Fetcher(worker, settings, codecs, transports, asked, first, prefill_workers)
    servicer = DecodeServicer(worker, fetcher, transports.names, codecs.withheld)
    measuring = asyncio.create_task(fetcher.measure_codecs())
    try:
        await serve(worker, settings.port, lambda rpc: rpc.add_decode(servicer), tls)
    finally:
        codecs.close()
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)
        await prefill_workers.close()
        await transports.aclose()
