"""What transfers tell of themselves, put into a worker's metrics and, where one is asked for, a request's trace."""

from dataclasses import dataclass

from kvrail.codec.base import EncodingStats
from kvrail.codec.frame import FrameHeader
from kvrail.telemetry.spans import SpanLog
from kvrail.telemetry.worker import CodecMetrics, TransferMetrics


@dataclass(frozen=True, slots=True)
class KVMeters:
    """The metrics of a worker's transfers, and of its codecs."""

    transfers: TransferMetrics
    coding: CodecMetrics


class SentKV:
    """Counts what one transfer sends. spans: where a trace is asked for."""

    def __init__(self, meters: KVMeters, spans: SpanLog | None = None) -> None:
        self._meters = meters
        self._spans = spans

    def encoded(self, header: FrameHeader, seconds: float, stats: EncodingStats) -> None:
        """A block was encoded."""
        if self._spans is not None:
            self._spans.add("encode", pages_of(header), seconds, bytes=header.spec.raw_bytes)
        self._meters.coding.encoded(
            header.codec, seconds, values=stats.values, escapes=stats.escapes, raw_tensors=stats.raw_tensors
        )

    def sent(self, header: FrameHeader, payload_bytes: int, seconds: float) -> None:
        """A frame has left."""
        if self._spans is not None:
            self._spans.add("send", pages_of(header), seconds, bytes=payload_bytes, stage=header.stage)
        raw_bytes = header.spec.raw_bytes if header.stage == 0 else 0
        self._meters.transfers.crossed("sent", header.codec, raw_bytes=raw_bytes, payload_bytes=payload_bytes)

    def held(self, change: int) -> None:
        """Later stages wait in memory, or do no more."""
        self._meters.transfers.held_bytes.inc(change)


def pages_of(header: FrameHeader) -> str:
    """Which layers and pages a frame holds, for people."""
    last_layer, last_page = (
        header.first_layer + header.spec.num_layers - 1,
        header.first_page + header.spec.num_pages - 1,
    )
    return f"layers {header.first_layer}-{last_layer}, pages {header.first_page}-{last_page}"
