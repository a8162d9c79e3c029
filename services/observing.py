"""What transfers tell of themselves, put into a worker's metrics."""

import logging
from time import perf_counter

from codec.base import EncodingStats
from codec.frame import FrameHeader
from kvrail.worker import Worker

logger = logging.getLogger("kvrail.transfer")


class SentKV:
    """Counts what one transfer sends."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def encoded(self, codec: str, seconds: float, stats: EncodingStats) -> None:
        """A block was encoded."""
        logger.debug("at %.6f s: a block was encoded in %.3f ms", perf_counter(), 1e3 * seconds)
        self._worker.coding.encoded(
            codec, seconds, values=stats.values, escapes=stats.escapes, raw_tensors=stats.raw_tensors
        )

    def sent(self, header: FrameHeader, payload_bytes: int, seconds: float) -> None:
        """A frame has left."""
        logger.debug("at %.6f s: frame %d left in %.3f ms", perf_counter(), header.sequence, 1e3 * seconds)
        raw_bytes = header.spec.raw_bytes if header.stage == 0 else 0
        self._worker.transfers.sent(header.codec, raw_bytes=raw_bytes, payload_bytes=payload_bytes)

    def held(self, change: int) -> None:
        """Later stages wait in memory, or do no more."""
        self._worker.transfers.held_bytes.inc(change)


class ReceivedKV:
    """Counts what one transfer brings, for metrics and for the request's usage."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.payload_bytes = 0
        self.raw_bytes = 0

    def decoded(self, header: FrameHeader, payload_bytes: int, seconds: float) -> None:
        """A frame is in the pages."""
        logger.debug("at %.6f s: frame %d was decoded in %.3f ms", perf_counter(), header.sequence, 1e3 * seconds)
        raw_bytes = header.spec.raw_bytes if header.stage == header.num_stages - 1 else 0
        self._worker.coding.decoded(header.codec, seconds)
        self._worker.transfers.received(header.codec, raw_bytes=raw_bytes, payload_bytes=payload_bytes)
        self.raw_bytes += raw_bytes
        self.payload_bytes += payload_bytes

    def kept(self, change: int) -> None:
        """Earlier stages are kept until the last has come, or are no more."""
        self._worker.transfers.kept_bytes.inc(change)
