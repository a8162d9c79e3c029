"""Settings of the interpreter and its libraries for a process that moves large buffers beside a busy engine.

On a CPU, only the engine's thread is to have a team. OpenMP gives one to every thread in which torch has computed, and
keeps it as long as that thread lives; once all teams together have more threads than there are cores, none of them
spins any more, and each of the 200 products and copies of a step waits for its threads to be woken. So the model is
loaded in a thread that ends, and helpers compute alone.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from kvrail.runtime.loops import share_interpreter

T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 1 << 30


def tune_process() -> None:
    """Call once, before other threads start.

    Freed buffers of up to a GiB stay in the process, so that a KV frame's buffer is not faulted in page by page each
    time; what this alone brings was not measured apart from docs/decisions/0003. Where the C library has no mallopt,
    its own defaults stay.
    """
    share_interpreter()
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for parameter, value in ((_M_MMAP_THRESHOLD, _KEPT_BYTES), (_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_ARENA_MAX, 2)):
        mallopt(ctypes.c_int(parameter), ctypes.c_int(value))


def in_passing_thread(function: Callable[[], T]) -> T:
    """Call `function` in a thread that ends with it; returns what it returns, raises what it raises."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001  # raised again below
            outcome.set_exception(error)

    thread = Thread(target=run, name="passing", daemon=True)
    thread.start()
    try:
        return outcome.result()
    finally:
        if outcome.done():
            thread.join()


def compute_with(threads: int) -> None:
    """Set the number of torch's threads for the calling thread; other threads keep theirs.

    Helpers of an engine take 1. All cores go to one thread, the engine's.
    """
    import torch  # not above: a worker tunes its process before this import, which takes seconds

    torch.set_num_threads(threads)
    torch.get_num_threads()  # a thread's first question settles its number; later ones may set another for theirs
