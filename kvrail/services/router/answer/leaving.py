"""Work that ends early: its client leaves, or it is cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from kvrail.errors import KvrailError

T = TypeVar("T")


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def ended_first(work: "asyncio.Task[Any]", watch: "asyncio.Task[None]") -> bool:
    """Whether `work` ends before `watch`; if not, it is cancelled."""
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        ended = work.done()
        work.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)
    return ended


async def while_here(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work` for a client whose body has been read. Raises ClientDisconnect if it leaves before the end."""
    doing = asyncio.create_task(work)
    if not await ended_first(doing, asyncio.create_task(disconnected(receive))):
        raise ClientDisconnect
    return doing.result()


class Cancellation:
    """Ends the work for a request: with an error that its client gets, or as if the client had left.

    task: the one that works. watch: the one whose end means that the client has gone.
    """

    def __init__(self, task: "asyncio.Task[None]", watch: "asyncio.Task[None]") -> None:
        self._task, self._watch = task, watch
        self._error: KvrailError | None = None

    def cancel(self, error: KvrailError) -> None:
        """Cancel the task; once."""
        if self._error is None:
            self._error = error
            self._task.cancel()

    def leave(self) -> None:
        """The client has fallen too far behind: it gets nothing more."""
        self._watch.cancel()

    def taken(self) -> KvrailError | None:
        """The error for the client, for a task that has caught its cancellation and goes on; None if none was given."""
        if self._error is not None:
            self._task.uncancel()
        return self._error
