"""The prefill worker's end of one call, whatever the transport."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvrail.errors import FrameError, KvrailError, TransferAbortedError, WorkerUnavailableError
from kvrail.transport.frames import DEFAULT_QUEUED_BYTES, Deliver, Summary
from kvrail.transport.signal import Signal
from kvrail.wire.replies import Reply, SealedFrame
from kvrail.wire.v1.common_pb2 import Mark
from kvrail.wire.v1.prefill_pb2 import Accepted, FirstToken, TransferDone

log = logging.getLogger(__name__)


class PrefillReplies:
    """What a prefill worker answers to one call: control replies at once, frames in order behind them.

    Queues up to `max_queued_bytes` of frames. Belongs to one event loop.
    """

    def __init__(self, max_queued_bytes: int = DEFAULT_QUEUED_BYTES) -> None:
        self._max_queued_bytes = max_queued_bytes
        self._control: deque[Reply] = deque()
        self._frames: deque[SealedFrame] = deque()
        self._queued_bytes = 0
        self._sent = Summary(0, 0)
        self._taken = self._left = 0  # frames that `take` gave out; those of them that were delivered
        self._done: TransferDone | None = None
        self._finished = False
        self._failure: Exception | None = None
        self._changed = Signal()

    def accept(self, accepted: Accepted) -> None:
        """Answer the handshake; always the first reply."""
        self._put_control(accepted)

    def first_token(self, first_token: FirstToken) -> None:
        """Send the first token ahead of every frame that is still queued."""
        self._put_control(first_token)

    async def send(self, frame: SealedFrame) -> None:
        """Queue one frame; waits while the receiver is behind. Raises TransferAbortedError once either end gave up."""
        self._check_open()
        while self._frames and self._queued_bytes + len(frame) > self._max_queued_bytes:
            await self._changed.wait()
            self._check_open()
        self._frames.append(frame)
        self._queued_bytes += len(frame)
        self._sent = Summary(self._sent.frame_count + 1, self._sent.payload_bytes + len(frame))
        self._changed.wake()

    async def drained(self) -> None:
        """Return once every frame queued so far has left this end. Raises TransferAbortedError like `send`."""
        count = self._sent.frame_count
        while self._left < count:
            self._check_open()
            await self._changed.wait()

    async def commit(self, marks: Sequence[Mark] = ()) -> None:
        """Say that every frame was sent; returns once all of it has left this end.

        Raises TransferAbortedError where the receiver gives up before that.
        """
        self._check_open()
        self._done = TransferDone(
            frame_count=self._sent.frame_count, payload_bytes=self._sent.payload_bytes, marks=marks
        )
        self._changed.wake()
        while not self._finished:
            await self._changed.wait()
            if self._failure is not None and not self._finished:
                raise self._aborted()

    async def abort(self, reason: str) -> None:
        """Give up without waiting: the receiver raises TransferAbortedError, and the story is cancelled."""
        self.close(TransferAbortedError(reason))

    def close(self, failure: Exception) -> None:
        """End the call with an error, for both ends; the first one stays."""
        if self._failure is None and not self._finished:
            self._failure = failure
            self._control.clear()
            self._frames.clear()
            self._queued_bytes = 0
        self._changed.wake()

    async def take(self) -> Reply:
        """Take what goes out next: control replies, then frames, then the end. Raises what `close` was given.

        Asking for more says that what was taken before has been delivered.
        """
        if self._left < self._taken:
            self._left = self._taken
            self._changed.wake()
        while self._failure is None:
            if self._control:
                return self._control.popleft()
            if self._frames:
                frame = self._frames.popleft()
                self._queued_bytes -= len(frame)
                self._taken += 1
                self._changed.wake()
                return frame
            if self._done is not None:
                return self._done
            await self._changed.wait()
        raise self._failure

    def finish(self) -> None:
        """Note that the end has left; `commit` returns."""
        self._finished = True
        self._changed.wake()

    @property
    def failure(self) -> Exception | None:
        """What ended the call early, if anything did."""
        return self._failure

    @property
    def finished(self) -> bool:
        """Whether the end has left."""
        return self._finished

    def _put_control(self, reply: Reply) -> None:
        self._check_open()
        self._control.append(reply)
        self._changed.wake()

    def _aborted(self) -> TransferAbortedError:
        """Make the sender's view of a failure."""
        if isinstance(self._failure, TransferAbortedError):
            return self._failure
        return TransferAbortedError(f"the transfer ended early: {self._failure}")

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._aborted()
        if self._done is not None:
            raise FrameError("a reply follows the commit; commit last")


Story = Callable[[PrefillReplies], Coroutine[Any, Any, None]]
"""What a prefill worker does for one call: answers through its argument and commits, or raises."""


def _ending(task: asyncio.Task[None]) -> Exception:
    """Why nothing follows once the story has ended; a committed one never asks."""
    if task.cancelled():
        return WorkerUnavailableError("the prefill worker stopped during a call")
    error = task.exception()
    return error if isinstance(error, Exception) else KvrailError("the prefill worker ended a call without a commit")


async def tell(story: Story, deliver: Deliver, *, max_queued_bytes: int = DEFAULT_QUEUED_BYTES) -> None:
    """Run a story and deliver its replies until the last one. When this returns or raises, the story has ended.

    Where `deliver` raises or this is cancelled, the receiver is gone: the story is cancelled, and whatever else still
    uses its replies gets TransferAbortedError. Raises what the story raises, TransferAbortedError where it aborts,
    WorkerUnavailableError where someone else cancels it, KvrailError where it ends without a commit.
    """
    replies = PrefillReplies(max_queued_bytes)
    task = asyncio.create_task(story(replies), name="prefill story")
    task.add_done_callback(lambda task: replies.close(_ending(task)))
    try:
        reply: Reply | None = None
        while not isinstance(reply, TransferDone):
            reply = await replies.take()
            await deliver(reply)
        replies.finish()
        await asyncio.wait((task,))
    finally:
        if not replies.finished:  # else the story ends by itself, even where the receiver leaves before
            replies.close(TransferAbortedError("the receiver went away"))
            task.cancel()
        (error,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(error, Exception) and not isinstance(error, KvrailError) and error is not replies.failure:
            log.error("a prefill story failed after its call had ended", exc_info=error)
