"""Counters, gauges and histograms that are cheap to count with: several are counted for each token.

A histogram finds its bucket by bisection and counts equal observations at once; prometheus_client's does neither. A
family is a Collector of prometheus_client's, which collects it and writes its text. Any thread may count.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from threading import Lock
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString


class Counter:
    """One series of a number that only rises."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self._lock = Lock()
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add to the count; raises ValueError where `amount` is negative."""
        if amount < 0:
            raise ValueError(f"a counter cannot count {amount}; it only rises")
        with self._lock:
            self.value += amount


class Gauge:
    """One series of a number that rises and falls."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self._lock = Lock()
        self.value = 0.0

    def set(self, value: float) -> None:
        """Replace the number."""
        self.value = float(value)

    def inc(self, amount: float = 1) -> None:
        """Add to the number."""
        with self._lock:
            self.value += amount

    def dec(self, amount: float = 1) -> None:
        """Take from the number."""
        self.inc(-amount)


class Histogram:
    """One series of observations: how many were within each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "_lock", "_sum", "count", "exemplars")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: rising; one without a bound is added."""
        self._lock = Lock()
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self.count = 0
        self.exemplars: dict[int, Exemplar] = {}
        """The last example of each bucket that has one, by the bucket's place."""

    def observe(self, value: float, times: int = 1, example: dict[str, str] | None = None) -> None:
        """Count `value`, `times` times. example: labels that lead to what was observed, such as a trace's id."""
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += times
            self._sum += value * times
            self.count += times
            if example:
                self.exemplars[place] = Exemplar(example, value)

    def read(self) -> tuple[list[int], float]:
        """Observations within each bound, the last being all, and the sum of all: as of one moment."""
        with self._lock:
            return list(accumulate(self._counts)), self._sum


S = TypeVar("S", bound=Counter | Gauge | Histogram)


class Family(Collector, Generic[S]):
    """The series of one name, one for each combination of labels.

    name: a counter's without `_total`. type, kind: as Prometheus calls it. bounds: a histogram's.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        registry: CollectorRegistry,
        *,
        kind: str,
        new: Callable[[], S],
        bounds: Sequence[float] = (),
    ) -> None:
        self.name = name
        self.documentation = documentation
        self.type = kind
        self.label_names = tuple(labels)
        self.bounds = (*map(floatToGoString, bounds), "+Inf") if kind == "histogram" else ()
        self._new = new
        self._lock = Lock()
        self._series: dict[tuple[str, ...], S] = {}
        registry.register(self)

    def labels(self, *values: object) -> S:
        """The series with these values of the labels, in their order; made at its first use."""
        key = tuple(map(str, values))
        found = self._series.get(key)
        return self._add(key) if found is None else found

    def _add(self, key: tuple[str, ...]) -> S:
        if len(key) != len(self.label_names):
            raise ValueError(f"{self.name} has the labels {self.label_names}, but the values given are {key}")
        with self._lock:
            if key not in self._series:
                self._series = {**self._series, key: self._new()}
            return self._series[key]

    def remove(self, *values: object) -> None:
        """Forget a series, if there is one."""
        key = tuple(map(str, values))
        with self._lock:
            if key in self._series:
                self._series = {known: series for known, series in self._series.items() if known != key}

    def series(self) -> Iterator[tuple[dict[str, str], S]]:
        """Each series there is now, with its labels by name."""
        for key, series in self._series.items():
            yield dict(zip(self.label_names, key, strict=True)), series

    def describe(self) -> Iterable[Metric]:
        """The family's name and type; a registry refuses a second one of that name."""
        return [Metric(self.name, self.documentation, self.type)]

    def collect(self) -> Iterable[Metric]:
        """The family as it is now."""
        return [as_metric(self.name, self.documentation, self.type, self.bounds, self.series())]


def as_metric(
    name: str,
    documentation: str,
    kind: str,
    bounds: Sequence[str],
    rows: Iterable[tuple[dict[str, str], Counter | Gauge | Histogram | float]],
) -> Metric:
    """Series as prometheus_client's exposition reads them. rows: labels, and a series or its value."""
    metric = Metric(name, documentation, kind)
    for labels, series in rows:
        if isinstance(series, Histogram):
            counts, total = series.read()
            for place, (bound, count) in enumerate(zip(bounds, counts, strict=True)):
                example = series.exemplars.get(place)
                metric.add_sample(f"{name}_bucket", labels | {"le": bound}, count, None, example)
            metric.add_sample(f"{name}_count", labels, counts[-1])
            metric.add_sample(f"{name}_sum", labels, total)
        else:
            value = series if isinstance(series, int | float) else series.value
            metric.add_sample(f"{name}_total" if kind == "counter" else name, labels, value)
    return metric


def counters(name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry) -> Family[Counter]:
    """A family of counters."""
    return Family(name, documentation, labels, registry, kind="counter", new=Counter)


def gauges(name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry) -> Family[Gauge]:
    """A family of gauges."""
    return Family(name, documentation, labels, registry, kind="gauge", new=Gauge)


def histograms(
    name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry, buckets: Sequence[float]
) -> Family[Histogram]:
    """A family of histograms. buckets: upper bounds, rising; one without a bound is added."""
    return Family(
        name, documentation, labels, registry, kind="histogram", new=lambda: Histogram(buckets), bounds=buckets
    )


class Registry(CollectorRegistry):
    """prometheus_client's registry, which also lists its collectors in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        """Add a collector; raises ValueError where its name is taken."""
        super().register(collector)
        self.collectors.append(collector)
