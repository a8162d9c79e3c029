"""How fast prompts come to a worker."""

import math
from collections.abc import Callable
from time import monotonic

SECONDS = 5.0
"""Time constant of the mean: longer than a burst, shorter than a change of the load that must be followed."""
RECENT_S = 1.0
"""A mean over this time shows early where the load goes. Prompts that have come within it are those of all of it."""
IDLE_S = 2 * SECONDS
"""Without prompts for this time, the mean begins again."""
PAUSE_S = 0.5
"""Longest time that a pause of the load counts: it says little of what comes after it. Statuses are as far apart."""


class DemandClock:
    """Time as the rates of a fleet's workers count it, in seconds: without most of each pause of the load.

    The load pauses when only half of the requests are left that were there when the last one came. A pause of more than
    IDLE_S counts whole. read_s: a monotonic clock.
    """

    def __init__(self, read_s: Callable[[], float] = monotonic) -> None:
        self._read_s = read_s
        self._requests = self._most = 0
        self._paused, self._left_out = -math.inf, 0.0

    def now(self) -> float:
        """The time now."""
        now = self._read_s()
        return now - self._left_out - self._beyond(now)

    def begin(self) -> None:
        """A request has come to one of the workers."""
        self.prompt()
        self._requests += 1
        self._most = self._requests

    def end(self) -> None:
        """It has ended."""
        if not self._pauses:
            self._paused = self._read_s()
        self._requests -= 1

    def prompt(self, *, whole: bool = False) -> float:
        """A worker is to compute a prompt; returns the time. whole: it may have come in the pause, so that counts."""
        now = self._read_s()
        self._left_out += 0.0 if whole else self._beyond(now)
        self._paused = now
        return now - self._left_out

    @property
    def _pauses(self) -> bool:
        return 2 * self._requests <= self._most

    def _beyond(self, now: float) -> float:
        """How much of the pause does not count."""
        pause = now - self._paused
        return max(0.0, pause - PAUSE_S) if self._pauses and pause <= IDLE_S else 0.0


class TokenRate:
    """Tokens a second, as running means over what has passed since prompts began to come, of SECONDS or RECENT_S."""

    def __init__(self, clock: DemandClock) -> None:
        self._clock = clock
        self._tokens = dict.fromkeys((SECONDS, RECENT_S), 0.0)
        self._since = self._began = -math.inf

    def read(self, over_s: float = SECONDS) -> float:
        """The rate now."""
        now = self._clock.now()
        left = self._tokens[over_s] * math.exp((self._since - now) / over_s)
        return left / (over_s * -math.expm1(-max(RECENT_S, now - self._began) / over_s))

    def add(self, tokens: int, *, whole: bool = False) -> None:
        """These tokens have come. whole: see `DemandClock.prompt`."""
        now = self._clock.prompt(whole=whole)
        if now - self._since > IDLE_S:
            self._tokens, self._began = dict.fromkeys(self._tokens, 0.0), now
        for over_s, before in self._tokens.items():
            self._tokens[over_s] = before * math.exp((self._since - now) / over_s) + tokens
        self._since = now
