"""How fast prompts come to a worker."""

import math

SECONDS = 5.0
"""Time constant of the mean: longer than a burst, shorter than a change of the load that must be followed."""


class TokenRate:
    """Tokens a second, as a running mean. Times are of any one clock, in seconds."""

    def __init__(self) -> None:
        self._rate, self._since = 0.0, 0.0

    def at(self, now: float) -> float:
        """The rate now."""
        return self._rate * math.exp((self._since - now) / SECONDS)

    def add(self, tokens: int, now: float) -> None:
        """These tokens have come."""
        self._rate, self._since = self.at(now) + tokens / SECONDS, now
