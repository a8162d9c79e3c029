"""How a worker's process runs: it serves gRPC, metrics and health until a signal, or ends because something broke."""

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any, cast

from kvrail.config.settings import WorkerSettings
from kvrail.engine.engine import Engine
from kvrail.engine.watch import broken
from kvrail.errors import ConfigError, KvrailError, reason_of
from kvrail.rpc.http_side import start_side_server
from kvrail.rpc.server import RpcServer, build_server, serve_until_signal
from kvrail.runtime import logs, loops
from kvrail.runtime.tuning import tune_process
from kvrail.security.tls import Role, Tls
from kvrail.telemetry.making import show_certificates
from kvrail.worker.process import Worker

logger = logging.getLogger("kvrail.worker")

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
FULL_DISK = "compiled kernels need room: free some, or name a folder elsewhere in TRITON_CACHE_DIR, HOME and TMPDIR"


class _BrokenError(KvrailError):
    """The engine has given up or hangs: the process must end, so that its supervisor starts another."""


def certificate(settings: WorkerSettings) -> Tls | None:
    """A worker's, if its settings name one. Raises ConfigError where the files are no good."""
    tls = Tls.of(settings, cast(Role, settings.table))
    if settings.metrics_tls and tls is None:
        raise ConfigError("--metrics-tls needs a certificate; give --tls-ca, --tls-cert and --tls-key")
    return tls


def run_worker(settings: WorkerSettings, main: Coroutine[Any, Any, None]) -> int:
    """Run a worker's main coroutine to its end; returns the process's exit code."""
    tune_process()
    logs.setup(settings.log_level, settings.log_format, settings.table)
    try:
        loops.run(main)
    except _BrokenError as error:
        logger.critical("the worker ends: %s", error)
        logging.shutdown()
        os._exit(1)  # the engine's thread may never return, and what holds the device with it
    except KvrailError as error:
        logger.error("%s", error)
        return 1
    except OSError as error:
        logger.error("%s; %s", reason_of(error), FULL_DISK if error.errno in NO_ROOM else "see the system's log")
        return 1
    return 0


async def _broken(engine: Engine, step_timeout_s: float) -> _BrokenError:
    return _BrokenError(await broken(engine, step_timeout_s))


async def serve(worker: Worker, port: int, add: Callable[[RpcServer], None], tls: Tls | None = None) -> None:
    """Serve gRPC, metrics and health until SIGTERM or SIGINT, then drain.

    add: puts the worker's services on the server. tls: its certificate. Raises where the engine has given up or hangs.
    """
    settings = worker.settings
    loops.keep_what_is_here()
    rpc = await build_server(tls=tls)
    add(rpc)
    bound = rpc.bind(settings.host, port)
    worker.engine.start()
    look_at_certificate = show_certificates(worker.registry, {} if tls is None else {"services": tls.end})
    stop_side = None

    async def render_metrics(path: str) -> tuple[bytes, str]:
        look_at_certificate()
        return await worker.render_metrics(path)

    try:
        await rpc.start()
        # The last thing before signals are taken: a supervisor that sees this worker healthy may send one at once.
        metrics_port, stop_side = await start_side_server(
            settings.host,
            settings.metrics_port,
            render_metrics,
            worker.healthy,
            tls if settings.metrics_tls else None,
        )
        worker.ports.metrics = metrics_port
        logger.info("listening on %s:%d, metrics on %d", settings.host, bound, metrics_port)
        async with loops.ends_if_hung(settings.step_timeout_s):
            await serve_until_signal(
                rpc,
                on_drain=worker.calls.drain,
                drained=worker.calls.drained,
                grace_period_s=settings.grace_period_s,
                broken=_broken(worker.engine, settings.step_timeout_s),
            )
    finally:
        await rpc.stop()
        if worker.engine.step_seconds < settings.step_timeout_s:  # a step that hangs is not waited for
            await asyncio.to_thread(worker.engine.stop)
        if stop_side is not None:
            await stop_side()
        if worker.tracing is not None:
            await asyncio.to_thread(worker.tracing.close)
