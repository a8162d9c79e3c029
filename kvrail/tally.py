"""Metrics of what happens once a token: counted by one thread without a lock, put in shape when they are read."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TallyCounter(Collector):
    """Shows what `prometheus_client.Counter` would."""

    def __init__(self, name: str, documentation: str, model_name: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._model = model_name
        self._count = 0
        registry.register(self)

    def inc(self, amount: int) -> None:
        """Count so many more; always from the same thread."""
        self._count += amount

    def collect(self) -> Iterator[Metric]:
        """The one family, as it is now."""
        family = CounterMetricFamily(self._name, self._documentation, labels=["model_name"])
        family.add_metric([self._model], self._count)
        yield family

    describe = collect


class TallyHistogram(Collector):
    """Shows what `prometheus_client.Histogram` would. An observation costs a search and two additions."""

    def __init__(
        self, name: str, documentation: str, model_name: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """buckets: upper bounds, rising; one without a bound is added."""
        self._name = name
        self._documentation = documentation
        self._model = model_name
        self._bounds = list(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` so many times; always from the same thread."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        """The one family, as it is now."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=["model_name"])
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric([self._model], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family

    describe = collect
