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
from kvrail.telemetry.vllm import CLUSTER_METRICS, VLLM_METRICS, Renamed


class _VllmNames(Collector):
    """Families of a registry under vLLM's names. sums: a router's sums over decode workers win over its own figures."""

    def __init__(self, registry: Registry, *, sums: bool) -> None:
        self._registry = registry
        self._rows = (*(CLUSTER_METRICS if sums else ()), *VLLM_METRICS)

    def collect(self) -> Iterator[Metric]:
        """The rows whose sources the registry has, the first of two with one name."""
        families = {each.name: each for each in self._registry.collectors if isinstance(each, Family)}
        shown: dict[str, Renamed] = {}
        for row in self._rows:
            if all(name in families for name in row.sources):
                shown.setdefault(row.name, row)
        for row in shown.values():
            sources = [families[name] for name in row.sources]
            kind = row.kind or sources[0].type
            yield as_metric(row.name, row.documentation, kind, sources[0].bounds, row.derive(*sources))


class Exposition:
    """Writes the metrics of one process. vllm: whether it shows anything under vLLM's names."""

    def __init__(self, registry: Registry, *, vllm: bool = True) -> None:
        self._ours, self._theirs, self._summed = registry, Registry(), Registry()
        if vllm:
            self._theirs.register(_VllmNames(registry, sums=False))
            self._summed.register(_VllmNames(registry, sums=True))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")

    def render(self, path: str = "/metrics", *, sums: bool = True) -> tuple[bytes, str]:
        """Body and content type of `/metrics` or `/metrics/vllm`: Prometheus's text format, version 0.0.4.

        sums: whether a router shows what its decode workers show under vLLM's names, summed up.
        """
        theirs = self._summed if sums else self._theirs
        return generate_latest(self._ours if path == "/metrics" else theirs), CONTENT_TYPE_PLAIN_0_0_4

    async def answer(self, path: str, *, sums: bool = True) -> tuple[bytes, str]:
        """What `render` returns, written in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: self.render(path, sums=sums))
