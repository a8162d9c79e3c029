"""What sending and receiving have in common: a task, its end, and counts of bytes."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvrail.codec.base import EncodingStats
from kvrail.codec.frame import FrameHeader
from kvrail.errors import TransferAbortedError
from kvrail.runtime.waiting import settled


class Counts:
    """Observes one transfer; bytes of payloads as they cross, and of the KV that they stand for."""

    def __init__(self, on_coarse: Callable[[], None]) -> None:
        self._on_coarse = on_coarse
        self.payload_bytes = 0
        self.raw_bytes = 0

    def encoded(self, header: FrameHeader, seconds: float, stats: EncodingStats) -> None:
        """See SendingObserver."""

    def sent(self, header: FrameHeader, payload_bytes: int, seconds: float) -> None:
        """See SendingObserver."""
        self.raw_bytes += header.spec.raw_bytes if header.stage == 0 else 0
        self.payload_bytes += payload_bytes

    def held(self, change: int) -> None:
        """See SendingObserver."""

    def arrived(self, payload_bytes: int, waited_s: float, crossing_s: float) -> None:
        """See ReceivingObserver."""

    def decoded(self, header: FrameHeader, payload_bytes: int, seconds: float) -> None:
        """See ReceivingObserver."""
        self.sent(header, payload_bytes, seconds)

    def coarse(self) -> None:
        """See ReceivingObserver; only the first call is passed on."""
        first, self._on_coarse = self._on_coarse, lambda: None
        first()

    def kept(self, change: int) -> None:
        """See ReceivingObserver."""


class Attempt:
    """One transfer under way in a task of its own. Belongs to one event loop."""

    def __init__(self, on_coarse: Callable[[], None] = lambda: None) -> None:
        self.counts = Counts(on_coarse)
        self._loop = asyncio.get_running_loop()

    def poll(self) -> bool:
        """Whether it is complete. Raises what it failed with, TransferAbortedError after `abort`."""
        if not self._task.done():
            return False
        if self._task.cancelled():  # what awaits this was not
            raise TransferAbortedError("the transfer was aborted at this end")
        self._task.result()
        return True

    async def done(self) -> None:
        """Wait until it is complete. Raises as `poll`; a cancelled waiter changes nothing in the transfer."""
        await asyncio.wait((self._task,))
        self.poll()

    async def abort(self) -> None:
        """End it now. When this returns, no page of it is read or written any more. A second call does nothing."""
        self._task.cancel()
        await settled(self._task)

    def on_end(self, then: Callable[[], object]) -> None:
        """Call `then` once it has ended, however that is."""
        self._task.add_done_callback(lambda _: then())

    def _start(self, run: Coroutine[Any, Any, None], name: str) -> None:
        self._task: asyncio.Task[None] = self._loop.create_task(run, name=name)
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # the caller may never ask
