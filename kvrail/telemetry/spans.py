"""What each process did for one request, as spans of time; kept only where the client asks for a trace."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvrail.telemetry.moments import Timeline

MAX_SPANS = 4096
"""Spans of one request in one process, including those of processes behind it; further ones are dropped."""


MAX_SIZES = 16
"""Sizes of one span that another process sends."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time. Spans of one track may overlap.

    process: where it ran. begin: seconds since the request reached the process that reports it. sizes: what it worked
    on, such as bytes or layers.
    """

    process: str
    track: str
    name: str
    begin: float
    seconds: float
    sizes: Mapping[str, int]


class SpanLog:
    """The spans of one request as one process sees them, on the clock of the request's timeline there.

    Any thread may add. requested: whether the caller asked for them; else they are for this process's own trace alone.
    """

    def __init__(self, process: str, timeline: Timeline, *, requested: bool = True) -> None:
        self.requested = requested
        self._process = process
        self._timeline = timeline
        self._spans: list[Span] = []

    def add(self, track: str, name: str, seconds: float, **sizes: int) -> None:
        """Add a span that took `seconds` and ends now."""
        if len(self._spans) < MAX_SPANS:
            begin = max(0.0, self._timeline.elapsed() - seconds)
            self._spans.append(Span(self._process, track, name, begin, seconds, sizes))

    def adopt(self, spans: Iterable[Span], zero: float) -> None:
        """Take over another process's spans, whose clock began at `zero`, in seconds, of this one.

        None may pass for one of this process.
        """
        room = MAX_SPANS - len(self._spans)
        moved = [replace(span, begin=zero + span.begin) for span in spans if span.process != self._process]
        self._spans.extend(moved[:room])

    def all(self) -> list[Span]:
        """The spans so far."""
        return list(self._spans)
