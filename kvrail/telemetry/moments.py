"""The moments of a request's life. Every latency metric is the gap between two of them."""

import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum


class Moment(StrEnum):
    """Moments on a request's critical path, in the order in which they happen."""

    RECEIVED = "received"  # the router has the HTTP request
    PLANNED = "planned"  # validated, tokenised; it waits for its turn
    DISPATCHED = "dispatched"  # a worker has room; the stream to the decode worker is opened
    ADMITTED = "admitted"  # the decode worker has reserved pages and calls the prefill worker
    PREFILL_QUEUED = "prefill_queued"  # the prefill worker has accepted the request
    PREFILL_STARTED = "prefill_started"  # its first chunk is scheduled
    PREFILL_FINISHED = "prefill_finished"  # the first token is sampled
    FIRST_TOKEN = "first_token"  # the decode worker has the first token
    KV_COARSE = "kv_coarse"  # enough of every page is in place to draft: time to anchor
    KV_COMPLETE = "kv_complete"  # the last moment of every page is in place: time to exact
    VERIFIED = "verified"  # drafts were compared with what the whole KV gives
    FINISHED = "finished"  # the decode worker has sampled the last token
    RESPONDED = "responded"  # the router has sent the last byte


PARTS: tuple[tuple[str, Moment, Moment], ...] = (
    ("frontend", Moment.RECEIVED, Moment.PLANNED),
    ("turn", Moment.PLANNED, Moment.DISPATCHED),
    ("queue", Moment.DISPATCHED, Moment.ADMITTED),
    ("handshake", Moment.ADMITTED, Moment.PREFILL_QUEUED),
    ("prefill_queue", Moment.PREFILL_QUEUED, Moment.PREFILL_STARTED),
    ("prefill", Moment.PREFILL_STARTED, Moment.PREFILL_FINISHED),
    ("first_token_wire", Moment.PREFILL_FINISHED, Moment.FIRST_TOKEN),
    ("kv_wait", Moment.FIRST_TOKEN, Moment.KV_COARSE),
    ("draft", Moment.KV_COARSE, Moment.KV_COMPLETE),
    ("verify", Moment.KV_COMPLETE, Moment.VERIFIED),
    ("decode", Moment.VERIFIED, Moment.FINISHED),
    ("respond", Moment.FINISHED, Moment.RESPONDED),
)
"""A partition of a request's time: each part runs from one moment to the next one that was marked."""


def partition(when: Callable[[Moment], float | None]) -> Iterator[tuple[str, float, float]]:
    """The parts of a request whose ends were marked, each with its begin and end in seconds."""
    last = 0.0
    for name, begins, ends in PARTS:
        begin, end = max(last, when(begins) or 0.0), when(ends)
        last = begin if end is None else max(begin, end)
        if end is not None:
            yield name, begin, last


class Timeline:
    """Marks of one request on one process's monotonic clock, in seconds since `start`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._marks: dict[Moment, float] = {}

    def mark(self, moment: Moment) -> float:
        """Record `moment` now, once; later calls keep the first. Returns seconds since the start."""
        return self._marks.setdefault(moment, self._clock() - self._start)

    def merge(self, marks: Iterable[tuple[Moment, float]], anchor: Moment) -> None:
        """Adopt another hop's marks, whose zero is the moment `anchor` of this timeline."""
        zero = self._marks[anchor]
        for moment, seconds in marks:
            self._marks.setdefault(moment, zero + seconds)

    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def get(self, moment: Moment) -> float | None:
        """Seconds from the start to `moment`, or None where it has not happened."""
        return self._marks.get(moment)

    def marks(self) -> list[tuple[Moment, float]]:
        """All marks in the order of the moments."""
        return [(moment, self._marks[moment]) for moment in Moment if moment in self._marks]

    def parts(self) -> dict[str, float]:
        """Seconds of each part of the request; a part whose end was never marked is absent."""
        return {name: end - begin for name, begin, end in partition(self._marks.get)}
