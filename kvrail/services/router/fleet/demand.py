"""How fast prompts come to a worker."""

import math

SECONDS = 5.0
"""Time constant of the mean: longer than a burst, shorter than a change of the load that must be followed."""
IDLE_S = 2 * SECONDS
"""Without prompts for this time, the mean begins again."""
LEAST_S = 1.0
"""Prompts that have come within a second are those of a second."""


class TokenRate:
    """Tokens a second, as a running mean over what has passed since prompts began to come, of SECONDS at most.

    Times are of any one clock, in seconds.
    """

    def __init__(self) -> None:
        self._tokens, self._since, self._began = 0.0, -math.inf, -math.inf

    def at(self, now: float) -> float:
        """The rate now."""
        return self._left(now) / (SECONDS * -math.expm1(-max(LEAST_S, now - self._began) / SECONDS))

    def add(self, tokens: int, now: float) -> None:
        """These tokens have come."""
        if now - self._since > IDLE_S:
            self._tokens, self._began = 0.0, now
        self._tokens, self._since = self._left(now) + tokens, now

    def _left(self, now: float) -> float:
        return self._tokens * math.exp((self._since - now) / SECONDS)
