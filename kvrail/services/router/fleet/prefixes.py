"""The pages that a worker has cached: those it has reported, and those of requests that it was sent."""

from collections import Counter
from collections.abc import Sequence

from kvrail.errors import IncompatibleError
from kvrail.wire.v1 import common_pb2

PAGES_A_LOOK = 8192
"""Most digests in one report: 64 KiB; twice a second, that covers a million tokens."""


class WorkerPages:
    """One worker's pages, by digest. A container: `in` says whether a page is there, or is expected."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._expected: Counter[int] = Counter()  # by requests that run
        self._ended: set[int] = set()  # of requests that have ended since the last whole report was asked for
        self._ended_before: set[int] = set()
        self._stored_to = self._removed_to = 0

    def __contains__(self, digest: object) -> bool:
        return digest in self._held or digest in self._expected or digest in self._ended or digest in self._ended_before

    def __len__(self) -> int:
        return len(self._held)

    def question(self) -> common_pb2.StatusRequest:
        """The next request for a report."""
        self._ended_before |= self._ended
        self._ended = set()
        return common_pb2.StatusRequest(stored_to=self._stored_to, removed_to=self._removed_to, max_pages=PAGES_A_LOOK)

    def take(self, events: common_pb2.KVEvents, most: int) -> None:
        """Take in a report.

        Raises IncompatibleError, and forgets everything, if the worker reports more than `most` pages.
        """
        if events.snapshot:
            self._held.clear()
        self._held.difference_update(events.removed)
        self._held.update(events.stored)
        if (count := len(self._held)) > most:
            self.forget()
            raise IncompatibleError(f"the worker says that it holds {count} pages, and that it has {most}")
        self._stored_to, self._removed_to = events.stored_to, events.removed_to
        if events.complete:  # requests that had ended by then are in the report, or were not cached
            self._ended_before = set()

    def forget(self) -> None:
        """Forget everything: another process answers now."""
        self._held.clear()
        self._ended.clear()
        self._ended_before.clear()
        self._stored_to = self._removed_to = 0

    def expect(self, digests: Sequence[int]) -> None:
        """A request with these pages has been sent to the worker."""
        self._expected.update(digests)

    def settle(self, digests: Sequence[int]) -> None:
        """It has ended; the next complete report has the pages that were kept."""
        for digest in digests:
            if self._expected[digest] > 1:
                self._expected[digest] -= 1
            else:
                del self._expected[digest]
                self._ended.add(digest)
