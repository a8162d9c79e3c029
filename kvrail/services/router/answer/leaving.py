"""Clients that leave: what is done for one ends with it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def ended_first(work: "asyncio.Task[Any]", watch: "asyncio.Task[None]") -> bool:
    """Whether `work` ends before `watch`; it is cancelled where it does not."""
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        ended = work.done()
        work.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)
    return ended


async def while_here(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work` for a client whose body has been read. Raises ClientDisconnect where it leaves before the end."""
    doing = asyncio.create_task(work)
    if not await ended_first(doing, asyncio.create_task(disconnected(receive))):
        raise ClientDisconnect
    return doing.result()
