"""What a process that moves large buffers beside a busy engine asks of the interpreter and of the C library."""

import ctypes
import sys

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter while another waits for it. With Python's 5 ms, the engine's thread waited
for transfers' threads again and again: both workers on one H200, 16 streams, under a sampling profiler, 2.2 requests/s
against 3.4 with 0.1 ms."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 1 << 30


def tune_process() -> None:
    """Call once, before other threads start.

    Freed buffers of up to a GiB stay in the process, so that a KV frame's buffer is not faulted in page by page each
    time; what this alone brings was not measured apart from docs/decisions/0003. Where the C library has no mallopt,
    its own defaults stay.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for parameter, value in ((_M_MMAP_THRESHOLD, _KEPT_BYTES), (_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_ARENA_MAX, 2)):
        mallopt(ctypes.c_int(parameter), ctypes.c_int(value))
