"""A circuit breaker: who fails what is asked of him, time and again, is asked no more for a while, then once to try."""

from collections.abc import Callable
from time import monotonic

FAILURES = 3
"""In a row, after which a peer is left alone."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""How long, at first and at most; each trial that fails doubles it."""


class Breaker:
    """What is known of one peer's answers. Closed at first; open after FAILURES; half open once the pause is over.

    Half open, one request tries: if it succeeds the breaker is closed, if it fails the pause begins anew. Requests that
    are under way together when their peer is lost count as one failure.
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
        """A request goes there; gives what the other methods are told of it."""
        now = self._clock()
        if not self.closed:
            self._trial = now
        return now

    def succeeded(self, began: float) -> None:
        """It was answered. One that began before the last failure tells nothing."""
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
        """Nobody waits for its answer any more."""
        if self._trial == began:
            self._trial = None
