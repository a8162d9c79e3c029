"""Values of chosen metrics at one moment, for code that shows them and counts nothing itself."""

from collections import defaultdict
from collections.abc import Collection

from prometheus_client import CollectorRegistry


class Readings:
    """Values of some series, read once."""

    def __init__(self, registry: CollectorRegistry, series: Collection[str]) -> None:
        """series: names as `/metrics` has them, a counter's with `_total`; missing ones are skipped."""
        families = registry.restricted_registry(series).collect()
        self._samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum of a name's series that have these labels; 0 without any."""
        wanted = labels.items()
        return sum(each.value for each in self._samples if each.name == name and wanted <= each.labels.items())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The total for each value of `label`, in the order of the series."""
        found: defaultdict[str, float] = defaultdict(float)
        wanted = labels.items()
        for each in self._samples:
            if each.name == name and wanted <= each.labels.items():
                found[each.labels[label]] += each.value
        return dict(found)
