"""Admission: a bound on what runs or waits at once; nothing is admitted once the server is asked to stop."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvrail.errors import KvrailError, OverloadedError, RequestCancelledError, WorkerUnavailableError
from kvrail.runtime.queueing import fair
from kvrail.services.router.generate.rates import CompletionRate


class Admission:
    """Counts what runs or waits: a request once for each of its sequences, /tokenize and /detokenize once.

    active, by_client: sequences that are here now. share: part of the limit that one client leaves to others. rate:
    says when a refused client should retry.
    """

    def __init__(self, limit: int, share: float, rate: CompletionRate) -> None:
        self._limit = limit
        self._share = share
        self._rate = rate
        self.active = 0
        self.by_client: Counter[str] = Counter()
        self._cancels: set[Callable[[KvrailError], None]] = set()
        self.draining = False
        self.most = max((n for n in range(1, limit + 1) if fair(0, n, limit, share)), default=0)
        """Most sequences that a client can have here at once."""

    @contextmanager
    def admitted(
        self, sequences: int, client: str, cancel: Callable[[KvrailError], None] = lambda error: None
    ) -> Iterator[None]:
        """Hold room for a client's `sequences`; `cancel` ends the request's work when the grace period is over.

        Raises OverloadedError where there is no room, WorkerUnavailableError once draining.
        """
        if self.draining:
            raise WorkerUnavailableError("the server is shutting down; retry")
        held = self.by_client.get(client, 0)
        if not fair(held, sequences, self._limit - self.active, self._share):
            raise OverloadedError(
                f"{self.active} sequences of at most {self._limit} are here already, {held} of them this client's, and"
                f" {self._share:.0%} of the room are kept for others; {sequences} more do not fit; retry",
                retry_after=self._rate.retry_after(sequences),
            )
        self.active += sequences
        self.by_client[client] += sequences
        self._cancels.add(cancel)
        try:
            yield
        finally:
            self._cancels.discard(cancel)
            self.active -= sequences
            self.by_client[client] -= sequences
            if not self.by_client[client]:
                del self.by_client[client]

    def cancel_all(self) -> None:
        """Cancel everything that runs; each client gets an error."""
        for cancel in list(self._cancels):
            cancel(RequestCancelledError("the server ended the request because it shuts down; retry"))
