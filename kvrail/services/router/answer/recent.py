"""The last requests that ended, for people who ask which were slow or failed, and where their time went."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from heapq import nlargest
from typing import Any

KEPT = 1000
"""Requests that are remembered."""
SHOWN = 20
RECENT_S = 240.0
"""A request that ended earlier is not shown as slow; a failed one stays until newer ones push it out."""
SERVED = frozenset({"stop", "length"})
FAILED = frozenset({"error", "unavailable", "deadline", "overloaded"})


@dataclass(frozen=True, slots=True)
class Ended:
    """One request: id, client, outcome, when it ended by the monotonic clock, and its times in seconds."""

    id: str
    client: str
    outcome: str
    at: float
    total_s: float
    first_token_s: float | None
    parts_s: Mapping[str, float]


class RecentRequests:
    """The last requests that were answered or that the server failed. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._served: deque[Ended] = deque(maxlen=KEPT)
        self._failed: deque[Ended] = deque(maxlen=SHOWN)

    def add(
        self,
        request_id: str,
        client: str,
        outcome: str,
        *,
        total_s: float,
        first_token_s: float | None,
        parts_s: Mapping[str, float],
    ) -> None:
        """Remember a request, unless its client made the error or left."""
        ended = Ended(request_id, client, outcome, self._clock(), total_s, first_token_s, parts_s)
        if outcome in SERVED:
            self._served.append(ended)
        elif outcome in FAILED:
            self._failed.append(ended)

    def notable(self) -> list[dict[str, Any]]:
        """The failed requests, the newest first, then the slowest of the last minutes; SHOWN in all.

        ago_s: seconds since it ended.
        """
        failed = list(reversed(self._failed))[: SHOWN // 2]
        now = self._clock()
        recent = (each for each in self._served if now - each.at <= RECENT_S)
        slow = nlargest(SHOWN - len(failed), recent, key=lambda each: each.total_s)
        return [asdict(each) | {"ago_s": now - each.at} for each in (*failed, *slow)]
