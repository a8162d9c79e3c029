"""Runs a worker. Free of torch: its metrics port is open before that is imported."""

import logging

from kvrail.config.settings import DecodeSettings, PrefillSettings
from kvrail.runtime import loops
from kvrail.security.tls import Tls
from kvrail.worker.monitor import Monitor
from kvrail.worker.starting import run_worker

logger = logging.getLogger("kvrail.worker")


def run(settings: PrefillSettings | DecodeSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit code."""

    async def service(monitor: Monitor, tls: Tls | None) -> None:
        logger.info("loading PyTorch and transformers; metrics on %d", monitor.port)
        serving = loops.import_service("kvrail.services.worker.serving")
        await serving.run(settings, monitor, tls)

    return run_worker(settings, service)
