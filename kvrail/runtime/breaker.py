"""A circuit breaker: after repeated failures a peer is skipped for a while, then probed with one request."""

from collections.abc import Callable
from time import monotonic

FAILURES = 3
"""Failures in a row after which a peer is skipped."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds for which it is skipped, at first and at most; each failed probe doubles them."""


class Breaker:
    """The state of one peer: closed at first, open after FAILURES, half open once the pause is over.

    Half open, one request is a probe: the breaker closes if it succeeds, and the pause starts again if it fails.
    Requests that run at the same time when their peer is lost count as one failure.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._failed_at = float("-inf")
        self._tries_again_at = 0.0
        self._trial: float | None = None  # when it began

    @property
    def closed(self) -> bool:
        """Whether the peer is trusted."""
        return self._count < FAILURES

    @property
    def allows(self) -> bool:
        """Whether a request may go there now."""
        return self.closed or (self._trial is None and self._clock() >= self._tries_again_at)

    @property
    def pause_s(self) -> float:
        """Seconds until the next trial; 0 where one may go or is under way."""
        return 0.0 if self.closed else max(0.0, self._tries_again_at - self._clock())

    @property
    def failures(self) -> int:
        """In a row."""
        return self._count

    def begin(self) -> float:
        """A request is sent; returns the time that the other methods take as `began`."""
        now = self._clock()
        if not self.closed:
            self._trial = now
        return now

    def succeeded(self, began: float) -> None:
        """It was answered. The answer does not count if the request began before the last failure."""
        if began >= self._failed_at:
            self._count, self._trial = 0, None

    def failed(self, began: float) -> None:
        """It was not."""
        self.left(began)
        if began < self._failed_at:
            return
        self._count, self._failed_at = self._count + 1, self._clock()
        if not self.closed:
            pause_s = min(FIRST_PAUSE_S * 2 ** (self._count - FAILURES), LONGEST_PAUSE_S)
            self._tries_again_at = self._failed_at + pause_s

    def left(self, began: float) -> None:
        """Its caller has left."""
        if self._trial == began:
            self._trial = None
