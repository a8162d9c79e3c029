"""The worker's end of a trunk: one gRPC stream that carries many calls of Generate.

A call is served by the same method that serves one alone. What all of them say at one moment leaves in one message, so
a step of the engine costs one message and not one for each request. Only a few messages are on their way at a time: a
caller that is slow to take them gets fewer and larger ones, in which each call has several replies.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio

from kvrail.errors import DeadlineError, IncompatibleError, InvalidRequestError, KvrailError
from kvrail.rpc.errors import TRAILER, abort_with, is_cancelling, to_status
from kvrail.wire.v1 import decode_pb2

log = logging.getLogger(__name__)

MAX_UNTAKEN_MESSAGES = 8
"""Messages on their way that the caller has not said to have taken; it says so each TAKEN_EVERY (trunk.py)."""
MAX_WAITING_REPLIES = 1024
"""Replies that wait for a trunk before its calls do: a caller reads ahead of its clients, so it is slow as a whole."""

MAX_TIMEOUT_S = 1e9
"""Of a call: more than an event loop's clock can always tell."""

INTERNAL = "internal error; the worker's log has the cause"

Method = Callable[[decode_pb2.GenerateRequest, Any], Any]
"""A servicer's Generate: an async generator, or a coroutine that writes to its context."""


def serving_trunks(method: Method) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]:
    """A servicer's GenerateMany, whose calls `method` serves."""

    async def generate_many(_: object, context: grpc.aio.ServicerContext) -> None:
        try:
            await TrunkServer(method, context).run()
        except KvrailError as error:
            await abort_with(context, error)

    return generate_many


class _Ended(grpc.aio.AbortError):  # type: ignore[misc]
    """A method has aborted its call."""

    def __init__(self, end: decode_pb2.CallEnd) -> None:
        super().__init__(end.message)
        self.end = end


def _no_timeout(timeout_s: float) -> InvalidRequestError:
    return InvalidRequestError(
        f"timeout_s is {timeout_s}; it must be at least 0, which is none, and at most {MAX_TIMEOUT_S:g}",
        param="timeout_s",
    )


def _end_of(error: KvrailError) -> decode_pb2.CallEnd:
    code, message, trailer = to_status(error)
    return decode_pb2.CallEnd(code=code.value[0], message=message, error=trailer)


class CallContext:
    """What a method needs of gRPC's context, for one call on a trunk."""

    def __init__(self, trunk: "TrunkServer", call: int, timeout_s: float) -> None:
        """timeout_s: 0 for a call without a deadline."""
        self._trunk = trunk
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + timeout_s if timeout_s else None

    async def write(self, reply: decode_pb2.GenerateReply) -> None:
        """Send a reply; waits only where the whole trunk is held up."""
        self._trunk.tell(self._call, reply)
        if self._trunk.full:
            await self._trunk.room()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, bytes]] = ()
    ) -> NoReturn:
        """End the call with a status."""
        error = next((value for key, value in trailing_metadata if key == TRAILER), b"")
        raise _Ended(decode_pb2.CallEnd(code=code.value[0], message=details, error=error))

    def time_remaining(self) -> float | None:
        """Seconds until the deadline, or None where the call has none."""
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    def peer(self) -> str:
        """The caller's address, as gRPC writes it."""
        return self._trunk.peer


class TrunkServer:
    """One trunk: its calls, each in a task, and what they have said since the last message left."""

    def __init__(self, method: Method, context: grpc.aio.ServicerContext) -> None:
        self._method = method
        self._context = context
        self.peer: str = context.peer()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._message = decode_pb2.TrunkReply()
        self._parts: dict[int, decode_pb2.CallReplies] = {}  # of the message, by call
        self._count = 0
        self._untaken = 0  # messages
        self._closing = False
        self._any, self._room, self._taken = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Serve until the caller closes the trunk; whatever ends it ends its calls, and waits for their end."""
        reading, writing = asyncio.create_task(self._read()), asyncio.create_task(self._write())
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                # gRPC cannot send a status while a message is half sent: the writer ends by itself.
                self._closing = True
                for event in (self._any, self._taken):
                    event.set()
            await writing
            reading.result()
        finally:
            running = [reading, writing, *self._tasks.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    @property
    def full(self) -> bool:
        """Whether calls must wait before they say more."""
        return self._count >= MAX_WAITING_REPLIES

    async def room(self) -> None:
        """Wait until the message that is being filled has left."""
        self._room.clear()
        await self._room.wait()

    def tell(self, call: int, reply: decode_pb2.GenerateReply) -> None:
        """Put a reply into the next message."""
        self._part(call).replies.append(reply)
        self._count += 1

    def _part(self, call: int) -> decode_pb2.CallReplies:
        part = self._parts.get(call)
        if part is None:
            part = self._parts[call] = self._message.calls.add(call=call)
            self._any.set()
        return part

    async def _read(self) -> None:
        while (order := await self._context.read()) is not grpc.aio.EOF:
            if order is None:  # what gRPC makes of bytes that it cannot read
                raise IncompatibleError("the caller sent what is no message of this protocol version")
            if order.taken:
                self._untaken = max(0, self._untaken - order.taken)
                self._taken.set()
            if order.HasField("check"):
                self._answer(order.check)
            elif order.HasField("start"):
                self._begin(order)
            elif (task := self._tasks.get(order.call)) is not None:
                task.cancel()

    def _answer(self, check: decode_pb2.Check) -> None:
        self._message.checked.SetInParent()
        self._message.checked.unknown.extend(call for call in check.calls if call not in self._tasks)
        self._any.set()

    def _begin(self, order: decode_pb2.TrunkRequest) -> None:
        if order.call in self._tasks:
            raise IncompatibleError(f"the caller began call {order.call} twice on one trunk; number calls anew")
        self._tasks[order.call] = asyncio.create_task(self._serve(order))

    async def _serve(self, order: decode_pb2.TrunkRequest) -> None:
        """One call from its start to its end; nothing is said of a call that was dropped."""
        call, timeout_s = order.call, order.timeout_s
        end = None
        try:
            if not 0.0 <= timeout_s <= MAX_TIMEOUT_S:
                raise _Ended(_end_of(_no_timeout(timeout_s)))
            async with asyncio.timeout(timeout_s or None):
                await _complete(self._method(order.start, context := CallContext(self, call, timeout_s)), context)
            end = decode_pb2.CallEnd()
        except _Ended as ended:
            end = ended.end
        except asyncio.CancelledError:
            if is_cancelling():
                raise
            log.exception("call %d of a trunk was cancelled by what it waited for", call)
            end = _end_of(KvrailError(INTERNAL))
        except TimeoutError:
            end = _end_of(DeadlineError(f"the request took longer than the {timeout_s:g} s that its caller gave it"))
        except Exception:
            log.exception("call %d of a trunk failed", call)
            end = _end_of(KvrailError(INTERNAL))
        finally:
            del self._tasks[call]
        self._part(call).end.CopyFrom(end)

    async def _write(self) -> None:
        while True:
            await self._any.wait()
            while self._untaken >= MAX_UNTAKEN_MESSAGES and not self._closing:
                self._taken.clear()
                await self._taken.wait()
            if self._closing:
                return
            self._any.clear()
            self._untaken += 1
            message = self._message
            self._message, self._parts, self._count = decode_pb2.TrunkReply(), {}, 0
            self._room.set()
            await self._context.write(message)


async def _complete(replies: Any, context: CallContext) -> None:
    """Take what a method gives to its end."""
    if inspect.isawaitable(replies):
        await replies
        return
    async with aclosing(replies):
        async for reply in replies:
            await context.write(reply)
