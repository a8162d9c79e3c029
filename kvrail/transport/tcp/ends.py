"""The two ends of one attempt over a connection of its own."""

import asyncio
from collections.abc import Callable
from time import perf_counter

import torch

from kvrail.errors import FrameError, TransferAbortedError, reason_of
from kvrail.runtime.waiting import settled
from kvrail.transport.base import Payload
from kvrail.transport.regions import PooledRegion, RegionPool
from kvrail.transport.tcp.connection import Connection
from kvrail.transport.tcp.messages import SIZE
from kvrail.transport.tcp.stream import Stream

NO_DEVICE = "the transport tcp carries payloads in host memory only; copy the payload to the host before"

_NO_SIZE = b"\xff" * SIZE.size  # no payload has it: none has come


def _host_view(payload: Payload) -> memoryview:
    """A payload's bytes."""
    if isinstance(payload, torch.Tensor):
        if payload.device.type != "cpu":
            raise FrameError(f"a payload lies on {payload.device}: {NO_DEVICE}")
        payload = payload.numpy().data
    return payload.cast("B")


class TcpSender:
    """The sending end of one attempt. Its connection comes with `connect`, from the listener."""

    def __init__(
        self, forget: Callable[[], None], linger: Callable[[Connection], None], wait_s: float, silence_s: float
    ) -> None:
        """wait_s: how long the receiver may take to come; silence_s: to ask for a payload that waits for it."""
        self._forget, self._linger, self._wait_s, self._silence_s = forget, linger, wait_s, silence_s
        self._connection: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._turn = asyncio.Lock()
        self._failure = ""
        self._ended = self._lingers = False

    @property
    def connected(self) -> bool:
        """Whether a receiver has proved itself."""
        return self._connection.done()

    def connect(self, connection: Connection) -> None:
        """Take the connection of the receiver."""
        self._connection.set_result(connection)

    async def send(self, payload: Payload) -> None:
        """Send the next payload once the receiver has room for it. Cancelled, it ends the attempt.

        Raises TransferAbortedError where the receiver does not come in time, asked for another size, is gone or stands
        still, FrameError where the payload lies on a device.
        """
        view = _host_view(payload)
        asked: list[int] = []

        def job(stream: Stream) -> None:
            asked.append(_send(stream, view, self._silence_s))

        try:
            async with self._turn:  # calls that wait for the connection keep their order
                connection = await self._wait_connected()
                sent = connection.run(job)
            await connection.wait(sent)
        except asyncio.CancelledError:
            self._end("a send was cancelled")
            raise
        except OSError as error:
            self._end(f"the receiver is gone: {reason_of(error)}")
            raise TransferAbortedError(self._failure) from error
        if asked[0] != view.nbytes:
            # The connection stays until `aclose`: the receiver is to read the size.
            self._failure = f"the receiver waits for {asked[0]} bytes where a payload has {view.nbytes}"
            raise TransferAbortedError(self._failure)

    async def aclose(self) -> None:
        """Give up what is under way. Payloads for which `send` returned still arrive."""
        self._forget()
        if not self._connection.done() or self._connection.exception() is not None:
            self._end("the sender gave up")
            return
        connection = self._connection.result()
        if connection.idle and not self._ended:
            self._failure = self._failure or "the sender has ended"
            self._ended = self._lingers = True
            self._linger(connection)
        if not self._lingers:
            self._end("the sender gave up")
            await connection.aclose()

    def _end(self, why: str) -> None:
        self._failure = self._failure or why
        self._ended = True
        if not self._connection.done():
            self._connection.set_exception(TransferAbortedError(self._failure))
            self._connection.exception()
        elif self._connection.exception() is None:
            self._connection.result().stream.shutdown()

    async def _wait_connected(self) -> Connection:
        if not self._connection.done():
            await asyncio.wait((self._connection,), timeout=self._wait_s)
            if not self._connection.done():
                self._end(f"the receiver opened no data connection within {self._wait_s:g} s; is the port reachable?")
        if self._failure:
            raise TransferAbortedError(self._failure)
        return self._connection.result()


def _send(stream: Stream, view: memoryview, silence_s: float) -> int:
    """Send one payload where the receiver waits for one of its size; else the size alone. Returns the size asked."""
    grant = bytearray(SIZE.size)
    stream.receive(memoryview(grant), silence_s=silence_s)
    (asked,) = SIZE.unpack(grant)
    size = memoryview(SIZE.pack(view.nbytes))
    if asked == view.nbytes:
        stream.send(size, view)
    else:
        stream.send(size)
        stream.end_sending()
    return int(asked)


class TcpReceiver:
    """The receiving end of one attempt."""

    def __init__(self, connection: Connection, pool: RegionPool) -> None:
        self._connection, self._pool = connection, pool
        self._turn = asyncio.Lock()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure = ""

    async def receive(self, size: int, *, on_device: bool) -> PooledRegion:
        """Receive the next payload into a region of the pool. Cancelled, or where it raises, the attempt is over.

        Raises FrameError where the payload has another size, the pool could never hold it or it is on a device,
        TransferAbortedError where the sender is gone or stands still.
        """
        region: PooledRegion | None = None
        length = bytearray(_NO_SIZE)
        try:
            if on_device:
                raise FrameError(f"a payload on a device was announced: {NO_DEVICE}")
            async with self._turn:  # regions, grants and payloads in the order of the calls
                region = await self._room(size)
                arrived = self._ask(size, region, length)
            await self._connection.wait(arrived)
            _check_length(length, size)
            return region
        except BaseException as error:  # noqa: BLE001 - it ends the attempt, and is raised
            failure = self._failed(error, length, size)
            if region is not None:
                region.release()  # the thread has done with it: `wait` does not return before
            raise failure from (error if failure is not error else error.__cause__)

    async def aclose(self) -> None:
        """Give up what is under way. When this returns, nothing is written into a region any more."""
        self._end("the receiver gave up")
        await self._connection.aclose()

    def _ask(self, size: int, region: PooledRegion, length: bytearray) -> asyncio.Future[None]:
        """Let the payload come: its size into `length`, itself into the region."""
        view = _host_view(region.payload)

        def job(stream: Stream) -> None:
            stream.receive(memoryview(length))
            begin = perf_counter()
            stream.receive(view, begun=True)
            region.crossing_s = perf_counter() - begin

        self._connection.stream.post(SIZE.pack(size))
        return self._connection.run(job)

    async def _room(self, size: int) -> PooledRegion:
        """A region, unless the attempt ends before there is one."""
        self._check()
        if (region := self._pool.take_now(size)) is not None:
            return region
        taking = asyncio.ensure_future(self._pool.take(size))
        try:
            await asyncio.wait((taking, self._over), return_when=asyncio.FIRST_COMPLETED)
            self._check()
        except BaseException:
            if taking.done() and not taking.cancelled() and taking.exception() is None:
                taking.result().release()
            taking.cancel()
            await settled(taking)
            raise
        return taking.result()

    def _check(self) -> None:
        if self._failure:
            raise TransferAbortedError(self._failure)

    def _failed(self, error: BaseException, length: bytearray, size: int) -> BaseException:
        """End the attempt; returns what `receive` raises."""
        failure: BaseException = error
        if isinstance(error, OSError):
            failure = TransferAbortedError(self._failure or f"the sender is gone: {reason_of(error)}")
            if length != _NO_SIZE and not self._failure:
                try:
                    _check_length(length, size)
                except FrameError as wrong:
                    failure = wrong
        self._end(f"an earlier payload failed: {reason_of(failure)}")
        return failure

    def _end(self, why: str) -> None:
        self._failure = self._failure or why
        self._connection.stream.shutdown()
        if not self._over.done():
            self._over.set_result(None)


def _check_length(length: bytearray, size: int) -> None:
    (sent,) = SIZE.unpack(length)
    if sent != size:
        raise FrameError(f"a payload of {sent} bytes came where {size} were announced; the sender is at fault")
