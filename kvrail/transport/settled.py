"""Waiting that a cancellation does not shorten."""

import asyncio
from typing import Any


async def settled(*futures: asyncio.Future[Any]) -> None:
    """Wait until all are done, whatever they end with; a cancellation is raised only then.

    For memory that somebody else still reads or writes: whoever gives it back must know that they have stopped.
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
