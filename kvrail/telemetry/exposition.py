"""The metrics' two views, as text.

Our own names all begin with `kvrail_`. The same measurements also have the names that dashboards and autoscalers for
LLM servers already use (kvrail/telemetry/vllm.py); those contain colons, which Prometheus keeps for recording rules,
hence a path of their own, `/metrics/vllm`, unless the operator wants them on `/metrics`. Nothing is counted twice: the
second view is computed from the first.

No token leaves a router while it writes its metrics, so that only lines are written anew whose value has moved.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvrail.telemetry.series import Family, Histogram, Registry
from kvrail.telemetry.vllm import CLUSTER_METRICS, VLLM_METRICS, Renamed, Row, Valued

Names = Literal["kvrail", "vllm", "both"]
"""Whose names `/metrics` has."""


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _start(name: str, labels: Mapping[str, str]) -> str:
    """A series as its lines begin."""
    shown = ",".join(f'{key}="{_escaped(value, quotes=True)}"' for key, value in sorted(labels.items()))
    return f"{name}{{{shown}}} " if shown else f"{name} "


def _number(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


def _head(name: str, documentation: str, kind: str) -> str:
    shown = f"{name}_total" if kind == "counter" else name
    return f"# HELP {shown} {_escaped(documentation)}\n# TYPE {shown} {kind}\n"


class _Lines(Protocol):
    """The lines of one series. text: as they were when `moved` was last asked."""

    text: str

    def moved(self) -> bool:
        """Whether they have changed."""


class _Value:
    """The line of a counter or a gauge."""

    __slots__ = ("_last", "_source", "_start", "text")

    def __init__(self, start: str, source: Valued) -> None:
        self._start, self._source = start, source
        self._last: float | None = None
        self.text = ""

    def moved(self) -> bool:
        """See _Lines."""
        value = self._source.value
        if value == self._last:
            return False
        self._last = value
        self.text = f"{self._start}{_number(value)}\n"
        return True


class _Buckets:
    """The lines of a histogram."""

    __slots__ = ("_last", "_source", "_starts", "_sum", "text")

    def __init__(self, name: str, labels: Mapping[str, str], bounds: Sequence[str], source: Histogram) -> None:
        self._starts = [_start(f"{name}_bucket", {**labels, "le": bound}) for bound in bounds]
        self._starts.append(_start(f"{name}_count", labels))
        self._sum = _start(f"{name}_sum", labels)
        self._source = source
        self._last = -1
        self.text = ""

    def moved(self) -> bool:
        """See _Lines."""
        if self._source.count == self._last:
            return False
        counts, total = self._source.read()
        self._last = counts[-1]
        counts.append(counts[-1])
        lines = [f"{start}{_number(count)}\n" for start, count in zip(self._starts, counts, strict=True)]
        self.text = f"{''.join(lines)}{self._sum}{_number(total)}\n"
        return True


class _Block:
    """The text of one name, from one family or several."""

    def __init__(
        self,
        name: str,
        documentation: str,
        kind: str,
        families: Sequence[Family[Any]],
        rows: Callable[[], Iterable[Row]],
    ) -> None:
        self._name, self._kind, self._families, self._rows = name, kind, families, rows
        self._head = _head(name, documentation, kind)
        self._versions: list[int] = []
        self._lines: list[_Lines] = []
        self._text = ""

    def text(self) -> str:
        """All lines as they are now."""
        versions = [family.version for family in self._families]
        anew = versions != self._versions
        if anew:
            self._versions, self._lines = versions, [self._of(*row) for row in self._rows()]
        moved = [lines.moved() for lines in self._lines]  # each has to be asked
        if anew or any(moved):
            self._text = self._head + "".join([lines.text for lines in self._lines])
        return self._text

    def _of(self, labels: Mapping[str, str], source: Histogram | Valued) -> _Lines:
        if isinstance(source, Histogram):
            return _Buckets(self._name, labels, self._families[0].bounds, source)
        return _Value(_start(f"{self._name}_total" if self._kind == "counter" else self._name, labels), source)


class _Collected:
    """The text of a collector of prometheus_client's own, without the `_created` series that double others."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def text(self) -> str:
        """All lines as they are now."""
        parts = []
        for family in self._collector.collect():
            parts.append(_head(family.name, family.documentation, family.type))
            kept = [sample for sample in family.samples if not sample.name.endswith("_created")]
            parts += [f"{_start(sample.name, sample.labels)}{_number(sample.value)}\n" for sample in kept]
        return "".join(parts)


def _own(collector: Collector) -> _Block | _Collected:
    """A collector under its own names."""
    if not isinstance(collector, Family):
        return _Collected(collector)
    return _Block(collector.name, collector.documentation, collector.type, [collector], collector.series)


def _renamed(row: Renamed, families: Mapping[str, Family[Any]]) -> _Block:
    """A metric of vLLM's from ours."""
    sources = [families[name] for name in row.sources]
    return _Block(row.name, row.documentation, row.kind or sources[0].type, sources, lambda: row.derive(*sources))


class Exposition:
    """Writes the metrics of one process. Belongs to one thread.

    names: whose names `/metrics` has. vllm: whether the process shows anything under vLLM's.
    """

    def __init__(self, registry: Registry, names: Names = "kvrail", *, vllm: bool = True) -> None:
        self._registry = registry
        self._names = names
        self._vllm = vllm
        self._built = 0
        self._ours: list[_Block | _Collected] = []
        self._theirs: list[_Block] = []
        self._summed: list[_Block] = []

    def render(self, path: str = "/metrics", *, sums: bool = True) -> tuple[bytes, str]:
        """Body and content type of `/metrics` or `/metrics/vllm`: Prometheus's text format, version 0.0.4.

        sums: whether a router shows what its decode workers show under vLLM's names, summed up.
        """
        if self._built != len(self._registry.collectors):
            self._build()
        blocks: list[_Block | _Collected] = []
        if path == "/metrics":
            blocks += [each for each in self._ours if self._names != "vllm" or isinstance(each, _Collected)]
        if path != "/metrics" or self._names != "kvrail":
            blocks += self._summed if sums else self._theirs
        return "".join([block.text() for block in blocks]).encode(), CONTENT_TYPE_PLAIN_0_0_4

    def _build(self) -> None:
        collectors = list(self._registry.collectors)
        self._built = len(collectors)
        self._ours = [_own(collector) for collector in collectors]
        families = {each.name: each for each in collectors if isinstance(each, Family)}
        shown: dict[str, Renamed] = {}
        for row in VLLM_METRICS if self._vllm else ():
            if all(name in families for name in row.sources):
                shown.setdefault(row.name, row)
        self._theirs = [_renamed(row, families) for row in shown.values()]
        for row in CLUSTER_METRICS if self._vllm else ():
            if all(name in families for name in row.sources):
                shown[row.name] = row
        self._summed = [_renamed(row, families) for row in shown.values()]
