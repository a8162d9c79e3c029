"""Host memory that is used again: fresh memory costs a page fault every 4 KiB, more than encoding does."""

import weakref
from collections import defaultdict, deque

import numpy as np

from kvrail.codec.core.arrays import Bytes

_SMALLEST = 1 << 16
_KEPT = 4
"""Idle buffers of a size that are kept; more are freed."""
_CACHE_LINE = 64

_idle: defaultdict[int, deque[Bytes]] = defaultdict(lambda: deque(maxlen=_KEPT))


def take(size: int) -> Bytes:
    """At least `size` bytes at the start of a cache line, with anything in them.

    They are used again once the array returned is gone. A memoryview of it, or a slice of that, keeps it alive; a numpy
    slice of it does not, for numpy remembers the memory's first owner alone. Any thread may call this.
    """
    capacity = max(_SMALLEST, 1 << (size - 1).bit_length())
    idle = _idle[capacity]
    try:
        memory = idle.pop()
    except IndexError:
        memory = np.empty(capacity + _CACHE_LINE, dtype=np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    lent = memory[start : start + capacity]
    # The finaliser may run at any moment in any thread, so it must not take a lock; deque.append needs none.
    weakref.finalize(lent, idle.append, memory).atexit = False
    return lent
