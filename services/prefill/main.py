"""Runs a prefill worker."""

import asyncio

from codec.registry import names
from kvrail.config import PrefillSettings
from kvrail.worker import build_worker, run_worker, serve
from services.prefill.servicer import PageObserver, PrefillServicer


def run(settings: PrefillSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit code."""
    return run_worker(settings, "prefill", _main(settings))


async def _main(settings: PrefillSettings) -> None:
    observer = PageObserver(asyncio.get_running_loop())
    worker = build_worker(settings, codecs=names(), on_layer=observer.layer_written, detokenize=False)
    observer.attach(worker)
    servicer = PrefillServicer(worker, observer)
    await serve(worker, settings.port, lambda rpc: rpc.add_prefill(servicer))
