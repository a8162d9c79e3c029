"""What one end of transfers knows of the others, which come and go."""

from collections.abc import Callable
from time import monotonic
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
IDLE_S = 3600.0


class Recent(dict[K, V]):
    """Values by key, the one that was set last at the end. Set a value again for each use.

    Setting one forgets what was not set for IDLE_S seconds, and all but the last `most`. forgotten: called with each.
    """

    def __init__(self, forgotten: Callable[[K, V], object] = lambda key, value: None, most: float = 256) -> None:
        self._forgotten, self._most = forgotten, most
        self._set_at: dict[K, float] = {}

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)  # to the end
        super().__setitem__(key, value)
        now = self._set_at[key] = monotonic()
        for oldest in list(self):
            if len(self) <= self._most and now - self._set_at[oldest] <= IDLE_S:
                break
            del self._set_at[oldest]
            self._forgotten(oldest, self.pop(oldest))
