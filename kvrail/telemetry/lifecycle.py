"""The moments of a request's life. Every latency metric is the gap between two of them."""

import time
from collections.abc import Callable, Iterable
from enum import StrEnum


class Stage(StrEnum):
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
    KV_COMPLETE = "kv_complete"  # the last stage of every page is in place: time to exact
    VERIFIED = "verified"  # drafts were compared with what the whole KV gives
    FINISHED = "finished"  # the decode worker has sampled the last token
    RESPONDED = "responded"  # the router has sent the last byte


PARTS: tuple[tuple[str, Stage, Stage], ...] = (
    ("frontend", Stage.RECEIVED, Stage.PLANNED),
    ("turn", Stage.PLANNED, Stage.DISPATCHED),
    ("queue", Stage.DISPATCHED, Stage.ADMITTED),
    ("handshake", Stage.ADMITTED, Stage.PREFILL_QUEUED),
    ("prefill_queue", Stage.PREFILL_QUEUED, Stage.PREFILL_STARTED),
    ("prefill", Stage.PREFILL_STARTED, Stage.PREFILL_FINISHED),
    ("first_token_wire", Stage.PREFILL_FINISHED, Stage.FIRST_TOKEN),
    ("kv_wait", Stage.FIRST_TOKEN, Stage.KV_COARSE),
    ("draft", Stage.KV_COARSE, Stage.KV_COMPLETE),
    ("verify", Stage.KV_COMPLETE, Stage.VERIFIED),
    ("decode", Stage.VERIFIED, Stage.FINISHED),
    ("respond", Stage.FINISHED, Stage.RESPONDED),
)
"""A partition of a request's time: each part runs from one moment to the next one that was marked."""


class Timeline:
    """Marks of one request on one process's monotonic clock, in seconds since `start`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._marks: dict[Stage, float] = {}

    def mark(self, stage: Stage) -> float:
        """Record `stage` now, once; later calls keep the first. Returns seconds since the start."""
        return self._marks.setdefault(stage, self._clock() - self._start)

    def merge(self, marks: Iterable[tuple[Stage, float]], anchor: Stage) -> None:
        """Adopt another hop's marks, whose zero is the moment `anchor` of this timeline."""
        zero = self._marks[anchor]
        for stage, seconds in marks:
            self._marks.setdefault(stage, zero + seconds)

    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def get(self, stage: Stage) -> float | None:
        """Seconds from the start to `stage`, or None where it has not happened."""
        return self._marks.get(stage)

    def marks(self) -> list[tuple[Stage, float]]:
        """All marks in the order of the stages."""
        return [(stage, self._marks[stage]) for stage in Stage if stage in self._marks]

    def parts(self) -> dict[str, float]:
        """Seconds of each part of the request; a part whose end was never marked is absent."""
        found: dict[str, float] = {}
        last = 0.0
        for name, begin, end in PARTS:
            last = max(last, self._marks.get(begin, last))
            if end in self._marks:
                found[name] = max(0.0, self._marks[end] - last)
                last = max(last, self._marks[end])
        return found
