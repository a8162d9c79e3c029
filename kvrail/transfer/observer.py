"""What a transfer reports while it runs, for metrics, usage, traces and drafts. Any thread may call."""

from typing import Protocol

from kvrail.codec.base import EncodingStats
from kvrail.codec.frame import FrameHeader


class SendingObserver(Protocol):
    """Called by the sending end."""

    def encoded(self, header: FrameHeader, seconds: float, stats: EncodingStats) -> None:
        """A block was encoded, `seconds` from the launch to payloads that can leave; header: of stage 0."""

    def sent(self, header: FrameHeader, payload_bytes: int, seconds: float) -> None:
        """A frame has left, `seconds` after it was announced."""

    def held(self, change: int) -> None:
        """`change` more bytes of later stages wait in memory; fewer if negative."""


class ReceivingObserver(Protocol):
    """Called by the receiving end."""

    def arrived(self, payload_bytes: int, waited_s: float, crossing_s: float) -> None:
        """A frame is here; the receiver waited `waited_s` for it. Its payload crossed in `crossing_s`: see `Region`."""

    def decoded(self, header: FrameHeader, payload_bytes: int, seconds: float) -> None:
        """A frame is in the pages, `seconds` after its decoding was begun."""

    def coarse(self) -> None:
        """There is enough to draft on and not yet all. Called on the loop, perhaps several times."""

    def kept(self, change: int) -> None:
        """`change` more bytes of earlier stages are kept until the last has come; fewer if negative."""
