"""One connection and the thread that blocks in it."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from kvrail.runtime.waiting import settled
from kvrail.transport.tcp.stream import Stream

Job = Callable[[Stream], None]
"""Something that blocks in a stream; what it raises is the future's."""


class Connection:
    """Runs jobs on one stream in order, in a thread of its own. Belongs to one event loop.

    The next job begins without a turn of the event loop, so payloads follow each other while that is busy.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[tuple[Job, asyncio.Future[None]] | None] = SimpleQueue()
        self._unfinished: set[asyncio.Future[None]] = set()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        threading.Thread(target=self._work, name="payloads", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether every job has ended."""
        return not self._unfinished

    def run(self, job: Job) -> asyncio.Future[None]:
        """Run a job after those before it. To stop waiting for it is not to stop it: `stopped` does that."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self._closing:
            future.set_exception(ConnectionAbortedError("the connection was closed"))
            return future
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        self._jobs.put((job, future))
        return future

    def stopped(self) -> asyncio.Future[None]:
        """Done once every job has stopped, also those whose futures were cancelled. Ends the connection."""
        self.stream.shutdown()
        return self._ended if self._closing else self.run(_nothing)

    async def aclose(self) -> None:
        """End the connection; when this returns or raises, the thread has ended. A second call waits as well."""
        self.stream.shutdown()
        await self._end()

    async def linger(self, limit_s: float) -> None:
        """End the connection once the other end has read all and closed, or after `limit_s` seconds."""
        await asyncio.wait((self.run(Stream.read_to_end),), timeout=limit_s)
        await self.aclose()

    async def _end(self) -> None:
        if not self._closing:
            self._closing = True
            self._jobs.put(None)
        try:
            await settled(self._ended)
        finally:
            self.stream.close()

    def _work(self) -> None:
        while (task := self._jobs.get()) is not None:
            job, future = task
            error: Exception | None = None
            try:
                job(self.stream)
            except Exception as raised:  # noqa: BLE001 - the job's future raises it
                error = raised
            self._report(future, error)
            del task, job, future  # a payload is not kept while the thread waits for the next
        self._report(self._ended, None)

    def _report(self, future: asyncio.Future[None], error: Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(_settle, future, error)
        except RuntimeError:
            return  # the loop has been closed; no task waits


async def stopped(connections: Iterable[Connection]) -> None:
    """End connections; when this returns or raises, their jobs have stopped."""
    await settled(*[connection.stopped() for connection in connections])


def _nothing(stream: Stream) -> None:
    """A job."""


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # retrieved: the waiter may be gone
