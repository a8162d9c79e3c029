"""What a transfer tells of itself as it goes: for metrics, usage and traces. Any thread may call."""

from typing import Protocol

from kvrail.codec.base import EncodingStats
from kvrail.codec.frame import FrameHeader


class SendingObserver(Protocol):
    """Told by the sending end."""

    def encoded(self, header: FrameHeader, seconds: float, stats: EncodingStats) -> None:
        """A block was encoded, in so many seconds from the launch to payloads that can leave; header: of stage 0."""

    def sent(self, header: FrameHeader, payload_bytes: int, seconds: float) -> None:
        """A frame has left, so many seconds after it was announced."""

    def held(self, change: int) -> None:
        """So many more bytes of later stages wait in memory; fewer where negative."""


class ReceivingObserver(Protocol):
    """Told by the receiving end."""

    def arrived(self, payload_bytes: int, waited_s: float, flight_s: float) -> None:
        """A frame is here; the receiver waited so long for it, and its payload crossed in `flight_s` (`Region`)."""

    def decoded(self, header: FrameHeader, payload_bytes: int, seconds: float) -> None:
        """A frame is in the pages, so many seconds after its decoding was begun."""

    def kept(self, change: int) -> None:
        """So many more bytes of earlier stages are kept until the last has come; fewer where negative."""
