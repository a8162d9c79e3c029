"""Waiting that a cancellation does not shorten: for memory and pages that are still read or written elsewhere."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def settled(*futures: asyncio.Future[Any]) -> None:
    """Wait until all are done, whatever they end with; a cancellation is raised only then.

    Whoever gives memory back must know that others have stopped to use it.
    """
    cancelled: asyncio.CancelledError | None = None
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    for future in futures:
        if not future.cancelled():
            future.exception()  # seen
    if cancelled is not None:
        raise cancelled


async def in_thread(executor: Executor, function: Callable[..., T], *arguments: object) -> T:
    """Call `function` in one of an executor's threads; a cancelled caller still waits for its end."""
    work = asyncio.get_running_loop().run_in_executor(executor, function, *arguments)
    await settled(work)
    return work.result()


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first of its tasks' errors as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
