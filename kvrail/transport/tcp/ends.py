"""The two ends of one attempt over connections of its own."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter

import torch

from kvrail.errors import FrameError, TransferAbortedError, WorkerUnavailableError, reason_of
from kvrail.runtime.waiting import settled
from kvrail.transport.base import Payload
from kvrail.transport.regions import PooledRegion, RegionPool
from kvrail.transport.tcp.connection import Connection, stopped
from kvrail.transport.tcp.messages import MOST_CONNECTIONS, SIZE, Place, parts_of
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
    """The sending end of one attempt. Its connections come with `connect`, from the listener."""

    def __init__(
        self, forget: Callable[[], None], linger: Callable[[Connection], None], wait_s: float, silence_s: float
    ) -> None:
        """wait_s: how long the receiver may take to come; silence_s: to ask for a payload that waits for it."""
        self._forget, self._linger, self._wait_s, self._silence_s = forget, linger, wait_s, silence_s
        loop = asyncio.get_running_loop()
        self._connections: list[asyncio.Future[Connection]] = [loop.create_future() for _ in range(MOST_CONNECTIONS)]
        self._count = 0  # as the receiver says; 0 until it has come
        self._turn = asyncio.Lock()
        self._failure = ""
        self._ended = self._lingers = False

    @property
    def connected(self) -> bool:
        """Whether a receiver has proved itself."""
        return self._connections[0].done()

    def takes(self, place: Place) -> bool:
        """Whether a connection may still come there: once, and the first one says how many there are at most."""
        first = self._count == 0 and place.number == 0
        return (first or self._count == place.count) and not self._connections[place.number].done()

    def connect(self, place: Place, connection: Connection) -> None:
        """Take a connection of the receiver."""
        self._count = place.count
        self._connections[place.number].set_result(connection)

    async def send(self, payload: Payload) -> None:
        """Send the next payload once the receiver has room for it. Cancelled, it ends the attempt.

        Raises TransferAbortedError where the receiver does not come in time, asked for another size, is gone or stands
        still, FrameError where the payload lies on a device.
        """
        view = _host_view(payload)
        grant = _Grant(view.nbytes)
        jobs: dict[Connection, asyncio.Future[None]] = {}
        try:
            async with self._turn:  # payloads keep their order on every connection
                await self._begin(view, grant, jobs)
            await asyncio.gather(*jobs.values())
        except BaseException as error:
            gone = f"the receiver is gone: {reason_of(error)}" if isinstance(error, OSError) else "a send was cancelled"
            self._end(gone)
            await stopped(jobs)
            if isinstance(error, OSError):
                raise TransferAbortedError(self._failure) from error
            raise
        if not grant.fits:
            # The connections stay until `aclose`: the receiver is to read the size.
            self._failure = f"the receiver waits for {grant.asked} bytes where a payload has {view.nbytes}"
            raise TransferAbortedError(self._failure)

    async def aclose(self) -> None:
        """Give up what is under way. Payloads for which `send` returned still arrive."""
        self._forget()
        connections = self._connected()
        if connections and not self._ended and all(connection.idle for connection in connections):
            self._failure = self._failure or "the sender has ended"
            self._ended = self._lingers = True
            for connection in connections:
                self._linger(connection)
        if not self._lingers:
            self._end("the sender gave up")
            await settled(*[asyncio.ensure_future(connection.aclose()) for connection in connections])

    def _connected(self) -> list[Connection]:
        return [each.result() for each in self._connections if each.done() and each.exception() is None]

    def _end(self, why: str) -> None:
        self._failure = self._failure or why
        self._ended = True
        for connection in self._connected():
            connection.stream.shutdown()
        for coming in self._connections:
            if not coming.done():
                coming.set_exception(TransferAbortedError(self._failure))
                coming.exception()

    async def _begin(self, view: memoryview, grant: "_Grant", jobs: "dict[Connection, asyncio.Future[None]]") -> None:
        """Queue a job for each part of a payload, into `jobs`."""
        first = await self._first()
        parts = [view[part] for part in parts_of(view.nbytes, self._count)]
        jobs[first] = first.run(lambda stream: grant.send_first(stream, parts[0], self._silence_s))
        jobs[first].add_done_callback(lambda _: grant.come.set())  # also where it never ran
        for number, part in enumerate(parts[1:], 1):
            coming = self._connections[number]
            if not coming.done():  # the receiver opens it before it asks for the payload
                await asyncio.wait((coming, jobs[first]), return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    jobs[first].result()
                    if not grant.fits:
                        return
            connection = await self._come(number)
            jobs[connection] = connection.run(partial(grant.send_rest, part))

    async def _first(self) -> Connection:
        connection = await self._come(0)
        if self._failure:
            raise TransferAbortedError(self._failure)
        return connection

    async def _come(self, number: int) -> Connection:
        """A connection, once the receiver has opened it."""
        coming = self._connections[number]
        if not coming.done():
            await asyncio.wait((coming,), timeout=self._wait_s)
            if not coming.done():
                self._end(f"the receiver opened no data connection within {self._wait_s:g} s; is the port reachable?")
        return coming.result()


class _Grant:
    """The size that the receiver asks for; the first connection's thread reads it, those of the others wait for it."""

    def __init__(self, size: int) -> None:
        self.size, self.asked = size, -1
        self.come = threading.Event()

    @property
    def fits(self) -> bool:
        """Whether it asked for this payload's size."""
        return self.asked == self.size

    def send_first(self, stream: Stream, part: memoryview, silence_s: float) -> None:
        """Send the size, and the first part where the receiver waits for that size; else the size alone."""
        grant = bytearray(SIZE.size)
        stream.receive(memoryview(grant), silence_s=silence_s)
        (self.asked,) = SIZE.unpack(grant)
        self.come.set()
        size = memoryview(SIZE.pack(self.size))
        if self.fits:
            stream.send(size, part)
        else:
            stream.send(size)
            stream.end_sending()

    def send_rest(self, part: memoryview, stream: Stream) -> None:
        """Send another part, if it is asked for."""
        self.come.wait()
        if self.fits:
            stream.send(part)


class TcpReceiver:
    """The receiving end of one attempt."""

    def __init__(
        self, first: Connection, pool: RegionPool, count: int, further: Callable[[Place], Awaitable[Connection]]
    ) -> None:
        """count: most connections; `further` opens another one."""
        self._connections, self._pool, self._count, self._further = [first], pool, count, further
        self._turn = asyncio.Lock()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure = ""

    async def receive(self, size: int, *, on_device: bool) -> PooledRegion:
        """Receive the next payload into a region of the pool. Cancelled, or where it raises, the attempt is over.

        Raises FrameError where the payload has another size, the pool could never hold it or it is on a device,
        TransferAbortedError where the sender is gone or stands still.
        """
        region: PooledRegion | None = None
        coming = _Coming()
        try:
            if on_device:
                raise FrameError(f"a payload on a device was announced: {NO_DEVICE}")
            async with self._turn:  # regions, grants and payloads in the order of the calls
                parts = parts_of(size, self._count)
                await self._open(len(parts))
                region = await self._room(size)
                view = _host_view(region.payload)
                jobs = self._ask(size, [view[part] for part in parts], coming)
            await asyncio.gather(*jobs)
            coming.check(size)
            region.crossing_s = coming.seconds()
            return region
        except BaseException as error:  # noqa: BLE001 - it ends the attempt, and is raised
            try:
                await stopped(self._connections)
            finally:
                if region is not None:
                    region.release()
            failure = self._failed(error, coming, size)
            raise failure from (error if failure is not error else error.__cause__)

    async def aclose(self) -> None:
        """Give up what is under way. When this returns, nothing is written into a region any more."""
        self._end("the receiver gave up")
        await settled(*[asyncio.ensure_future(connection.aclose()) for connection in self._connections])

    def _ask(self, size: int, parts: list[memoryview], coming: "_Coming") -> list[asyncio.Future[None]]:
        """Let the payload come: its size into `coming`, each part by one connection."""
        self._connections[0].stream.post(SIZE.pack(size))
        receiving = [coming.receive_first, *[coming.receive_rest] * (len(parts) - 1)]
        return [
            connection.run(partial(receive, part))
            for connection, receive, part in zip(self._connections, receiving, parts, strict=False)
        ]

    async def _open(self, count: int) -> None:
        """Have at least `count` connections."""
        self._check()
        missing = range(len(self._connections), count)
        opening = [asyncio.ensure_future(self._further(Place(number, self._count))) for number in missing]
        try:
            opened = await asyncio.gather(*opening)
            self._check()
        except BaseException as error:
            for each in opening:
                each.cancel()
            try:
                await settled(*opening)
            finally:
                made = [each.result() for each in opening if not each.cancelled() and each.exception() is None]
                await settled(*[asyncio.ensure_future(connection.aclose()) for connection in made])
            if isinstance(error, WorkerUnavailableError):
                raise TransferAbortedError(str(error)) from error
            raise
        self._connections += opened

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

    def _failed(self, error: BaseException, coming: "_Coming", size: int) -> BaseException:
        """End the attempt; returns what `receive` raises."""
        failure: BaseException = error
        if isinstance(error, OSError):
            failure = TransferAbortedError(self._failure or f"the sender is gone: {reason_of(error)}")
            if not self._failure:
                try:
                    coming.check(size)
                except FrameError as wrong:
                    failure = wrong
        self._end(f"an earlier payload failed: {reason_of(failure)}")
        return failure

    def _end(self, why: str) -> None:
        self._failure = self._failure or why
        for connection in self._connections:
            connection.stream.shutdown()
        if not self._over.done():
            self._over.set_result(None)


class _Coming:
    """A payload that is received: the size that came with it, and when."""

    def __init__(self) -> None:
        self._length = bytearray(_NO_SIZE)
        self._begin = 0.0
        self._ends: list[float] = []

    def receive_first(self, part: memoryview, stream: Stream) -> None:
        """Receive the size and the first part."""
        stream.receive(memoryview(self._length))
        self._begin = perf_counter()
        stream.receive(part, begun=True)
        self._ends.append(perf_counter())

    def receive_rest(self, part: memoryview, stream: Stream) -> None:
        """Receive another part."""
        stream.receive(part)
        self._ends.append(perf_counter())

    def seconds(self) -> float:
        """From the size to the last byte."""
        return max(self._ends) - self._begin

    def check(self, size: int) -> None:
        """Raise FrameError where another size than `size` came."""
        (sent,) = SIZE.unpack(self._length)
        if self._length != _NO_SIZE and sent != size:
            raise FrameError(f"a payload of {sent} bytes came where {size} were announced; the sender is at fault")
