"""The Decode service: requests are submitted by unary calls, and their output leaves on one stream per router.

What all requests generate at one moment leaves in one message, so a step of the engine costs one message and not one
for each request. Only a few messages are on their way at a time: a router that takes them slowly gets fewer and larger
ones, in which each request has several replies.
"""

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from time import monotonic

import grpc
import grpc.aio

from kvrail.errors import DeadlineError, IncompatibleError, InvalidRequestError, KvrailError, WorkerUnavailableError
from kvrail.rpc.errors import internal_error, is_cancelling, maps_errors, to_status
from kvrail.wire.v1 import decode_pb2, decode_pb2_grpc

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
"""Time between two heartbeats; a router gives a silent stream up after six of them (events.py)."""
MAX_UNTAKEN_MESSAGES = 8
"""Messages on their way that the router has not acknowledged; it does so every TAKEN_EVERY messages (events.py)."""
MAX_WAITING_REPLIES = 1024
"""Replies that wait for one message to leave, a large one counted as one for each KiB: gRPC bounds messages. Then
requests wait too. A router reads ahead of its clients, so one that is slow is slow as a whole."""
MAX_TIMEOUT_S = 1e9
"""Longest deadline of a request: an event loop's clock cannot always represent more."""


Write = Callable[[decode_pb2.GenerateReply], Awaitable[None]]
"""Sends a reply to the router; waits while too many wait for it."""


class DecodeService(decode_pb2_grpc.DecodeServicer, ABC):
    """Serves kvrail.v1.Decode but for GetStatus."""

    def __init__(self) -> None:
        self._streams: dict[int, EventSender] = {}

    @abstractmethod
    async def generate(self, request: decode_pb2.GenerateRequest, write: Write, until: float | None) -> None:
        """Serve one request, sending its replies by `write`. until: its deadline on time.monotonic, if it has one.

        It raises from the error tree, and is cancelled when the request is aborted.
        """

    @maps_errors
    async def Events(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """Send the output of a router's requests until it leaves; then end those that still run."""
        stream = secrets.randbits(64) or 1
        sender = self._streams[stream] = EventSender(self, context, stream)
        try:
            await sender.run()
        finally:
            del self._streams[stream]
            await sender.close()

    async def flushed(self) -> None:
        """Wait until the output of requests so far has left, on every open stream."""
        for sender in list(self._streams.values()):
            await sender.flushed()

    @maps_errors
    async def Submit(
        self, request: decode_pb2.SubmitRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.SubmitReply:
        """Start a request whose output goes to an open stream."""
        sender = self._streams.get(request.stream)
        if sender is None:
            raise WorkerUnavailableError(f"no stream {request.stream:016x} is open here; open one first")
        return decode_pb2.SubmitReply(sent=sender.start(request))

    @maps_errors
    async def Abort(self, request: decode_pb2.AbortRequest, context: grpc.aio.ServicerContext) -> decode_pb2.AbortReply:
        """End requests; those that have ended, and streams that are closed, are skipped."""
        if (sender := self._streams.get(request.stream)) is not None:
            sender.abort(request.numbers)
        return decode_pb2.AbortReply()


class EventSender:
    """One stream's requests, each in a task, and what they have generated since the last message left."""

    def __init__(self, service: DecodeService, context: grpc.aio.ServicerContext, stream: int) -> None:
        """context: of the call of `Events`. stream: the number that its first message brings."""
        self._service = service
        self._context = context
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._message = decode_pb2.EventBatch(stream=stream)
        self._events: dict[int, decode_pb2.RequestEvents] = {}  # of the message, by request
        self._waiting = 0  # replies in the message, and KiB of them
        self._sent = self._taken = 0  # messages
        self._heartbeat_due, self._writing = True, False
        self._any, self._room, self._acknowledged, self._left = (asyncio.Event() for _ in range(4))
        self._any.set()

    async def flushed(self) -> None:
        """Wait until everything has left, or the stream has ended."""
        while self._writing or self._any.is_set():
            self._left.clear()
            await self._left.wait()

    async def run(self) -> None:
        """Send messages, until cancelled."""
        beside = asyncio.create_task(self._beat()), asyncio.create_task(self._read())
        try:
            while True:
                await self._any.wait()
                while self._sent - self._taken >= MAX_UNTAKEN_MESSAGES:
                    self._acknowledged.clear()
                    await self._acknowledged.wait()
                self._any.clear()
                if self._heartbeat_due:
                    self._message.running.SetInParent()
                    self._message.running.numbers.extend(self._tasks)
                    self._heartbeat_due = False
                message = self._message
                self._message, self._events, self._waiting = decode_pb2.EventBatch(), {}, 0
                self._sent += 1
                self._room.set()
                self._writing = True
                await self._context.write(message)
                self._writing = False
                self._left.set()
        finally:
            self._writing = False
            self._any.clear()
            self._left.set()
            for task in beside:
                task.cancel()

    async def _read(self) -> None:
        """Read acknowledgements."""
        while isinstance(message := await self._context.read(), decode_pb2.EventsRequest):
            self._taken += message.taken
            self._acknowledged.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._heartbeat_due = True
            self._any.set()

    async def close(self) -> None:
        """End all requests, and wait for their end."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def start(self, request: decode_pb2.SubmitRequest) -> int:
        """Start a request; returns the number of messages that were sent before. Raises for one that cannot be."""
        if request.number in self._tasks:
            raise IncompatibleError(f"request {request.number} runs already; number requests in order")
        if not 0.0 <= request.timeout_s <= MAX_TIMEOUT_S:
            raise InvalidRequestError(
                f"timeout_s is {request.timeout_s}; it must be from 0, which is none, to {MAX_TIMEOUT_S:g}",
                param="timeout_s",
            )
        task = self._tasks[request.number] = asyncio.create_task(self._serve(request))
        task.add_done_callback(lambda _: self._tasks.pop(request.number))
        return self._sent

    def abort(self, numbers: Iterable[int]) -> None:
        """End requests; nothing more is sent for them."""
        for number in numbers:
            if (task := self._tasks.get(number)) is not None:
                task.cancel()

    async def write(self, number: int, reply: decode_pb2.GenerateReply) -> None:
        """Put a reply into the next message; while that is full, wait until it has left."""
        while self._waiting >= MAX_WAITING_REPLIES:
            self._room.clear()
            await self._room.wait()
        self._events_of(number).replies.append(reply)
        self._waiting += 1 + reply.ByteSize() // 1024

    def _events_of(self, number: int) -> decode_pb2.RequestEvents:
        events = self._events.get(number)
        if events is None:
            events = self._events[number] = self._message.requests.add(number=number)
            self._any.set()
        return events

    async def _serve(self, submitted: decode_pb2.SubmitRequest) -> None:
        """Serve one request from its start to its end; if it is aborted, no end is sent."""
        number, timeout_s, request = submitted.number, submitted.timeout_s, submitted.request
        error: KvrailError | None = None
        until = monotonic() + timeout_s if timeout_s else None
        try:
            async with asyncio.timeout(timeout_s or None):
                await self._service.generate(request, partial(self.write, number), until)
        except KvrailError as raised:
            error = raised
        except TimeoutError:
            error = DeadlineError(f"the request took longer than the {timeout_s:g} s that its caller gave it")
        except asyncio.CancelledError as cancelled:
            if is_cancelling():
                raise
            error = internal_error(cancelled, request)  # something that it waited for was cancelled
        except Exception as raised:  # noqa: BLE001 - the boundary of the process
            error = internal_error(raised, request)
        end = self._events_of(number).end
        end.SetInParent()
        if error is not None:
            code, message, trailer = to_status(error)
            end.code, end.message, end.error = code.value[0], message, trailer
