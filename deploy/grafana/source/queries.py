"""PromQL in the few forms that the boards use.

`$model`, `$worker` and `$datasource` are the boards' variables, `$__rate_interval` and `$__range` are Grafana's.
Quantiles of nothing are NaN, which Grafana leaves out; ratios and means of nothing have no series.
"""

from dataclasses import dataclass

MODEL = 'model_name=~"$model"'
WORKER = 'instance=~"$worker"'


@dataclass(frozen=True, slots=True)
class Query:
    """One line of a panel. legend: how Grafana names its series."""

    expr: str
    legend: str


def series(name: str, *labels: str) -> str:
    """The series of a metric that have the board's model and these labels."""
    return f"{name}{{{', '.join((MODEL, *labels))}}}"


def total(name: str, *labels: str, by: str = "") -> str:
    """A gauge's sum."""
    return f"sum{_by(by)} ({series(name, *labels)})"


def rate(name: str, *labels: str, by: str = "") -> str:
    """How fast a counter rises, per second."""
    return f"sum{_by(by)} (rate({series(name, *labels)}[$__rate_interval]))"


def increase(name: str, *labels: str, by: str = "") -> str:
    """By how much a counter rose in the board's range."""
    return f"sum{_by(by)} (increase({series(name, *labels)}[$__range]))"


def share(part: str, whole: str) -> str:
    """A ratio, where there is a whole."""
    return f"{part}\n  / ({whole} > 0)"


def mean(histogram: str, *labels: str, by: str = "") -> str:
    """The mean of what a histogram observed."""
    return share(rate(f"{histogram}_sum", *labels, by=by), rate(f"{histogram}_count", *labels, by=by))


def quantile(q: float, histogram: str, *labels: str, by: str = "") -> str:
    """A quantile of what a histogram observed."""
    groups = f"le, {by}" if by else "le"
    return f"histogram_quantile({q:g}, {rate(f'{histogram}_bucket', *labels, by=groups)})"


def quantiles(histogram: str, *labels: str) -> tuple[Query, ...]:
    """Median, 90th and 99th percentile."""
    return tuple(
        Query(quantile(q, histogram, *labels), name) for q, name in ((0.5, "median"), (0.9, "p90"), (0.99, "p99"))
    )


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
