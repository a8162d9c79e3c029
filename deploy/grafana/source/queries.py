"""PromQL in the few forms that the boards use.

`$model`, `$worker` and `$datasource` are the boards' variables, `$__rate_interval` and `$__range` are Grafana's.
A worker has one name on every panel, its role and the address that the router has (`named`, WORKER_NAME).
Quantiles of nothing are NaN, which Grafana leaves out; ratios and means of nothing have no series.
"""

from collections.abc import Callable
from dataclasses import dataclass

MODEL = 'model_name=~"$model"'
WORKER = 'worker=~"$worker"'
WORKER_NAME = "{{role}} {{worker}}"
"""The legend of a worker's series."""
CALLS = 'handler!~"/|/docs|/health|/live|/load|/metrics.*|/openapi.json|/page/.*|/ping|/ready|/status.json|/version"'
"""HTTP requests of clients: neither probes nor scrapes, nor those of the status page."""
TOKEN_RATE = "count:tokens/s"
"""Grafana's unit of tokens a second."""


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


def split(form: Callable[..., str], name: str, *labels: str, by: str) -> Query:
    """A line for each value of the labels `by`. form: `rate`, `increase`, `total` or `mean`."""
    return Query(form(name, *labels, by=by), ": ".join(f"{{{{{label}}}}}" for label in by.split(", ")))


def label_replaced(expr: str, label: str, value: str) -> str:
    """Series with one more label."""
    return f'label_replace({expr}, "{label}", "{value}", "", "")'


def named(expr: str, *, chosen: bool = False) -> str:
    """Series of workers, by `instance`, with the labels `role` and `worker` as the router's series have them.

    A worker that no router has reported, as while it loads, is named by its `instance`. chosen: only workers that the
    board's variable names.
    """
    worker, instance = (f"{{{WORKER}}}", '{instance=~"$worker"}') if chosen else ("", "")
    known = f'label_replace(kvrail_worker_target{worker}, "instance", "$1", "target", "(.+)")'
    others = (
        f'label_replace(max by (instance, role) (kvrail_process_state{instance}), "worker", "$1", "instance", "(.+)")'
    )
    names = f"topk by (instance) (1, {known})\n    or on (instance) {others}"
    return f"({expr})\n  * on (instance) group_left (role, worker) (\n    {names})"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
