"""The event loop of a process: uvloop's where it is installed, which takes less of a core for each message.

And what keeps it from standing still.
"""

import asyncio
import faulthandler
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


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


def keep_what_is_here() -> None:
    """Spare full collections of garbage all that was loaded before serving: requests would wait while they look at it.

    `background.end` undoes it.
    """
    gc.collect()
    gc.freeze()


@asynccontextmanager
async def ends_if_hung(limit_s: float) -> AsyncIterator[None]:
    """End the process with status 1, and each thread's traceback on stderr, where the loop stands still for so long.

    Whoever watches the process then starts another; nothing in this one could do it.
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
