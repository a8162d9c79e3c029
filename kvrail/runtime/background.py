"""Threads that work beside requests, and the end of a process that must not meet them.

A daemon thread that comes back to Python after the interpreter has begun to go is ended by force. Where C++ lies on
its stack (a compiler of kernels, torch, gRPC) that unwinding is not survived: the process ends with SIGABRT and
"exception not rethrown". So these threads are asked to stop, and waited for; and where one is in a compiler, which
cannot be asked, the process ends without the interpreter's own end.
"""

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

log = logging.getLogger("kvrail.background")

WAIT_S = 1.0
"""Seconds that threads get to end after everything else has; a compiler may take minutes."""

_stop = threading.Event()
_threads: list[threading.Thread] = []


def stopping() -> bool:
    """Whether the process ends: work that can be left out is."""
    return _stop.is_set()


def start(name: str, work: Callable[[], None]) -> None:
    """Do `work` in a thread; it looks at `stopping` between its parts."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    _threads.append(thread)
    thread.start()


def end(status: int) -> int:
    """Wait for these threads, once nothing but the process's end is left to do; returns `status`.

    Where one still runs after WAIT_S, this does not return: logs and streams are flushed, and the process ends with
    `status` at once.
    """
    _stop.set()
    gc.unfreeze()
    gc.collect()  # gRPC's poller ends with the last server and channel
    deadline = time.monotonic() + WAIT_S
    for thread in _threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = [thread.name for thread in _threads if thread.is_alive()]
    if not names:
        return status
    log.debug("ending without waiting for: %s", ", ".join(names))
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
