"""How a worker's process begins and ends: its metrics port opens first, then it imports and runs its service."""

import errno
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any, cast

from kvrail.config.settings import WorkerSettings
from kvrail.errors import ConfigError, KvrailError, reason_of
from kvrail.rpc.http_side import side_server
from kvrail.runtime import logs, loops
from kvrail.runtime.tuning import tune_process
from kvrail.security.tls import Role, Tls
from kvrail.worker.monitor import Monitor

logger = logging.getLogger("kvrail.worker")

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
FULL_DISK = "compiled kernels need room: free some, or name a folder elsewhere in TRITON_CACHE_DIR, HOME and TMPDIR"


class BrokenError(KvrailError):
    """The engine has given up or hangs: the process must end, so that its supervisor starts another."""


def run_worker(settings: WorkerSettings, service: Callable[[Monitor, Tls | None], Coroutine[Any, Any, None]]) -> int:
    """Run a worker to its end, its metrics port open all the time; returns the process's exit code.

    service: imports and runs it.
    """
    tune_process()
    logs.setup(settings.log_level, settings.log_format, settings.table)
    try:
        tls = certificate(settings)
        monitor = Monitor(settings, tls)
        with side_server(
            settings.host,
            settings.metrics_port,
            monitor.render,
            monitor.obstacle,
            tls if settings.metrics_tls else None,
        ) as monitor.port:
            loops.run(service(monitor, tls))
    except BrokenError as error:
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


def certificate(settings: WorkerSettings) -> Tls | None:
    """A worker's, if its settings name one. Raises ConfigError where the files are no good."""
    tls = Tls.of(settings, cast(Role, settings.table))
    if settings.metrics_tls and tls is None:
        raise ConfigError("--metrics-tls needs a certificate; give --tls-ca, --tls-cert and --tls-key")
    return tls
