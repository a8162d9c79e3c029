"""The receiving end of one attempt."""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from kvrail.errors import FrameError, TransferAbortedError
from kvrail.transport.regions import PooledRegion, RegionPool
from kvrail.transport.ucx.attempt import ACKNOWLEDGED_BELOW, LINGER_S, Attempt
from kvrail.transport.ucx.notifier import Notifier
from kvrail.transport.ucx.retired import RetiredBuffers
from kvrail.transport.ucx.tags import PAYLOADS, Kind
from kvrail.transport.ucx.worker import Operation

logger = logging.getLogger(__name__)

_SWEEPS_S = (0.01, 0.05, 0.2, 1.0, 5.0)
"""Pauses between sweeps for what comes late; the last one repeats."""


@dataclass(frozen=True, slots=True)
class Pools:
    """What payloads are received into."""

    host: RegionPool
    device: RegionPool | None = None


@dataclass(slots=True, eq=False)
class _Landing:
    """A receive that has been posted: where it goes, and what UCX has under way there. landed_s: when it was there."""

    number: int
    region: PooledRegion
    landed_s: float = 0.0
    size: bytearray = field(default_factory=lambda: bytearray(8))
    operations: dict[Kind, Operation] = field(default_factory=dict)
    giving: asyncio.Task[None] | None = None  # back to the pool

    def pending(self) -> set[Operation]:
        return {operation for operation in self.operations.values() if not operation.done()}


class UcxReceiver:
    """Posts a receive for a payload once it has a region for it, and for its size beside."""

    def __init__(self, attempt: Attempt, pools: Pools, retired: RetiredBuffers) -> None:
        self._attempt, self._pools, self._retired = attempt, pools, retired
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._giving: set[asyncio.Task[None]] = set()
        self._posted: set[_Landing] = set()
        self._closed = False
        self._landed = 0.0  # when the payload before this one had crossed
        self._coming = PAYLOADS  # payloads of this number or above will not come
        self._notifier = Notifier()
        self._last = bytearray(8)
        self._end = attempt.receive(self._last, Kind.END)
        self._end.add_done_callback(self._ended)

    async def receive(self, size: int, *, on_device: bool) -> PooledRegion:
        """As `PayloadReceiver.receive` says."""
        number = self._number
        pool = self._pools.device if on_device else self._pools.host
        if pool is None:  # whether the sender is there still or not
            raise FrameError(f"payload {number} lies on a device, and this worker receives in host memory only")
        self._check(number)
        self._number += 1
        landing = _Landing(number, await self._take(pool, size, number))
        self._posted.add(landing)
        try:
            self._check(number)  # the endpoint may have gone while this waited for the pool
            self._post(landing, size)
            posted = perf_counter()
            await self._land(landing, size)
            begin, self._landed = max(posted, self._landed), landing.landed_s
            landing.region.crossing_s = max(0.0, self._landed - begin)
            if size < ACKNOWLEDGED_BELOW:
                self._attempt.send(bytes(8), Kind.ACK, number)
        except BaseException:
            await asyncio.shield(self._give_back(landing))
            raise
        self._posted.discard(landing)
        return landing.region

    async def aclose(self) -> None:
        """As `PayloadReceiver.aclose` says, within three graces.

        Receives that nothing has matched end at once. A payload that is on its way is waited for: a peer that lives
        sends it to its end, and one on the same host need not even live, as UCX reads from its memory. From a peer that
        does neither the endpoint is cut, and UCX then ends what was under way. Should it not, the region stays in
        `RetiredBuffers` until it does.
        """
        first, self._closed = not self._closed, True
        if first:
            self._notifier.notify()
            if self._attempt.endpoint.alive:
                self._attempt.send(bytes(8), Kind.STOP)
            self._attempt.sweep_now(Kind.BODY)
        for landing in list(self._posted):
            self._give_back(landing)
        if self._giving:
            await asyncio.wait(self._giving)
        if first:
            self._attempt.leave(self._linger)

    async def _linger(self) -> None:
        """Sweep away what still comes, until the sender has ended or long enough."""
        until = self._loop.time() + LINGER_S
        pauses = iter(_SWEEPS_S)
        while not self._end.done() and self._loop.time() < until:
            self._attempt.sweep_now(Kind.BODY)
            await asyncio.wait({self._end}, timeout=next(pauses, _SWEEPS_S[-1]))
        if not self._end.done():
            self._attempt.end(Kind.END)
        await self._attempt.sweep(Kind.BODY)

    async def _take(self, pool: RegionPool, size: int, number: int) -> PooledRegion:
        if (region := pool.take_now(size)) is not None:
            return region
        taking = self._loop.create_task(pool.take(size))
        try:
            await self._wait({taking}, number)
        except BaseException:
            taking.cancel()
            taking.add_done_callback(_release)
            raise
        return taking.result()

    def _post(self, landing: _Landing, size: int) -> None:
        landing.operations[Kind.SIZE] = self._attempt.receive(landing.size, Kind.SIZE, landing.number)
        if size:
            body = self._attempt.receive(landing.region.payload, Kind.BODY, landing.number)
            body.add_done_callback(lambda _: self._note(landing))
            landing.operations[Kind.BODY] = body

    def _note(self, landing: _Landing) -> None:
        landing.landed_s = self._attempt.worker.completed_s

    async def _land(self, landing: _Landing, size: int) -> None:
        """Wait for a payload. Raises where it does not come as announced."""
        operations = landing.operations
        await self._wait({operations[Kind.SIZE]}, landing.number)
        if size and int.from_bytes(landing.size, "little") == size:
            await self._wait({operations[Kind.BODY]}, landing.number)
        self._judge(landing, size)

    async def _wait(self, pending: Collection[asyncio.Future[Any]], number: int) -> None:
        """Wait until all are done or one has failed. Raises TransferAbortedError once the payload will not come."""
        waited = set(pending)
        while waited := {each for each in waited if not each.done()}:
            self._check(number)
            await self._notifier.wait(waited)
            if any(each.done() and each.exception() is not None for each in waited):
                return
        if self._closed:
            self._check(number)

    def _check(self, number: int) -> None:
        if self._closed or number >= self._coming or not self._attempt.endpoint.alive:
            reason = "the receiver is closed" if self._closed else "the sender has ended or is gone"
            raise TransferAbortedError(f"payload {number} was not received: {reason}")
        if number == PAYLOADS:
            raise FrameError(f"an attempt has at most {PAYLOADS} payloads; raise the receiver's --transfer-memory-mib")

    def _judge(self, landing: _Landing, size: int) -> None:
        """Raise where the payload did not come as announced."""
        failed = [operation.exception() for operation in landing.operations.values() if operation.done()]
        sent = int.from_bytes(landing.size, "little")
        if any(isinstance(each, self._attempt.worker.truncated) for each in failed):
            raise FrameError(f"payload {landing.number} is longer than the {size} bytes that were announced")
        for each in failed:
            if each is not None:
                raise TransferAbortedError(f"payload {landing.number} was not received: {each}")
        if sent != size:
            raise FrameError(f"payload {landing.number} has {sent} bytes, {size} were announced")

    def _give_back(self, landing: _Landing) -> asyncio.Task[None]:
        """End what is under way for a landing, then release its region; the task is the receiver's own."""
        if landing.giving is None:
            self._posted.discard(landing)
            landing.giving = self._loop.create_task(self._reclaim(landing))
            self._giving.add(landing.giving)
            landing.giving.add_done_callback(self._giving.discard)
        return landing.giving

    async def _reclaim(self, landing: _Landing) -> None:
        for kind, operation in landing.operations.items():
            if not operation.done():
                self._attempt.end(kind, landing.number)
        pending = landing.pending()
        if pending:
            _, pending = await asyncio.wait(pending, timeout=self._attempt.grace_s)
        if pending:
            logger.warning("payload %d came to no end: the sender's endpoint is cut", landing.number)
            await self._attempt.endpoint.cut()
            pending = landing.pending()
        if pending:
            _, pending = await asyncio.wait(pending, timeout=self._attempt.grace_s)
        if pending:
            self._retired.keep(landing.region, pending)
        else:
            landing.region.release()

    def _ended(self, end: Operation) -> None:
        """The sender has ended: it said after how many payloads, and whether it gives up those under way."""
        said = int.from_bytes(self._last, "little")
        given_up = said & 1
        failed = end.cancelled() or end.exception() is not None
        self._coming = 0 if failed or given_up else said >> 1
        if given_up and not failed:
            self._attempt.sweep_now(Kind.BODY)
        self._notifier.notify()


def _release(taking: asyncio.Task[PooledRegion]) -> None:
    if not taking.cancelled() and taking.exception() is None:
        taking.result().release()
