"""A request's way through the processes as one OpenTelemetry trace, sent to a collector over OTLP.

    client ─traceparent─▶ router: chat MODEL
                            ├─ admit, tokenise, queue
                            └─ decode worker: decode
                                 ├─ admit, transfer by groups of layers, draft, verify, decode
                                 └─ prefill worker: prefill
                                      └─ queue, prefill, encode and send by groups of layers

Each process exports its own spans once its part of a request has ended, from the moments of its timeline
(kvrail/telemetry/moments.py) and its spans (kvrail/telemetry/spans.py). Without an endpoint there is no `Tracing`,
nothing is imported and nothing is recorded. Spans wait in a bounded queue, which a thread of the exporter empties;
where the collector is away, what does not fit is dropped.
"""

import asyncio
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from kvrail.errors import ConfigError
from kvrail.runtime.logs import trace_ids
from kvrail.telemetry.moments import Moment, Timeline, partition
from kvrail.telemetry.spans import Span

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
"""What the extra installs. Other packages bring `opentelemetry` itself."""
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
CONTEXT_HEADERS = ("traceparent", "tracestate")
MAX_STATE_CHARS = 512
"""Longest tracestate that is passed on: the standard's minimum."""
MAX_GROUPS = 32
"""Spans of one track of a transfer, at most: beyond it, neighbouring groups of layers share a span."""
CLOSE_S = 3.0
"""Seconds that the last spans get to leave when a process ends."""

Attribute = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, Attribute]


class Tracing:
    """Sends one process's spans. Any thread may use it."""

    def __init__(self, endpoint: str, service: str) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": f"kvrail-{service}", "service.namespace": "kvrail"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("kvrail")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def start(cls, endpoint: str, service: str) -> Self | None:
        """Traces of `service` (router, decode, prefill) to `endpoint`, or where OpenTelemetry's variables say.

        None where neither names one. Raises ConfigError as `check_tracing`.
        """
        found = check_tracing(endpoint)
        return cls(found, service) if found else None

    def hop(self, name: str, given: Mapping[str, str], timeline: Timeline, attributes: Attributes) -> "Hop | None":
        """Begin this process's part of a request, whose time runs on `timeline`; log lines have its ids from here on.

        None where the trace is not sampled: the caller may have decided against it. given: headers of W3C Trace Context
        that the caller has sent; what is none of them, or no such, is ignored.
        """
        from opentelemetry.trace import SpanKind

        zero_ns = time.time_ns() - int(1e9 * timeline.elapsed())
        context = {key: given[key] for key in CONTEXT_HEADERS if key in given}
        if len(context.get("tracestate", "")) > MAX_STATE_CHARS:
            del context["tracestate"]
        parent = self._propagator.extract(context)
        span = self._tracer.start_span(
            name, parent, kind=SpanKind.SERVER, attributes=dict(attributes), start_time=zero_ns
        )
        if not span.is_recording():
            return None
        ids = span.get_span_context()
        trace_ids.set((f"{ids.trace_id:032x}", f"{ids.span_id:016x}"))
        return Hop(self._tracer, self._propagator, span, timeline, zero_ns)

    def close(self) -> None:
        """Send what is left, for CLOSE_S at most: a collector that is away must not hold up the end."""
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def check_tracing(endpoint: str) -> str:
    """Where traces go: `endpoint`, or where OpenTelemetry's variables say; empty where neither names one.

    Raises ConfigError where what traces need is not installed, or their protocol is not spoken.
    """
    given = {"--otlp-endpoint": endpoint} | {name: os.environ.get(name, "") for name in ENDPOINT_VARIABLES}
    setting, found = next(((name, value) for name, value in given.items() if value), ("", ""))
    if not found:
        return ""
    protocol = next(filter(None, map(os.environ.get, PROTOCOL_VARIABLES)), "grpc")
    if protocol != "grpc":
        raise ConfigError(
            f"{PROTOCOL_VARIABLES[1]} is {protocol!r}; kvrail sends traces by grpc alone (a collector's port"
            " 4317): set it to grpc"
        )
    if not _is_installed():
        raise ConfigError(
            f"{setting} is {found!r}, and OpenTelemetry is not installed; pip install 'kvrail[otel]', or name no"
            " endpoint"
        )
    return found


def _is_installed() -> bool:
    try:
        return all(importlib.util.find_spec(name) for name in _NEEDED)
    except ModuleNotFoundError:  # of a package that one of them lies in
        return False


class Hop:
    """One process's part of one request."""

    def __init__(self, tracer: Any, propagator: Any, span: Any, timeline: Timeline, zero_ns: int) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._span = span
        self.timeline = timeline
        self._zero_ns = zero_ns
        self._inside = set_span_in_context(span)
        self.context: dict[str, str] = {}
        """Headers for calls from here, so that their spans lie inside this one."""
        propagator.inject(self.context, self._inside)

    @contextmanager
    def following(self, end: Callable[["Hop", str], None]) -> Iterator[None]:
        """Run the block; `end` then exports its outcome: the class of what it raised, empty where it raised nothing."""
        error = ""
        try:
            yield
        except (asyncio.CancelledError, Exception) as failure:
            error = type(failure).__name__
            raise
        finally:
            end(self, error)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Export the block as a span."""
        begin = self.timeline.elapsed()
        try:
            yield
        finally:
            self.child(name, begin, self.timeline.elapsed())

    def child(self, name: str, begin: float, end: float, attributes: Attributes | None = None) -> None:
        """Export a span from `begin` to `end`, in seconds of the timeline."""
        span = self._tracer.start_span(
            name, self._inside, attributes=dict(attributes or {}), start_time=self._zero_ns + int(1e9 * begin)
        )
        span.end(self._zero_ns + int(1e9 * max(begin, end)))

    def parts(self, names: Mapping[str, str]) -> None:
        """Export the parts of the timeline (moments.PARTS) that `names` has, under its names."""
        for part, begin, end in partition(dict(self.timeline.marks()).get):
            if part in names and end > begin:
                self.child(names[part], begin, end)

    def transfer(self, process: str, spans: Iterable[Span]) -> None:
        """Export a transfer's spans of `process` by groups of layers, each from its first to its last frame."""
        for group in _grouped(span for span in spans if span.process == process):
            self.child(f"{group.track} {group.layers}", group.begin, group.end, group.sizes())

    def end(self, attributes: Attributes, error: str = "", at: float | None = None) -> None:
        """The part has ended. error: what went wrong, by its class; empty where nothing did.

        at: when, in seconds of the timeline; None: now.
        """
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        if (first := self.timeline.get(Moment.FIRST_TOKEN)) is not None:
            self._span.add_event("first token", timestamp=self._zero_ns + int(1e9 * first))
        self._span.end(self._zero_ns + int(1e9 * (self.timeline.elapsed() if at is None else at)))


@dataclass(slots=True)
class _Group:
    track: str
    layers: str
    begin: float
    end: float
    frames: int
    bytes: int

    def sizes(self) -> dict[str, Attribute]:
        return {"kvrail.layers": self.layers, "kvrail.frames": self.frames, "kvrail.bytes": self.bytes}

    def take(self, other: "_Group") -> None:
        """Merge `other` into this one."""
        first, last = self.layers.split("-")[0], other.layers.rpartition("-")[2]
        self.layers = self.layers if self.layers == other.layers else f"{first}-{last}"
        self.begin, self.end = min(self.begin, other.begin), max(self.end, other.end)
        self.frames += other.frames
        self.bytes += other.bytes


def _grouped(spans: Iterable[Span]) -> Iterator[_Group]:
    """Frames' spans by track and layers, MAX_GROUPS of a track at most; spans of other tracks are left out."""
    tracks: dict[str, dict[str, _Group]] = {}
    for span in spans:
        layers, comma, _ = span.name.partition(", pages ")
        if not comma:
            continue
        new = _Group(
            span.track,
            layers.removeprefix("layers "),
            span.begin,
            span.begin + span.seconds,
            1,
            span.sizes.get("bytes", 0),
        )
        groups = tracks.setdefault(span.track, {})
        if new.layers in groups:
            groups[new.layers].take(new)
        else:
            groups[new.layers] = new
    for groups in tracks.values():
        ordered = sorted(groups.values(), key=lambda group: int(group.layers.split("-")[0]))
        each = -(-len(ordered) // MAX_GROUPS)
        for start in range(0, len(ordered), each):
            first, *others = ordered[start : start + each]
            for other in others:
                first.take(other)
            yield first
