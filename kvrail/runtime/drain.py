"""Calls that a worker serves at the moment, and the end of admission when it drains."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvrail.errors import WorkerUnavailableError


class ActiveCalls:
    """Counts running calls; once draining, refuses new ones. Belongs to one asyncio loop."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def drain(self) -> None:
        """Admit nothing more."""
        self.draining = True

    async def drained(self) -> None:
        """Wait until no call runs."""
        await self._idle.wait()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Run one call; raises WorkerUnavailableError while draining."""
        if self.draining:
            raise WorkerUnavailableError("this worker is shutting down; ask another one")
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()
