"""Runs a prefill worker."""

import asyncio

import torch

from kvrail.config.settings import PrefillSettings
from kvrail.services.prefill.observer import PageObserver
from kvrail.services.prefill.servicer import PrefillServicer
from kvrail.transfer.streams import SideStream
from kvrail.worker.codecs import Codecs
from kvrail.worker.process import build_worker, certificate, run_worker, serve
from kvrail.worker.transports import Transports
from kvrail.worker.weights import forms_of


def run(settings: PrefillSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit code."""
    return run_worker(settings, "prefill", _main(settings))


async def _main(settings: PrefillSettings) -> None:
    tls = certificate(settings, "prefill")
    side = SideStream(torch.device(settings.device))
    observer = PageObserver(asyncio.get_running_loop(), side)
    codecs = Codecs(settings, allow_lossy=True)
    worker = build_worker(
        settings,
        codecs=codecs.parameters,
        side=side,
        listener=observer,
        detokenize=False,
        weights=forms_of(settings),
    )
    codecs.check_codebook(worker.loaded)
    transports = await Transports.to_send(settings, worker.loaded.device)
    first = transports.first_codec(codecs.usual)
    codecs.prepare(first, worker.loaded, worker.coding)
    worker.transfers.expect(first)
    servicer = PrefillServicer(worker, settings, codecs, transports, observer)
    try:
        await serve(worker, settings.port, lambda rpc: rpc.add_prefill(servicer), tls)
    finally:
        codecs.close()
        await transports.aclose()
