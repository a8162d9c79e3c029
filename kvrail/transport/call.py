"""The decode worker's end of one call, whatever the transport."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvrail.errors import FrameError, KvrailError, RequestCancelledError, TransferAbortedError
from kvrail.transport.frames import DEFAULT_QUEUED_BYTES, Deliver, Expectation
from kvrail.transport.signal import Signal
from kvrail.wire.replies import Reply, SealedFrame
from kvrail.wire.v1.common_pb2 import Mark
from kvrail.wire.v1.prefill_pb2 import Accepted, FirstToken, TransferDone

log = logging.getLogger(__name__)

Feed = Callable[[Deliver], Coroutine[Any, Any, None]]
"""A transport's part: opens the call, delivers its replies until the end, and raises what went wrong."""


class PrefillCall:
    """One call of a prefill worker: its control replies, and the frames of its transfer in order.

    One task reads and dispatches; it waits while more than `max_queued_bytes` of frames lie here untaken. The call
    opens at the event loop's next turn: `reserve` right after making it. Leave it by reading to the end, `cancel` or
    `abort`; as an async context manager it cancels by itself and leaves nothing pending.
    """

    def __init__(self, feed: Feed, *, max_queued_bytes: int = DEFAULT_QUEUED_BYTES) -> None:
        self._max_queued_bytes = max_queued_bytes
        self._expectation: Expectation | None = None
        self._accepted: Accepted | None = None
        self._first_token: FirstToken | None = None
        self._frames: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._frame_count = 0
        self._frame_bytes = 0
        self._done: TransferDone | None = None
        self._failure: KvrailError | None = None
        self._changed = Signal()
        self._task = asyncio.create_task(self._read(feed), name="prefill call")
        self._task.add_done_callback(self._on_read)

    def reserve(self, expectation: Expectation) -> None:
        """Admit the transfer; before this, a frame that arrives is refused."""
        self._expectation = expectation

    async def accepted(self) -> Accepted:
        """Wait for the handshake's answer; raises what the worker refused with."""
        while self._accepted is None:
            await self._wait()
        return self._accepted

    async def first_token(self) -> FirstToken:
        """Wait for the first token; raises what ended the call before it."""
        while self._first_token is None:
            if self._done is not None:
                raise FrameError("the transfer ended without a first token")
            await self._wait()
        return self._first_token

    async def receive(self) -> memoryview | None:
        """Take the next frame in order, or None after a commit whose summary matches what came.

        Raises FrameError where nothing is reserved, a frame breaks the expectation or the summary does not match;
        TransferAbortedError where the sender gave up; WorkerUnavailableError where it was lost.
        """
        if self._expectation is None:
            raise FrameError("receive before reserve; reserve first")
        while self._failure is None and not self._frames and self._done is None:
            await self._wait()
        if self._failure is not None:
            raise self._failure
        if not self._frames:
            return None
        frame = self._frames.popleft()
        self._queued_bytes -= len(frame)
        self._changed.wake()
        return frame

    @property
    def done_marks(self) -> Sequence[Mark]:
        """The sender's marks; empty until the commit has come."""
        return self._done.marks if self._done is not None else ()

    @property
    def received_bytes(self) -> int:
        """Bytes of all frames so far, headers included."""
        return self._frame_bytes

    def cancel(self) -> None:
        """End the call now, on both ends; whoever still waits here gets RequestCancelledError."""
        self._fail(RequestCancelledError("the prefill call was cancelled here"))

    async def abort(self, reason: str) -> None:
        """Stop receiving without waiting; whoever still waits here gets TransferAbortedError."""
        self._fail(TransferAbortedError(reason))

    async def __aenter__(self) -> "PrefillCall":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()
        await asyncio.wait((self._task,))

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        await self._changed.wait()

    def _fail(self, failure: KvrailError) -> None:
        """End the call; the first failure stays, and none touches a transfer that is complete."""
        if self._failure is None and self._done is None:
            self._failure = failure
            self._frames.clear()
            self._queued_bytes = 0
        self._task.cancel()
        self._changed.wake()

    async def _read(self, feed: Feed) -> None:
        await feed(self._deliver)
        if self._done is None:
            raise FrameError("the prefill worker ended the call before the end of its transfer")

    def _on_read(self, task: asyncio.Task[None]) -> None:
        """Tell whoever waits how reading ended; with the transfer complete, nobody needs to know."""
        error = RequestCancelledError("the prefill call was cancelled here") if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, KvrailError):
            self._fail(error)
            return
        log.error("a prefill call failed", exc_info=error)
        self._fail(KvrailError("internal error in a prefill call; this process's log has the cause"))

    async def _deliver(self, reply: Reply) -> None:
        """Check a reply and put it where it is waited for; waits while frames lie untaken."""
        if self._done is not None:
            raise FrameError("a reply follows the end of the transfer")
        if isinstance(reply, Accepted):
            if self._accepted is not None:
                raise FrameError("the prefill worker accepted twice")
            self._accepted = reply
        elif self._accepted is None:
            raise FrameError(f"the first reply is a {type(reply).__name__}; it must be Accepted")
        elif isinstance(reply, FirstToken):
            if self._first_token is not None:
                raise FrameError("the prefill worker sent a second first token")
            self._first_token = reply
        elif isinstance(reply, TransferDone):
            self._check_summary(reply)
            self._done = reply
        else:
            await self._queue(reply.open() if isinstance(reply, SealedFrame) else reply)
        self._changed.wake()

    async def _queue(self, frame: memoryview) -> None:
        size, expected = len(frame), self._expectation
        if expected is None:
            raise FrameError(f"a frame of {size} bytes came before reserve")
        if size > expected.max_frame_bytes:
            raise FrameError(f"a frame has {size} bytes; at most {expected.max_frame_bytes} are expected")
        if self._frame_bytes + size > expected.max_total_bytes:
            total = self._frame_bytes + size
            raise FrameError(f"the transfer has {total} bytes or more; at most {expected.max_total_bytes} are expected")
        self._frame_count += 1
        self._frame_bytes += size
        while self._frames and self._queued_bytes + size > self._max_queued_bytes:
            await self._changed.wait()
        self._frames.append(frame)
        self._queued_bytes += size

    def _check_summary(self, done: TransferDone) -> None:
        if (done.frame_count, done.payload_bytes) != (self._frame_count, self._frame_bytes):
            raise FrameError(
                f"the sender counts {done.frame_count} frames and {done.payload_bytes} bytes; "
                f"{self._frame_count} and {self._frame_bytes} came"
            )
