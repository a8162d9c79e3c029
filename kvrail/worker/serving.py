"""How a worker serves: gRPC until a signal, or until something breaks."""

import asyncio
import logging
from collections.abc import Callable

from kvrail.engine.engine import Engine
from kvrail.engine.watch import broken
from kvrail.rpc.server import RpcServer, build_server, serve_until_signal
from kvrail.runtime import loops
from kvrail.runtime.limits import allow_files
from kvrail.security.tls import Tls
from kvrail.worker.process import Worker
from kvrail.worker.starting import BrokenError

logger = logging.getLogger("kvrail.worker")

FILES = 8192
"""Open files that a worker may need: a transfer by TCP has up to four connections."""


async def _broken(engine: Engine, step_timeout_s: float) -> BrokenError:
    return BrokenError(await broken(engine, step_timeout_s))


async def serve(worker: Worker, port: int, add: Callable[[RpcServer], None], tls: Tls | None = None) -> None:
    """Serve gRPC until SIGTERM or SIGINT, then drain.

    add: puts the worker's services on the server. tls: its certificate. Raises where the engine has given up or hangs.
    """
    settings = worker.settings
    allow_files(FILES)
    loops.keep_what_is_here()
    rpc = await build_server(tls=tls)
    add(rpc)
    bound = rpc.bind(settings.host, port)
    worker.engine.start()
    try:
        await rpc.start()
        logger.info("listening on %s:%d, metrics on %d", settings.host, bound, worker.monitor.port)
        async with loops.ends_if_hung(settings.step_timeout_s):
            await serve_until_signal(
                rpc,
                # A supervisor that sees this worker healthy may send a signal at once.
                on_ready=lambda: worker.monitor.serves(worker),
                on_drain=worker.calls.drain,
                drained=worker.calls.drained,
                grace_period_s=settings.grace_period_s,
                broken=_broken(worker.engine, settings.step_timeout_s),
            )
    finally:
        await rpc.stop()
        if worker.engine.step_seconds < settings.step_timeout_s:  # a step that hangs is not waited for
            await asyncio.to_thread(worker.engine.stop)
        if worker.tracing is not None:
            await asyncio.to_thread(worker.tracing.close)
