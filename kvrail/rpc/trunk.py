"""The caller's end of a trunk: all its calls to one decode worker over one gRPC stream.

A trunk opens with its first call and stays. Where it breaks, every call on it hears that the worker is lost, and the
next call opens another. One call's replies never wait for another's reader: what its own reader does not take waits
here, up to a bound, and beyond it that call alone is ended. No call is waited for in vain: while there are any, the
worker is asked over the trunk itself which of them it has.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from kvrail.errors import (
    DeadlineError,
    IncompatibleError,
    InvalidRequestError,
    KvrailError,
    RequestCancelledError,
    WorkerUnavailableError,
    reason_of,
)
from kvrail.rpc.errors import code_of, from_rpc_error, from_status, is_cancelling
from kvrail.rpc.options import MAX_MESSAGE_BYTES
from kvrail.wire.v1 import decode_pb2

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
"""A larger request would break the trunk for all calls."""
MAX_UNREAD_BYTES = 1 << 20
"""Replies of one call that wait for a slow reader: some 20,000 tokens without log probabilities."""
TAKEN_EVERY = 4
"""Messages after which the worker is told that they were taken; half of what it has on their way."""
CHECK_EVERY_S = 2.0
"""How often the worker is asked which calls it has. gRPC's own pings tell of the connection, not of the stream."""
UNANSWERED_CHECKS = 6
"""Such pauses after which a question that has no answer makes the trunk a broken one."""
UNREAD_OVERHEAD_BYTES = 64
"""What a waiting reply takes beside its own bytes."""


class ReplyStream:
    """The replies of one call; `async for`, `read` or `read_waiting` takes them in order.

    Leaving the stream unfinished requires `cancel()`; used as an async context manager it does so by itself.
    """

    def __init__(self, line: "_Line", call: int, peer: str, on_overflow: Callable[[], object] | None) -> None:
        self._line = line
        self._call = call
        self._peer = peer
        self._on_overflow = on_overflow
        self._fresh: list[decode_pb2.GenerateReply] = []  # that a reader has been woken for
        # What nobody waited for is kept as bytes: a reply would keep the whole message that it came in, other calls'
        # replies included.
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._ended = False
        self._error: KvrailError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    async def read_waiting(self) -> list[decode_pb2.GenerateReply]:
        """Take all replies that wait, or else the next one; empty at the end. Raises the error that the peer raised.

        After `cancel()` from another task: RequestCancelledError.
        """
        while not (self._fresh or self._unread):
            if self._error is not None:
                raise self._error
            if self._ended:
                return []
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                self._reader = None
        replies, self._fresh = self._fresh, []
        if self._unread:
            replies += [decode_pb2.GenerateReply.FromString(reply) for reply in self._unread]
            self._unread, self._unread_bytes = [], 0
        return replies

    async def read(self) -> decode_pb2.GenerateReply | None:
        """Take the next reply, or None at the end; raises as `read_waiting` does."""
        replies = await self.read_waiting()
        if not replies:
            return None
        self._fresh = replies[1:]
        return replies[0]

    async def __aiter__(self) -> AsyncIterator[decode_pb2.GenerateReply]:
        while (reply := await self.read()) is not None:
            yield reply

    def cancel(self) -> None:
        """End the call now; harmless where it has ended."""
        self._drop(RequestCancelledError(f"the call to {self._peer} was cancelled here"))

    async def __aenter__(self) -> "ReplyStream":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()

    def expire_after(self, timeout_s: float) -> None:
        """End the call after so many seconds, whether or not the peer does."""
        error = DeadlineError(f"{self._peer} did not answer within the {timeout_s:g} s that were left to it")
        self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._drop, error)

    def take(self, news: decode_pb2.CallReplies) -> None:
        """Take in what came."""
        if news.replies:
            self._keep(news)
        if not self._ended and news.HasField("end"):
            self.end(self._error_in(news.end))

    def _error_in(self, end: decode_pb2.CallEnd) -> KvrailError | None:
        if not end.code:
            return None
        trailers = (end.error,) if end.error else ()
        return from_status(code_of(end.code), end.message, trailers, peer=self._peer)

    def end(self, error: KvrailError | None) -> None:
        """Nothing more comes; what has come can still be read, and then the error is raised."""
        if self._ended:
            return
        self._ended, self._error = True, error
        self._line.forget(self._call)
        if self._deadline is not None:
            self._deadline.cancel()
        self._wake()

    def _keep(self, news: decode_pb2.CallReplies) -> None:
        if self._reader is not None and not self._reader.done():
            self._fresh.extend(news.replies)
            self._reader.set_result(None)
            return
        for reply in news.replies:
            self._unread.append(reply.SerializeToString())
            self._unread_bytes += len(self._unread[-1]) + UNREAD_OVERHEAD_BYTES
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._drop(
                RequestCancelledError(
                    f"{len(self._unread)} replies wait for a client that does not read; the request is ended"
                )
            )
            if self._on_overflow is not None:
                self._on_overflow()

    def _drop(self, error: KvrailError) -> None:
        if not self._ended:
            self._line.order(decode_pb2.TrunkRequest(call=self._call))
            self.end(error)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _Line:
    """One gRPC stream, from its opening until it breaks or is closed."""

    def __init__(self, stream: Any, peer: str) -> None:
        self._stream = stream
        self._peer = peer
        self._calls: dict[int, ReplyStream] = {}
        self._orders: list[decode_pb2.TrunkRequest] = []
        self._any = asyncio.Event()
        self._last = 0
        self._unanswered = False
        self.broken = False
        self._ways = tuple(asyncio.create_task(way) for way in (self._read(), self._write(), self._check()))

    def begin(
        self, request: decode_pb2.GenerateRequest, timeout_s: float | None, on_overflow: Callable[[], object] | None
    ) -> ReplyStream:
        self._last += 1
        call = self._calls[self._last] = ReplyStream(self, self._last, self._peer, on_overflow)
        self.order(decode_pb2.TrunkRequest(call=self._last, start=request, timeout_s=timeout_s))
        if timeout_s is not None:
            call.expire_after(timeout_s)
        return call

    def order(self, order: decode_pb2.TrunkRequest) -> None:
        """Send an order after those that wait."""
        self._orders.append(order)
        self._any.set()

    def forget(self, call: int) -> None:
        self._calls.pop(call, None)

    async def close(self) -> None:
        """End the stream, and with it what still runs on it."""
        self.broken = True
        self._stream.cancel()
        for way in self._ways:
            way.cancel()
        await asyncio.gather(*self._ways, return_exceptions=True)

    async def _read(self) -> None:
        untold = 0
        error: KvrailError = WorkerUnavailableError(f"{self._peer} ended its stream; ask another worker")
        try:
            while (message := await self._stream.read()) is not grpc.aio.EOF:
                if message is None:  # what gRPC makes of bytes that it cannot read
                    error = IncompatibleError(f"{self._peer} sent a reply that is no message of this protocol version")
                    break
                self._take(message)
                untold += 1
                if untold == TAKEN_EVERY:
                    self.order(decode_pb2.TrunkRequest(taken=untold))
                    untold = 0
        except grpc.aio.AioRpcError as broken:
            error = from_rpc_error(broken, peer=self._peer)
            if isinstance(error, RequestCancelledError):  # by the worker: nobody here cancelled
                error = WorkerUnavailableError(str(error))
        except asyncio.CancelledError:
            error = WorkerUnavailableError(f"the stream to {self._peer} was closed here")
            if is_cancelling():
                raise
        finally:
            self.break_off(error)

    def _take(self, message: decode_pb2.TrunkReply) -> None:
        for news in message.calls:
            if (call := self._calls.get(news.call)) is not None:
                call.take(news)
        if message.HasField("checked"):
            self._unanswered = False
            for number in message.checked.unknown:
                if (call := self._calls.get(number)) is not None:
                    log.error("%s has lost call %d, whose end it never told", self._peer, number)
                    call.end(WorkerUnavailableError(f"{self._peer} has lost the request; ask another worker"))

    def break_off(self, error: KvrailError) -> None:
        """End the stream at once; all its calls hear why."""
        self.broken = True
        self._stream.cancel()
        for way in self._ways[1:]:
            way.cancel()
        for call in list(self._calls.values()):
            call.end(error)

    async def _write(self) -> None:
        try:
            while True:
                await self._any.wait()
                self._any.clear()
                orders, self._orders = self._orders, []
                for order in orders:
                    await self._stream.write(order)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader tells of it
        except Exception as error:
            log.exception("an order to %s could not be sent", self._peer)
            self.break_off(WorkerUnavailableError(f"the stream to {self._peer} takes no orders: {reason_of(error)}"))

    async def _check(self) -> None:
        """Ask again and again which calls the worker has; where no answer comes, the trunk is broken."""
        pauses = 0
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            pauses += 1
            if self._unanswered and pauses >= UNANSWERED_CHECKS:
                log.error("%s answers nothing on a stream of %d calls; it is given up", self._peer, len(self._calls))
                self.break_off(WorkerUnavailableError(f"{self._peer} answers nothing on its stream; ask another one"))
            elif self._calls and not self._unanswered:
                pauses, self._unanswered = 0, True
                self.order(decode_pb2.TrunkRequest(check=decode_pb2.Check(calls=self._calls)))


class Trunk:
    """Calls to one worker. open_stream: begins a gRPC call of GenerateMany. Belongs to one event loop."""

    def __init__(self, open_stream: Callable[[], Any], peer: str) -> None:
        self._open_stream = open_stream
        self._peer = peer
        self._line: _Line | None = None

    def call(
        self,
        request: decode_pb2.GenerateRequest,
        *,
        timeout_s: float | None = None,
        on_overflow: Callable[[], object] | None = None,
    ) -> ReplyStream:
        """Begin a call; `timeout_s` travels with it as its deadline. Raises InvalidRequestError for one too large.

        on_overflow: called where the call is ended because its replies are not read.
        """
        size = request.ByteSize()
        if size > MAX_REQUEST_BYTES:
            raise InvalidRequestError(
                f"the request takes {size} bytes between router and worker; at most {MAX_REQUEST_BYTES} are taken, "
                "send a shorter one"
            )
        if self._line is None or self._line.broken:
            self._line = _Line(self._open_stream(), self._peer)
        return self._line.begin(request, timeout_s, on_overflow)

    def give_up(self, reason: str) -> None:
        """Every call that runs hears that the worker is lost; the next call opens another stream."""
        if self._line is not None and not self._line.broken:
            self._line.break_off(WorkerUnavailableError(reason))

    async def close(self) -> None:
        """Close the stream; calls that still run are ended."""
        if self._line is not None:
            await self._line.close()
