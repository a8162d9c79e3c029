"""A child that ends with its parent, however the parent ends.

`kvrail up` keeps the write end of a pipe and hands the read end to every process that it starts. The kernel closes the
write end when `kvrail up` ends, SIGKILL included; the reader then sees the end of the file.
"""

import os
import signal
import threading
import time

WATCH_VARIABLE = "_KVRAIL_WATCH_FD"
EXIT_MARGIN_S = 5.0


def end_with_parent(grace_period_s: float) -> None:
    """Stop this process when the pipe named by WATCH_VARIABLE closes; without that variable do nothing.

    It gets SIGTERM, and `grace_period_s` seconds and a margin later an exit that nothing can hold up.
    """
    descriptor = os.environ.pop(WATCH_VARIABLE, None)
    if descriptor is None:
        return
    read_end = int(descriptor)
    os.set_inheritable(read_end, False)
    threading.Thread(target=_watch, args=(read_end, grace_period_s), name="parent watch", daemon=True).start()


def _watch(read_end: int, grace_period_s: float) -> None:
    while os.read(read_end, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_period_s + EXIT_MARGIN_S)
    os._exit(1)
