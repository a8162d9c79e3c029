"""Threads that work beside requests, and the end of a process that must not meet them.

A daemon thread that comes back to Python after the interpreter has begun to go is ended by force. Where C++ lies on
its stack (a compiler of kernels, torch, gRPC) that unwinding is not survived: the process ends with SIGABRT and
"exception not rethrown". So these threads are asked to stop, and waited for, except one in a compiler, which cannot
be asked; and the process ends without the interpreter's own end.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

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


def end(status: int) -> NoReturn:
    """Wait for these threads, once nothing but the process's end is left to do, and end it with `status`.

    Executors' work and what was registered for the process's end are done, unless a thread still runs after WAIT_S.
    Nothing is freed: a worker would take 3 s of a core to free one by one the objects of torch and transformers.
    """
    _stop.set()
    deadline = time.monotonic() + WAIT_S
    for thread in _threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = [thread.name for thread in _threads if thread.is_alive()]
    if names:
        log.debug("ending without waiting for: %s", ", ".join(names))
        logging.shutdown()
    else:
        threading._shutdown()  # type: ignore[attr-defined]  # these two as the interpreter calls them
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
