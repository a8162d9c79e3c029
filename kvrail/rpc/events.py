"""A router's requests to one decode worker, and the stream on which their output comes back.

A unary call submits a request. What the worker sends to all requests comes on one gRPC stream, `Events`, which opens
with the first request. When that stream ends or is silent, the worker is lost: every request on it fails, and the next
request opens another. A slow reader delays no other request: its replies wait here up to a bound, beyond which
that request alone is ended.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio

from kvrail.errors import (
    DeadlineError,
    IncompatibleError,
    InvalidRequestError,
    KvrailError,
    PeerRefusedError,
    RequestCancelledError,
    WorkerUnavailableError,
    reason_of,
)
from kvrail.rpc.errors import code_of, from_rpc_error, from_status, is_cancelling
from kvrail.rpc.options import MAX_MESSAGE_BYTES
from kvrail.wire.v1 import decode_pb2

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
"""Leaves room for what a submit adds to the request."""
MAX_UNREAD_BYTES = 1 << 20
"""Replies of one request that wait for a slow reader: some 20,000 tokens without log probabilities."""
UNREAD_OVERHEAD_BYTES = 64
"""Memory that a waiting reply takes beside its own bytes."""
TAKEN_EVERY = 4
"""Messages that one acknowledgement covers: half of those that the worker lets be on their way."""
CHECK_EVERY_S = 2.0
"""Time between two checks for silence. The worker sends a heartbeat as often."""
SILENT_CHECKS = 6
"""Checks without a message between them after which the worker is lost. They are counted, not timed: a router that was
itself suspended has not waited."""
ANSWER_S = CHECK_EVERY_S * SILENT_CHECKS
"""Longest wait for the answer to a submit or an abort."""


class ReplyStream:
    """The replies of one request; `read_waiting`, `read` and `async for` take them in order.

    Leaving the stream unfinished requires `cancel()`; as an async context manager it does that itself.
    """

    def __init__(
        self,
        stream: "EventStream",
        number: int,
        peer: str,
        timeout_s: float | None,
        on_overflow: Callable[[], object] | None,
    ) -> None:
        """timeout_s: after which the request ends, whether or not the worker ends it; None: no limit."""
        self._stream = stream
        self._number = number
        self._peer = peer
        self._on_overflow = on_overflow
        self._fresh: list[decode_pb2.GenerateReply] = []  # for a reader that has been woken
        # Replies without a waiting reader are kept as bytes: as an object each would keep the whole message that it
        # came in, with the replies to other requests.
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._error: KvrailError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            error = DeadlineError(f"{peer} did not answer within the {timeout_s:g} s that were left to it")
            self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._drop, error)
        self.ended = False
        self.accepted_after: int | None = None
        """Messages that the stream had sent before the worker accepted the request; None until it has."""

    async def read_waiting(self) -> list[decode_pb2.GenerateReply]:
        """Take all replies that wait, or else the next one; empty at the end. Raises the error that the worker raised.

        After `cancel()` from another task: RequestCancelledError.
        """
        while not (self._fresh or self._unread):
            if self._error is not None:
                raise self._error
            if self.ended:
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
        """End the request now; harmless if it has ended."""
        self._drop(RequestCancelledError(f"the call to {self._peer} was cancelled here"))

    async def __aenter__(self) -> "ReplyStream":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()

    def take(self, events: decode_pb2.RequestEvents) -> None:
        """Take in what the worker sent for this request."""
        if events.replies:
            self._keep(events)
        if not self.ended and events.HasField("end"):
            end, error = events.end, None
            if end.code:
                trailers = (end.error,) if end.error else ()
                error = from_status(code_of(end.code), end.message, trailers, peer=self._peer)
            self.end(error)

    def end(self, error: KvrailError | None) -> None:
        """Nothing more comes: the reader gets the replies that are here, then the error."""
        if self.ended:
            return
        self.ended, self._error = True, error
        self._stream.forget(self._number)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _keep(self, events: decode_pb2.RequestEvents) -> None:
        if self._reader is not None and not self._reader.done():
            self._fresh.extend(events.replies)
            self._reader.set_result(None)
            return
        for reply in events.replies:
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
        if not self.ended:
            self.end(error)
            if self.accepted_after is not None:  # if not, it is aborted once it is accepted
                self._stream.abort(self._number)


class EventStream:
    """One stream of events, from its opening until it breaks, and the requests whose output comes on it."""

    def __init__(self, stub: Any, peer: str) -> None:
        """stub: of the Decode service. peer: names the worker in errors."""
        self._stub = stub
        self._peer = peer
        self._id = 0  # the worker's number for the stream, which comes with the first message
        self._events = stub.Events()
        self._requests: dict[int, ReplyStream] = {}
        self._numbers = itertools.count(1)
        self._aborted: list[int] = []  # numbers of requests, not sent yet
        self._received = 0  # messages
        self._silent_checks = 0
        self._open = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.broken = False
        self._start(self._read())
        self._start(self._watch())

    def submit(
        self,
        request: decode_pb2.GenerateRequest,
        *,
        timeout_s: float | None = None,
        on_overflow: Callable[[], object] | None = None,
    ) -> ReplyStream:
        """Start a request; the worker gets `timeout_s` as its deadline. Its errors are raised where replies are read.

        on_overflow: called if the request is ended because its replies are not read. Raises InvalidRequestError for a
        request that is too large to send.
        """
        size = request.ByteSize()
        if size > MAX_REQUEST_BYTES:
            raise InvalidRequestError(
                f"the request takes {size} bytes between router and worker; at most {MAX_REQUEST_BYTES} are taken, "
                "send a shorter one"
            )
        number = next(self._numbers)
        replies = self._requests[number] = ReplyStream(self, number, self._peer, timeout_s, on_overflow)
        message = decode_pb2.SubmitRequest(number=number, timeout_s=timeout_s or 0, request=request)
        self._start(self._submit(number, replies, message))
        return replies

    async def _submit(self, number: int, replies: ReplyStream, message: decode_pb2.SubmitRequest) -> None:
        await self._open.wait()
        if replies.ended:
            return
        message.stream = self._id
        try:
            reply: decode_pb2.SubmitReply = await self._ask(self._stub.Submit, message)
        except KvrailError as error:
            replies.end(error)
            return
        if replies.ended:
            self.abort(number)  # harmless where the worker has ended it
        replies.accepted_after = reply.sent

    def abort(self, number: int) -> None:
        """Have the worker end a request; those of one moment share one call."""
        self._aborted.append(number)
        if len(self._aborted) == 1 and not self.broken:
            self._start(self._abort())

    async def _abort(self) -> None:
        message = decode_pb2.AbortRequest(stream=self._id, numbers=self._aborted)
        self._aborted = []
        with contextlib.suppress(KvrailError):
            await self._ask(self._stub.Abort, message)

    async def _ask(self, method: Callable[..., Any], message: Any) -> Any:
        """Make a unary call. If it is not known what became of it, the stream breaks, which aborts its requests."""
        try:
            return await method(message, timeout=ANSWER_S)
        except grpc.aio.AioRpcError as failed:
            error = from_rpc_error(failed, peer=self._peer)
            if not isinstance(error, WorkerUnavailableError | DeadlineError | RequestCancelledError):
                raise error from failed
            error = WorkerUnavailableError(f"{error}; ask another worker")
        except Exception as failed:
            log.exception("a call to %s could not be made", self._peer)
            error = WorkerUnavailableError(f"{self._peer} cannot be called: {reason_of(failed)}")
        self.break_off(error)
        raise error

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, number: int) -> None:
        """A request has ended."""
        self._requests.pop(number, None)

    def break_off(self, error: KvrailError) -> None:
        """End the stream at once; all its requests fail with `error`."""
        self.broken = True
        self._events.cancel()
        for replies in list(self._requests.values()):
            replies.end(error)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def close(self) -> None:
        """End the stream and the requests that still run on it."""
        tasks = list(self._tasks)
        self.break_off(WorkerUnavailableError(f"the stream to {self._peer} was closed here"))
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        error: KvrailError = WorkerUnavailableError(f"{self._peer} ended its stream; ask another worker")
        try:
            while (message := await self._events.read()) is not grpc.aio.EOF:
                if message is None:  # what gRPC makes of bytes that it cannot read
                    error = IncompatibleError(f"{self._peer} sent a reply that is no message of this protocol version")
                    break
                self._take(message)
                if self._received % TAKEN_EVERY == 0:
                    with contextlib.suppress(asyncio.InvalidStateError):  # it has ended; the next read raises why
                        await self._events.write(decode_pb2.EventsRequest(taken=TAKEN_EVERY))
        except grpc.aio.AioRpcError as broken:
            error = from_rpc_error(broken, peer=self._peer)
            if not isinstance(error, WorkerUnavailableError | IncompatibleError | PeerRefusedError):
                error = WorkerUnavailableError(str(error))  # whatever ended it, no single request did
        except asyncio.CancelledError:
            error = WorkerUnavailableError(f"the stream to {self._peer} was closed here")
            if is_cancelling():
                raise
        finally:
            self.break_off(error)

    def _take(self, message: decode_pb2.EventBatch) -> None:
        self._received += 1
        self._silent_checks = 0
        for events in message.requests:
            if (replies := self._requests.get(events.number)) is not None:
                replies.take(events)
        if message.stream:
            self._id = message.stream
            self._open.set()
        if message.HasField("running"):
            self._compare(set(message.running.numbers))

    def _compare(self, running: set[int]) -> None:
        """End requests that the worker has lost: accepted before this heartbeat, not running, and no end was sent."""
        for number, replies in list(self._requests.items()):
            accepted = replies.accepted_after is not None and replies.accepted_after < self._received
            if accepted and number not in running:
                log.error("%s has lost request %d and never sent its end", self._peer, number)
                replies.end(WorkerUnavailableError(f"{self._peer} has lost the request; ask another worker"))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            self._silent_checks += 1
            if self._silent_checks > SILENT_CHECKS:
                log.error("%s sends nothing on a stream of %d requests", self._peer, len(self._requests))
                self.break_off(WorkerUnavailableError(f"{self._peer} sends nothing on its stream; ask another worker"))
                return
