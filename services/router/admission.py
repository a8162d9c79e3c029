"""Who is let in: a bound on what runs at once, and none once the server is asked to stop."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvrail.errors import OverloadedError, WorkerUnavailableError

RETRY_AFTER_S = 1.0


class Admission:
    """Counts what runs: a request once for each of its sequences, /tokenize and /detokenize once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._active = 0
        self._cancels: set[Callable[[], None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def active(self) -> int:
        """Sequences that run now."""
        return self._active

    def check_open(self) -> None:
        """Raise WorkerUnavailableError once draining."""
        if self.draining:
            raise WorkerUnavailableError("the server is shutting down; retry")

    @contextmanager
    def admitted(self, sequences: int, cancel: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold room for `sequences`; `cancel` ends the request's work when the grace period is over.

        Raises OverloadedError where there is no room, WorkerUnavailableError once draining.
        """
        self.check_open()
        if self._active + sequences > self._limit:
            raise OverloadedError(
                f"{self._active} sequences of at most {self._limit} are running; {sequences} more do not fit; retry",
                retry_after=RETRY_AFTER_S,
            )
        self._active += sequences
        self._cancels.add(cancel)
        self._idle.clear()
        try:
            yield
        finally:
            self._cancels.discard(cancel)
            self._active -= sequences
            if self._active == 0:
                self._idle.set()

    async def drained(self) -> None:
        """Wait until nothing runs."""
        await self._idle.wait()

    def cancel_all(self) -> None:
        """End everything that runs; each client gets an error."""
        for cancel in list(self._cancels):
            cancel()
