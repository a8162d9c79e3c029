"""A circuit breaker: after repeated failures a peer is skipped for a while, then probed with one request."""

from collections.abc import Callable
from time import monotonic

FAILURES = 3
"""Failures in a row after which a peer is skipped."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""First and longest pause; each failed probe doubles it."""


class Breaker:
    """The breaker of one peer. Closed at first; open after FAILURES; half open once the pause is over.

    Half open, one request probes the peer: success closes the breaker, failure starts a longer pause. Requests that run
    together when their peer is lost count as one failure. failures: in a row.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self.failures = 0
        self._failed_at = float("-inf")
        self._tries_again_at = 0.0
        self._trial: float | None = None  # when the probe began

    @property
    def closed(self) -> bool:
        """Whether the peer is trusted."""
        return self.failures < FAILURES

    @property
    def allows(self) -> bool:
        """Whether a request may go there now."""
        return self.closed or (self._trial is None and self._clock() >= self._tries_again_at)

    @property
    def pause_s(self) -> float:
        """Seconds until the next probe; 0 if a probe may start or runs."""
        return 0.0 if self.closed else max(0.0, self._tries_again_at - self._clock())

    def begin(self) -> float:
        """A request starts; returns the time to pass to the other methods."""
        now = self._clock()
        if not self.closed:
            self._trial = now
        return now

    def succeeded(self, began: float) -> None:
        """The request was answered. One that began before the last failure does not count."""
        if began >= self._failed_at:
            self.failures, self._trial = 0, None

    def failed(self, began: float) -> None:
        """The request failed."""
        self.left(began)
        if began < self._failed_at:
            return
        self.failures, self._failed_at = self.failures + 1, self._clock()
        if not self.closed:
            pause_s = min(FIRST_PAUSE_S * 2 ** (self.failures - FAILURES), LONGEST_PAUSE_S)
            self._tries_again_at = self._failed_at + pause_s

    def left(self, began: float) -> None:
        """The request ended without an answer."""
        if self._trial == began:
            self._trial = None
