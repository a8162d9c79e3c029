"""One request's pages on their way in: admitted, received, checked, decoded into pages that are reserved for them.

A frame's head is checked before memory is taken for its payload, the payload before anything of it reaches a page.
While frames are decoded the next ones arrive.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeVar

from kvrail.codec.base import Codec, CodecError
from kvrail.codec.core.digest import Digest
from kvrail.codec.frame import FrameFormatError, FrameHeader, check_payload, unpack_head
from kvrail.errors import FrameError, TransferAbortedError
from kvrail.runtime.waiting import in_thread, settled, together
from kvrail.transfer.guard import FrameGuard, Transfer
from kvrail.transfer.observer import ReceivingObserver
from kvrail.transfer.pool_pages import PoolPages
from kvrail.transfer.silence import unless_silent
from kvrail.transfer.sizes import max_payload_bytes
from kvrail.transfer.stages import KeptStages
from kvrail.transport.base import Announcement, PayloadReceiver, Region

T = TypeVar("T")

AHEAD = 4
"""Frames that may be on their way at once, beside those that are decoded."""
ECHO_S = 0.5
"""Where the sender has given up, this end's own failure, which may be why, comes within this time."""
AT_ONCE = 3
"""Frames that are decoded at once where they come through host memory and have one stage. A frame of 16 MiB takes
7 ms beside an engine, most of it turns of threads and of the interpreter's lock: one by one, 2.3 GB/s of KV at most."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A frame that has been announced and admitted.

    unchecked: what its payload must have; None: that is seen to before `region` is there.
    """

    header: FrameHeader
    unchecked: Digest | None
    region: asyncio.Task[Region]


class PageReceiver:
    """Receives what `transfer` says into `sink`.

    silence_s: longest wait for the next announcement or payload. executor: its threads check and decode.
    Belongs to one event loop.
    """

    def __init__(
        self,
        transfer: Transfer,
        codec: Codec,
        sink: PoolPages,
        executor: Executor,
        observer: ReceivingObserver,
        silence_s: float,
    ) -> None:
        self._transfer = transfer
        self._guard = FrameGuard(transfer)
        self._codec = codec
        self._sink = sink
        self._executor = executor
        self._observer = observer
        self._silence_s = silence_s
        self._arrivals: deque[_Arrival] = deque()  # admitted and not yet decoded, in order
        self._room = asyncio.Semaphore(AHEAD + AT_ONCE)
        self._decoding = asyncio.Semaphore(AT_ONCE)
        self._changed = asyncio.Event()

    async def run(
        self, announced: Callable[[], Awaitable[Announcement | None]], payload_receiver: PayloadReceiver
    ) -> None:
        """Receive frames, in order, until all pages are written; what `announced` says after that is left to be read.

        Raises FrameError where a frame is wrong or missing, what `announced` and `receiver` raise, and
        WorkerUnavailableError after too long a silence. However it ends, nothing writes pages any more.
        """
        reading = asyncio.create_task(self._read(announced, payload_receiver))
        reading.add_done_callback(lambda _: self._changed.set())
        try:
            with KeptStages(self._observer, self._codec.reads_earlier_payloads) as kept:
                async with together() as landing:
                    while (found := await self._next(reading)) is not None:
                        arrival, region = found
                        taking = landing.create_task(self._take(arrival, region, kept))
                        taking.add_done_callback(partial(self._taken, region))
                        if self._codec.num_stages > 1 or arrival.unchecked is not None:
                            await asyncio.wait((taking,))  # stages of a block in order; on a device one is fast enough
        except CodecError as error:
            raise FrameError(f"request {self._transfer.request_id}: {error}") from error
        finally:
            await self._give_up(reading)
        if not self._guard.complete():
            raise FrameError(f"the transfer ended with {self._guard.missing()} heads of pages missing")

    def not_silent(self) -> None:
        """The sender is at work, though it has announced nothing."""
        self._changed.set()

    def _taken(self, region: Region, taking: "asyncio.Task[None]") -> None:
        region.release()
        self._room.release()
        self._decoding.release()

    async def _give_up(self, reading: "asyncio.Task[None]") -> None:
        """Stop reading, and give back what will not be decoded; a further cancellation changes nothing in that."""
        reading.cancel()
        try:
            await settled(reading)
        finally:
            coming = [arrival.region for arrival in self._arrivals]
            for region in coming:
                region.cancel()
            try:
                await settled(*coming)
            finally:
                for region in coming:
                    if not region.cancelled() and region.exception() is None:
                        region.result().release()

    async def _read(
        self, announced: Callable[[], Awaitable[Announcement | None]], payload_receiver: PayloadReceiver
    ) -> None:
        """Admit frames as they are announced, and have their payloads come."""
        spec = self._transfer.spec
        while (announcement := await announced()) is not None:
            size = announcement.payload_bytes
            header, digest = unpack_head(announcement.head, size, max_payload_bytes(spec))
            if header.spec.num_kv_heads != spec.num_kv_heads:
                raise FrameFormatError(f"frame {header.sequence} has some of the KV heads; pages are written whole")
            self._guard.admit(header, size)
            await self._room.acquire()
            # On a device a check takes less time than a thread's turn, so there it comes with decoding.
            unchecked = digest if announcement.on_device else None
            region = asyncio.create_task(self._receive(announcement, digest, payload_receiver))
            self._arrivals.append(_Arrival(header, unchecked, region))
            self._changed.set()

    async def _receive(self, announcement: Announcement, digest: Digest, payload_receiver: PayloadReceiver) -> Region:
        """Where a payload lies; in host memory it is checked, too."""
        region = await payload_receiver.receive(announcement.payload_bytes, on_device=announcement.on_device)
        if not announcement.on_device:
            try:
                await in_thread(self._executor, self._check, digest, region)
            except BaseException:
                region.release()
                raise
        return region

    def _check(self, digest: Digest, region: Region) -> None:
        with self._sink.writing():
            check_payload(digest, region.payload)

    async def _next(self, reading: "asyncio.Task[None]") -> tuple[_Arrival, Region] | None:
        """The next frame and where its payload lies, once it is here and can be decoded; None at the end."""
        await self._decoding.acquire()
        asked = perf_counter()
        while not self._arrivals:
            if self._guard.all_admitted():
                return None
            if reading.done():
                reading.result()
                return None
            self._changed.clear()
            await unless_silent(self._changed.wait(), self._silence_s)
        arrival = self._arrivals[0]
        await unless_silent(_unless_failed(arrival.region, reading), self._silence_s)
        region = arrival.region.result()
        self._observer.arrived(region.payload.nbytes, perf_counter() - asked, region.crossing_s)
        return self._arrivals.popleft(), region

    async def _take(self, arrival: _Arrival, region: Region, kept: KeptStages) -> None:
        """Decode one frame."""
        seconds = await in_thread(self._executor, self._land, arrival, region, kept)
        self._observer.decoded(arrival.header, region.payload.nbytes, seconds)
        self._guard.landed(arrival.header)
        if self._guard.coarse_complete() and not self._guard.complete():
            self._observer.coarse()

    def _land(self, arrival: _Arrival, region: Region, kept: KeptStages) -> float:
        """Check a payload that was not, and decode it; once this returns or raises, it is read no more.

        Returns the seconds of the decoding.
        """
        if arrival.unchecked is not None:
            self._check(arrival.unchecked, region)
        begin = perf_counter()
        header, spec = arrival.header, arrival.header.spec
        layers = range(header.first_layer, header.first_layer + spec.num_layers)
        try:
            with self._sink.writing():
                pages = self._sink.block(layers, header.first_page, header.first_page + spec.num_pages)
                self._codec.decode(header.stage, kept.add(header, region.payload), pages)
        finally:
            self._sink.synchronize()
        return perf_counter() - begin


async def _unless_failed(wanted: "asyncio.Task[T]", other: "asyncio.Task[None]") -> None:
    """Wait until `wanted` is done; raises what `other` raises meanwhile.

    A sender may give up because `wanted` fails, before that has come to its end: then the reason of `wanted` is raised.
    """
    await asyncio.wait((wanted, other), return_when=asyncio.FIRST_COMPLETED)
    if not wanted.done():
        if isinstance(other.exception(), TransferAbortedError):
            await asyncio.wait((wanted,), timeout=ECHO_S)
        own = wanted.exception() if wanted.done() and not wanted.cancelled() else None
        if own is None or isinstance(own, TransferAbortedError):
            other.result()
        await asyncio.wait((wanted,))
