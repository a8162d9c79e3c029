"""Closes full pages between steps, where pages are closed."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from kvrail.engine.kv.closing_cache import ClosingCache, Outcome
from kvrail.engine.kv.pages import PagePool
from kvrail.telemetry.worker import EngineMetrics


class PageCloser:
    """What an engine's thread does between two steps.

    Closing is enqueued between two steps, and nothing waits for it: the pages count as closed, in steps enqueued later,
    once the host knows that all of their tiles found room.
    """

    def __init__(self, pool: PagePool, cache: ClosingCache) -> None:
        self._pool = pool
        self._cache = cache
        self._outcome: Outcome | None = None
        self.pages = 0
        """Pages that were closed so far."""

    @property
    def pending(self) -> bool:
        """Whether there is something to do even if there is no step."""
        slots = self._cache.slots
        return self._outcome is not None or bool(slots.free_closed and slots.ready())

    def report(self, metrics: EngineMetrics) -> None:
        """Update the gauges."""
        slots = self._cache.slots
        metrics.closed_pages.set(slots.closed)
        metrics.stuck_pages.set(slots.stuck)
        metrics.raw_tiles.set(self._cache.raw_tiles / max(1, slots.closed * self._cache.page_tiles))

    def close_pages(self, lock: AbstractContextManager[object], idle: Callable[[], bool], *, launches: bool) -> None:
        """Take in the last closing, enqueue another. lock: the engine's; idle: whether there is nothing else to do.

        launches: whether closing only enqueues work. That is done under the lock: behind it the pages may be freed, and
        a transfer get their slots, which waits for nothing that is enqueued later.
        """
        with lock:
            waits = idle()
            self._settle(wait=waits)
            closing = None if self._outcome is not None else self._pool.choose_closing(at_once=waits)
            if closing is not None and launches:
                self._outcome = self._cache.close(closing)
        if closing is None:
            return
        if not launches:
            self._outcome = self._cache.close(closing)
        with lock:
            self._settle()

    def _settle(self, *, wait: bool = False) -> None:
        """Let pages count as closed, if the outcome is known."""
        if self._outcome is not None and self._outcome.known(wait=wait):
            self.pages += self._cache.slots.settle(self._outcome.failed)
            self._cache.take_in(self._outcome)
            self._outcome = None
