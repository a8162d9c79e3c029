"""Payloads of earlier stages, which stay here until the last stage of their pages has come: later ones need them."""

from types import TracebackType
from typing import Self

from codec.frame import FrameHeader
from kvrail.metrics import TransferMetrics


class KeptStages:
    """What one attempt to fetch keeps, block by block; nothing once it is left, however it ends.

    Counts the bytes in the worker's metrics. Frames must have been admitted: stages of a block come in order.
    """

    def __init__(self, metrics: TransferMetrics) -> None:
        self._bytes = metrics.kept_bytes
        self._payloads: dict[tuple[int, int, int, int], list[memoryview]] = {}  # by a block's bounds

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for bounds in list(self._payloads):
            self._drop(bounds)

    def add(self, header: FrameHeader, payload: memoryview) -> list[memoryview]:
        """Payloads of all stages of a frame's block up to its own; the last stage's are kept no longer."""
        payloads = [*self._payloads.get(header.bounds, ()), payload]
        if header.stage < header.num_stages - 1:
            self._payloads[header.bounds] = payloads
            self._bytes.inc(payload.nbytes)
        else:
            self._drop(header.bounds)
        return payloads

    def _drop(self, bounds: tuple[int, int, int, int]) -> None:
        self._bytes.dec(sum(payload.nbytes for payload in self._payloads.pop(bounds, ())))
