"""What happened to workers of late, for people: lost, back, restarted, joined, left, a codec compiled."""

from collections import deque
from collections.abc import Iterable
from time import monotonic
from typing import Any, Literal

KEPT = 50
"""Changes that are remembered."""

What = Literal["joined", "lost", "back", "restarted", "left", "compiling", "compiled"]


class Changes:
    """The last changes, the newest first. Belongs to one event loop."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, dict[str, Any]]] = deque(maxlen=KEPT)
        self._compiling: dict[tuple[str, str], frozenset[str]] = {}

    def add(self, what: What, role: str, worker: str, detail: str = "") -> None:
        """Remember a change now. detail: a reason, or a codec's name."""
        if what in ("joined", "restarted", "left"):  # what an earlier process compiled is lost
            self._compiling.pop((role, worker), None)
        change = {"what": what, "role": role, "worker": worker, "detail": detail}
        self._kept.appendleft((monotonic(), change))

    def compile(self, role: str, worker: str, codecs: Iterable[str]) -> None:
        """Compare the codecs that a worker compiles with those that it compiled before."""
        now = frozenset(codecs)
        before = self._compiling.get((role, worker), frozenset())
        self._compiling[role, worker] = now
        for codec in sorted(now - before):
            self.add("compiling", role, worker, codec)
        for codec in sorted(before - now):
            self.add("compiled", role, worker, codec)

    def all(self) -> list[dict[str, Any]]:
        """What, role, worker and detail of each, and ago_s, seconds since it happened; the newest first."""
        now = monotonic()
        return [{"ago_s": now - at, **change} for at, change in self._kept]
