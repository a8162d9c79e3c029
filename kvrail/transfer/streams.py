"""Work beside the engine's: copies of pages that must neither overtake the computation nor hold it up."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A CUDA stream of its own for transfers; on a CPU, where work is done at once, it does nothing.

    The engine computes on the device's default stream. `mark` notes what is enqueued there now; work inside
    `after(mark)` starts when that is done. Pages that were freed may still be in use by enqueued steps, so a transfer
    marks after it got its pages and works after that mark.
    """

    def __init__(self, device: torch.device) -> None:
        self._compute = torch.cuda.default_stream(device) if device.type == "cuda" else None
        self._side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def mark(self, *, awaited: bool = False) -> torch.Event | None:
        """Everything that the engine has enqueued so far.

        awaited: a thread will wait for it, and is to sleep instead of keeping a core busy.
        """
        if self._compute is None:
            return None
        event = torch.cuda.Event(blocking=awaited)  # type: ignore[no-untyped-call]
        event.record(self._compute)
        return event

    @contextmanager
    def after(self, mark: torch.Event | None) -> Iterator[None]:
        """Enqueue work on this stream, to start after `mark`."""
        if self._side is None:
            yield
            return
        if mark is not None:
            self._side.wait_event(mark)
        with torch.cuda.stream(self._side):
            yield

    def synchronize(self) -> None:
        """Wait until this stream's work is done."""
        if self._side is not None:
            self._side.synchronize()
