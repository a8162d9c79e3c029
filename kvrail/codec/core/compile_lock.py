"""One process at a time compiles the kernels of one cache folder, and all say what they wait for.

The workers of one machine start together and need the same kernels. The second waits until the first has kept its
kernel, and loads that. The lock is a file's (flock), so it ends with the process that holds it.
"""

import fcntl
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from numba.core import event as events
from numba.core.compiler_lock import global_compiler_lock

logger = logging.getLogger("kvrail.codecs")

NAME = "compiling.lock"
LOG_S = 3.0
"""Seconds between two log lines of a compilation or a wait; shorter ones are not logged."""
MOST_WAIT_S = 300.0
"""Longest wait for another process, which may be stopped; afterwards this one compiles for itself."""
_POLL_S = 0.05


@contextmanager
def held(path: Path, kernel: str) -> Iterator[None]:
    """Hold the lock file `path` during the block, which loads or compiles `kernel`.

    Kernels that the block compiles on the way are under the same lock. Where the folder takes no lock, the block runs
    without.
    """
    if global_compiler_lock.is_locked():  # type: ignore[no-untyped-call]
        yield
        return
    with global_compiler_lock:  # before the file's: threads of this process take them in one order
        file = _opened(path)
        if file is None:
            yield
            return
        with file:
            _wait_for(file, kernel)
            yield


def _opened(path: Path) -> IO[bytes] | None:
    try:
        return path.open("wb")
    except OSError:
        return None


def _wait_for(file: IO[bytes], kernel: str) -> None:
    begin = logged = time.monotonic()
    while not _locked(file):
        now = time.monotonic()
        if now - begin > MOST_WAIT_S:
            logger.warning("kernel %s: another process still compiles after %.0f s; not waiting", kernel, now - begin)
            return
        if now - logged > LOG_S:
            logged = now
            logger.info("kernel %s: waiting for another process that compiles, %.0f s so far", kernel, now - begin)
        time.sleep(_POLL_S)


def _locked(file: IO[bytes]) -> bool:
    """Whether the wait is over: this process has the lock now, or the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class _Compilations(events.Listener):
    """Logs what numba compiles and for how long already. One thread at a time compiles: numba sees to that."""

    def __init__(self) -> None:
        self._depth = 0
        self._done = threading.Event()

    def on_start(self, event: events.Event) -> None:
        """Log from now on, unless this kernel is part of one that is logged."""
        self._depth += 1
        if self._depth == 1:
            self._done = threading.Event()
            name = event.data["dispatcher"].py_func.__name__
            threading.Thread(target=_log, args=(name, self._done), name="compiling", daemon=True).start()

    def on_end(self, event: events.Event) -> None:
        """Log no more once the outermost kernel is compiled."""
        self._depth -= 1
        if self._depth == 0:
            self._done.set()


def _log(kernel: str, done: threading.Event) -> None:
    begin = time.monotonic()
    while not done.wait(LOG_S):
        logger.info("compiling kernel %s, %.0f s so far", kernel, time.monotonic() - begin)


events.register("numba:compile", _Compilations())  # type: ignore[no-untyped-call]
