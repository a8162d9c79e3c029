"""The decode worker's end of one prefill call: what the prefill worker says, and the frames that it announces."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kvrail.errors import FrameError, KvrailError, RequestCancelledError
from kvrail.rpc.signal import Signal
from kvrail.transport.base import Announcement
from kvrail.wire.v1.common_pb2 import Span
from kvrail.wire.v1.prefill_pb2 import Accepted, FirstToken, PrefillReply, TransferDone

log = logging.getLogger(__name__)

MAX_UNTAKEN = 1024
"""Announcements that may lie here untaken. A sender has a few payloads under way, each announced once."""


class PrefillCall:
    """One call of a prefill worker. One task reads and dispatches.

    on_heartbeat: called when the worker says that it is at work, though it has nothing else to send. accepted_already:
    the handshake's answer, if it has come. spans: the worker's, which it sends at the end of the transfer if a trace
    was asked for. End it by reading to the end or by `cancel`; as an async context manager it cancels by itself and
    leaves nothing pending.
    """

    def __init__(self, replies: AsyncGenerator[PrefillReply, None]) -> None:
        """replies: the worker's, until the end; opens the call when it is first asked, and raises what went wrong."""
        self.accepted_already: Accepted | None = None
        self._first_token: FirstToken | None = None
        self._announced: deque[Announcement] = deque()
        self._frame_count = 0
        self._payload_bytes = 0
        self.spans: list[Span] = []
        self.on_heartbeat: Callable[[], None] = lambda: None
        self._done = False
        self._failure: KvrailError | None = None
        self._changed = Signal()
        self._task = asyncio.create_task(self._read(replies), name="prefill call")
        self._task.add_done_callback(self._on_read)

    async def accepted(self) -> Accepted:
        """Wait for the handshake's answer; raises what the worker refused with."""
        while self.accepted_already is None:
            await self._wait()
        return self.accepted_already

    async def first_token(self) -> FirstToken:
        """Wait for the first token; raises what ended the call before it."""
        while self._first_token is None:
            if self._done:
                raise FrameError("the transfer ended without a first token")
            await self._wait()
        return self._first_token

    async def announced(self) -> Announcement | None:
        """The next frame on its way, in order, or None once all were announced and their number is right.

        Raises FrameError where the sender counts others than came; TransferAbortedError where it gave up;
        WorkerUnavailableError where it was lost.
        """
        while self._failure is None and not self._announced and not self._done:
            await self._wait()
        if self._failure is not None:
            raise self._failure
        return self._announced.popleft() if self._announced else None

    def cancel(self) -> None:
        """End the call now, on both ends; a caller that still waits here gets RequestCancelledError."""
        self._fail(RequestCancelledError("the prefill call was cancelled here"))

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
        if self._failure is None and not self._done:
            self._failure = failure
            self._announced.clear()
        self._task.cancel()
        self._changed.wake()

    async def _read(self, replies: AsyncGenerator[PrefillReply, None]) -> None:
        async with aclosing(replies):
            async for reply in replies:
                self._take(reply)
        if not self._done:
            raise FrameError("the prefill worker ended the call before the end of its transfer")

    def _on_read(self, task: asyncio.Task[None]) -> None:
        """Pass on how reading ended to callers that wait; once the transfer is complete, none does."""
        error = RequestCancelledError("the prefill call was cancelled here") if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, KvrailError):
            self._fail(error)
            return
        log.error("a prefill call failed", exc_info=error)
        self._fail(KvrailError("internal error in a prefill call; this process's log has the cause"))

    def _take(self, reply: PrefillReply) -> None:
        """Check a reply and put it where it is waited for."""
        kind = reply.WhichOneof("reply")
        if kind is None:
            raise FrameError("the prefill worker sent an empty reply")
        if self._done:
            raise FrameError("a reply follows the end of the transfer")
        if (self.accepted_already is None) != (kind == "accepted"):
            first = "accepted twice" if kind == "accepted" else f"sent {kind} before it accepted"
            raise FrameError(f"the prefill worker {first}")
        if kind == "accepted":
            self.accepted_already = reply.accepted
        elif kind == "first_token":
            if self._first_token is not None:
                raise FrameError("the prefill worker sent a second first token")
            self._first_token = reply.first_token
        elif kind == "announced":
            if len(self._announced) == MAX_UNTAKEN:
                raise FrameError(f"the prefill worker announced more than {MAX_UNTAKEN} frames that were not taken")
            announced = reply.announced
            self._frame_count += 1
            self._payload_bytes += announced.payload_bytes
            self._announced.append(Announcement(announced.head, announced.payload_bytes, announced.on_device))
        elif kind == "heartbeat":
            self.on_heartbeat()
        else:
            self._end(reply.done)
        self._changed.wake()

    def _end(self, done: TransferDone) -> None:
        if (done.frame_count, done.payload_bytes) != (self._frame_count, self._payload_bytes):
            raise FrameError(
                f"the sender counts {done.frame_count} frames and {done.payload_bytes} bytes;"
                f" {self._frame_count} and {self._payload_bytes} were announced"
            )
        self.spans = list(done.spans)
        self._done = True
