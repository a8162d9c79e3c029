"""The prefill worker's end of one prefill call: its replies, in order."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from kvrail.errors import FrameError, KvrailError, TransferAbortedError, WorkerUnavailableError, reason_of
from kvrail.rpc.signal import Signal
from kvrail.runtime.waiting import settled
from kvrail.transport.base import Announcement
from kvrail.wire.v1.common_pb2 import Span
from kvrail.wire.v1.prefill_pb2 import (
    Accepted,
    FirstToken,
    FrameAnnounced,
    Heartbeat,
    PrefillReply,
    TransferDone,
)

log = logging.getLogger(__name__)

Deliver = Callable[[PrefillReply], Awaitable[None]]
"""Sends the next reply."""

TAKEN_WITHIN_S = 60.0
"""A receiver that takes no reply for this long is given up: pages wait for it."""


class PrefillReplies:
    """What a prefill worker answers to one call. Belongs to one event loop.

    Replies are small, and frames are announced as they leave, so only `commit` waits.
    """

    def __init__(self) -> None:
        self._replies: deque[PrefillReply] = deque()
        self._frame_count = 0
        self._payload_bytes = 0
        self._committed = False
        self._finished = False
        self._failure: Exception | None = None
        self._changed = Signal()

    def accept(self, accepted: Accepted) -> None:
        """Answer the handshake; always the first reply."""
        self._put(PrefillReply(accepted=accepted))

    def heartbeat(self) -> None:
        """Say that the call is alive, though there is nothing to reply yet."""
        self._put(PrefillReply(heartbeat=Heartbeat()))

    def first_token(self, first_token: FirstToken) -> None:
        """Send the first token."""
        self._put(PrefillReply(first_token=first_token))

    def announce(self, announcement: Announcement) -> None:
        """Say that a frame's payload leaves now. Raises TransferAbortedError once either end gave up."""
        self._put(
            PrefillReply(
                announced=FrameAnnounced(
                    head=announcement.head,
                    payload_bytes=announcement.payload_bytes,
                    on_device=announcement.on_device,
                )
            )
        )
        self._frame_count += 1
        self._payload_bytes += announcement.payload_bytes

    async def commit(self, spans: Sequence[Span] = ()) -> None:
        """Say that every frame has left, and report `spans`; returns once all replies have.

        Raises TransferAbortedError where the receiver gives up before that.
        """
        done = TransferDone(frame_count=self._frame_count, payload_bytes=self._payload_bytes, spans=spans)
        self._put(PrefillReply(done=done))
        self._committed = True
        while not self._finished:
            await self._changed.wait()
            if self._failure is not None and not self._finished:
                raise self._aborted()

    def close(self, failure: Exception) -> None:
        """End the call with an error, for both ends; the first one stays."""
        if self._failure is None and not self._finished:
            self._failure = failure
            self._replies.clear()
        self._changed.wake()

    async def serve(self, work: Coroutine[Any, Any, None], deliver: Deliver) -> None:
        """Run `work`, which answers here and commits, and deliver the replies. When this ends, `work` has ended.

        If `deliver` raises or this is cancelled, the receiver is gone: the work is cancelled, and other users of these
        replies get TransferAbortedError. Raises what the work raises, WorkerUnavailableError if something else cancels
        it, KvrailError if it ends without a commit, TransferAbortedError if the receiver takes no replies.
        """
        task = asyncio.create_task(work, name="prefill call")
        task.add_done_callback(lambda task: self.close(_ending(task)))
        try:
            done = False
            while not done:
                reply = await self._take()
                done = reply.HasField("done")
                try:
                    async with asyncio.timeout(TAKEN_WITHIN_S):
                        await deliver(reply)
                except TimeoutError:
                    raise TransferAbortedError(f"the receiver took no reply for {TAKEN_WITHIN_S:g} s") from None
                except asyncio.CancelledError:
                    if done:  # it may have left: a receiver that goes now has it, or no longer wants it
                        self._finish()
                    raise
            self._finish()
            await asyncio.wait((task,))
        finally:
            if not self._finished:  # else the work ends by itself, even if the receiver leaves before
                self.close(TransferAbortedError("the receiver went away"))
                task.cancel()
            await settled(task)
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Exception) and not isinstance(error, KvrailError) and error is not self._failure:
                log.error("a prefill call failed after its end", exc_info=error)

    async def _take(self) -> PrefillReply:
        """Take what goes out next. Raises what `close` was given."""
        while self._failure is None:
            if self._replies:
                return self._replies.popleft()
            await self._changed.wait()
        raise self._failure

    def _finish(self) -> None:
        """Note that the end has left; `commit` returns."""
        self._finished = True
        self._changed.wake()

    def _put(self, reply: PrefillReply) -> None:
        if self._failure is not None:
            raise self._aborted()
        if self._committed:
            raise FrameError("a reply follows the commit; commit last")
        self._replies.append(reply)
        self._changed.wake()

    def _aborted(self) -> TransferAbortedError:
        """Make the sender's view of a failure."""
        assert self._failure is not None
        if isinstance(self._failure, TransferAbortedError):
            return self._failure
        return TransferAbortedError(f"the transfer ended early: {reason_of(self._failure)}")


def _ending(task: asyncio.Task[None]) -> Exception:
    """Why nothing follows once the handler has ended, unless it has committed."""
    if task.cancelled():
        return WorkerUnavailableError("the prefill worker stopped during a call")
    error = task.exception()
    return error if isinstance(error, Exception) else KvrailError("the prefill worker ended a call without a commit")
