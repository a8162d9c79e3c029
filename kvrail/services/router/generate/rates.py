"""When a refused client should retry, from how fast requests end while others wait."""

import math
from collections.abc import Callable
from time import monotonic

FORGOTTEN_S = 10.0
"""Seconds of full work after which a measurement weighs a third."""
LEAST_S = 0.25
"""Seconds of full work before there is an estimate."""
SHORTEST_S, LONGEST_S = 1.0, 60.0
"""Bounds of Retry-After. The official openai client waits no longer than a minute."""


class CompletionRate:
    """Sequences that end per second of full work, and when there is room for a refused request.

    Only time in which requests wait counts: a server with little to do shows nothing of how fast it can be.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._since: float | None = None  # when requests began to wait
        self._seconds = self._ended = 0.0
        self._promised = 0.0  # when the last promised room will be free

    def waiting(self, anybody: bool) -> None:
        """Whether requests wait from now on."""
        self.ended(0)
        self._since = self._clock() if anybody else None

    @property
    def per_second(self) -> float | None:
        """Sequences that end per second; None if too little was measured."""
        self.ended(0)
        return self._ended / self._seconds if self._seconds >= LEAST_S and self._ended else None

    def retry_after(self, sequences: int) -> float:
        """Seconds after which a refused request of `sequences` sequences finds room.

        Each refused request is promised the time after the one before it, so that they do not all return at once.
        """
        rate = self.per_second
        if rate is None:
            return SHORTEST_S
        now = self._clock()
        self._promised = max(self._promised, now) + sequences / rate
        self._promised = min(self._promised, now + LONGEST_S)
        return min(max(SHORTEST_S, self._promised - now), LONGEST_S)

    def ended(self, sequences: int) -> None:
        """Count sequences that have ended."""
        if self._since is None:
            return
        now = self._clock()
        passed, self._since = now - self._since, now
        kept = math.exp(-passed / FORGOTTEN_S)
        self._seconds = self._seconds * kept + passed
        self._ended = self._ended * kept + sequences
