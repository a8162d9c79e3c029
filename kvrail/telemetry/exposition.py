"""The metrics' two views, as text.

Our own names all begin with `kvrail_`. The same measurements also have the names that dashboards and autoscalers for
LLM servers already use (kvrail/telemetry/vllm.py). Those contain colons, which Prometheus keeps for recording rules, so
they have a path of their own, `/metrics/vllm`. Nothing is counted twice: the second view is computed from the first.

A thread writes the text, so that a scrape does not hold up the loop that serves (docs/decisions/0002).
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvrail.telemetry.series import Family, Registry, as_metric
from kvrail.telemetry.vllm import VLLM_METRICS, Renamed


class _VllmNames(Collector):
    """Families of a registry under vLLM's names."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """The rows whose sources the registry has, the first of two with one name."""
        families = {each.name: each for each in self._registry.collectors if isinstance(each, Family)}
        shown: dict[str, Renamed] = {}
        for row in VLLM_METRICS:
            if all(name in families for name in row.sources):
                shown.setdefault(row.name, row)
        for row in shown.values():
            sources = [families[name] for name in row.sources]
            kind = row.kind or sources[0].type
            yield as_metric(row.name, row.documentation, kind, sources[0].bounds, row.derive(*sources))


class Exposition:
    """Writes the metrics of one process. vllm: whether it shows anything under vLLM's names."""

    def __init__(self, registry: Registry, *, vllm: bool = True) -> None:
        theirs = Registry()
        if vllm:
            theirs.register(_VllmNames(registry))
        self._views = {"/metrics": registry, "/metrics/vllm": theirs}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")

    def render(self, path: str = "/metrics") -> tuple[bytes, str]:
        """Body and content type of `/metrics` or `/metrics/vllm`: Prometheus's text format, version 0.0.4."""
        return generate_latest(self._views[path]), CONTENT_TYPE_PLAIN_0_0_4

    async def answer(self, path: str) -> tuple[bytes, str]:
        """What `render` returns, written in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.render, path)
