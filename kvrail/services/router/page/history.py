"""The last minutes of a few of the router's metrics, sampled so that the page can draw their rates."""

import asyncio
import math
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
GAPS = "kvrail_inter_token_seconds"
SERIES = (
    REQUESTS,
    TOKENS,
    f"{SECONDS}_count",
    f"{SECONDS}_sum",
    f"{PARTS}_sum",
    f"{FIRST_TOKEN}_bucket",
    f"{GAPS}_bucket",
)

STEP_S = 2.0
"""Seconds between two samples."""
STEPS = 120
"""Steps that are kept: four minutes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters at one moment.

    answered: requests whose time was measured. parts: seconds by name. first, gaps: observations within each bound, by
    the bound as Prometheus writes it.
    """

    at: float
    requests: float
    tokens: float
    answered: float
    seconds: float
    parts: dict[str, float]
    first: dict[str, float]
    gaps: dict[str, float]

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
            first=now.by(f"{FIRST_TOKEN}_bucket", "le"),
            gaps=now.by(f"{GAPS}_bucket", "le"),
        )


def quantile(q: float, before: dict[str, float], after: dict[str, float]) -> float | None:
    """A quantile of what a histogram observed between two samples, interpolated as Prometheus does it.

    None where it observed nothing. Beyond the last bound it is that bound.
    """
    rank = q * (after["+Inf"] - before["+Inf"]) if after else 0.0
    if rank <= 0:
        return None
    low, below = 0.0, 0.0
    for bound, count in after.items():
        within, high = count - before[bound], float(bound)
        if within >= rank:
            return low if high == math.inf else low + (high - low) * (rank - below) / (within - below)
        low, below = high, within
    return low


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
