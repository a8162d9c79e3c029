"""The event loop of a process: uvloop's where it is installed, which takes less of a core for each message.

And what keeps it from standing still.
"""

import asyncio
import faulthandler
import gc
import importlib
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

SWITCH_INTERVAL_S = 0.0001
"""How long a thread may keep the interpreter while another waits for it. With Python's 5 ms, the engine's thread waited
repeatedly for transfers' threads: both workers on one H200, 16 streams, under a sampling profiler, 2.2 requests/s
against 3.4 with 0.1 ms. In a router, the thread that writes metrics would hold up the loop."""


def share_interpreter() -> None:
    """Let threads take turns often; call once, before other threads start."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes an event loop; None stands for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a new loop, as asyncio.run does."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


def import_service(name: str) -> ModuleType:
    """The module of a service. Garbage is not looked for meanwhile, nor later among what the import has brought.

    To look for it takes a quarter of the time.
    """
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def keep_what_is_here() -> None:
    """Spare full collections of garbage all that was loaded before serving: requests would wait meanwhile."""
    gc.collect()
    gc.freeze()


@asynccontextmanager
async def ends_if_hung(limit_s: float) -> AsyncIterator[None]:
    """End the process, with each thread's traceback on stderr, where the loop stands still for `limit_s` seconds.

    The status is 1. A supervisor then starts another process; nothing in this one could recover.
    """

    async def turn() -> None:
        while True:
            faulthandler.dump_traceback_later(limit_s, exit=True)  # and not the one before
            await asyncio.sleep(limit_s / 10)

    turning = asyncio.create_task(turn())
    try:
        yield
    finally:
        turning.cancel()
        faulthandler.cancel_dump_traceback_later()
