"""The event loop of a process: uvloop's where it is installed, which takes less of a core for each message."""

import asyncio
from collections.abc import Callable, Coroutine
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
