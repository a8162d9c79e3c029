"""The last minutes of a few of the router's metrics, sampled so that the page can draw their rates."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client import CollectorRegistry

from kvrail.telemetry.readings import Readings

REQUESTS, TOKENS = "kvrail_requests_total", "kvrail_generation_tokens_total"
SECONDS, PARTS = "kvrail_request_seconds", "kvrail_request_stage_seconds"
FIRST_TOKEN = "kvrail_time_to_first_token_seconds"
SERIES = (
    REQUESTS,
    TOKENS,
    f"{SECONDS}_count",
    f"{SECONDS}_sum",
    f"{PARTS}_sum",
    f"{FIRST_TOKEN}_count",
    f"{FIRST_TOKEN}_sum",
)

STEP_S = 2.0
"""Seconds between two samples."""
STEPS = 120
"""Steps that are kept: four minutes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters at one moment. answered: requests whose time was measured; parts: seconds by name."""

    at: float
    requests: float
    tokens: float
    answered: float
    seconds: float
    parts: dict[str, float]
    begun: float
    first_token_seconds: float

    @classmethod
    def of(cls, registry: CollectorRegistry, at: float) -> "Sample":
        """What `registry` says now."""
        now = Readings(registry, SERIES)
        return cls(
            at=at,
            requests=now.total(REQUESTS),
            tokens=now.total(TOKENS),
            answered=now.total(f"{SECONDS}_count"),
            seconds=now.total(f"{SECONDS}_sum"),
            parts=now.by(f"{PARTS}_sum", "stage"),
            begun=now.total(f"{FIRST_TOKEN}_count"),
            first_token_seconds=now.total(f"{FIRST_TOKEN}_sum"),
        )


class History:
    """Samples of one registry, a step apart. Belongs to one event loop."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._samples: deque[Sample] = deque([self.now()], maxlen=STEPS + 1)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(STEP_S)
            self.sample()

    def sample(self) -> None:
        """Keep what the registry says now."""
        self._samples.append(self.now())

    def now(self) -> Sample:
        """What the registry says now."""
        return Sample.of(self._registry, self._clock())

    @property
    def oldest(self) -> Sample:
        """The first sample that is kept."""
        return self._samples[0]

    def rates(self, counter: Callable[[Sample], float]) -> list[float]:
        """How fast `counter` rose in each step, per second, the oldest first."""
        return [
            round((counter(after) - counter(before)) / max(after.at - before.at, 1e-9), 3)
            for before, after in pairwise(self._samples)
        ]
