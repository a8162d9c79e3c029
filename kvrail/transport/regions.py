"""Regions of one registered buffer: memory into which payloads land, and which goes back when they are decoded."""

import asyncio
import contextlib
from bisect import insort
from collections import deque

import torch

from kvrail.errors import FrameError, OverloadedError
from kvrail.transport.base import Payload

ALIGNMENT = 4096
"""Regions begin at multiples of a page, as copies and registrations like it."""


class RegionPool:
    """Gives out parts of `buffer`, uint8 [n], first come, first served. Belongs to one event loop.

    Small regions do not overtake a large one that waits, so that none waits for ever. patience_s: how long a sender is
    given; one whose payload finds no room is not blamed, as `take` gives up somewhat earlier.
    """

    def __init__(self, buffer: torch.Tensor, patience_s: float = 60.0) -> None:
        self._buffer, self._patience_s = buffer, 0.9 * patience_s
        self._loop = asyncio.get_running_loop()
        self._free: list[tuple[int, int]] = [(0, buffer.numel())]  # begin and end, in order, neighbours joined
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()

    @property
    def buffer(self) -> torch.Tensor:
        """All of the memory."""
        return self._buffer

    @property
    def free_bytes(self) -> int:
        """Bytes that are free."""
        return sum(end - begin for begin, end in self._free)

    def take_now(self, size: int) -> "PooledRegion | None":
        """A region of `size` bytes, or None where it must be waited for.

        Raises FrameError where the pool can never hold it.
        """
        room = self._room_for(size)
        while self._waiting and self._waiting[0][1].done():  # given up
            self._waiting.popleft()
        begin = None if self._waiting else self._cut(room)
        return None if begin is None else PooledRegion(self, begin, size, room)

    async def take(self, size: int) -> "PooledRegion":
        """A region of `size` bytes; waits until there is one.

        Raises FrameError where the pool can never hold it, OverloadedError where others hold it for too long.
        """
        if (region := self.take_now(size)) is not None:
            return region
        room = self._room_for(size)
        begin: asyncio.Future[int] = self._loop.create_future()
        self._waiting.append((room, begin))
        try:
            async with asyncio.timeout(self._patience_s):
                return PooledRegion(self, await begin, size, room)
        except (asyncio.CancelledError, TimeoutError) as error:
            if begin.done() and not begin.cancelled():
                self._put_back(begin.result(), room)
            self._serve()
            if isinstance(error, TimeoutError):
                full = f"no {size} bytes to receive into were free for {self._patience_s:g} s"
                raise OverloadedError(f"{full}; give more memory (workers: --transfer-memory-mib)") from None
            raise

    def put_back(self, begin: int, room: int) -> None:
        """Make a region free again, from any thread."""
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._put_back(begin, room)
        else:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: no region is taken any more
                self._loop.call_soon_threadsafe(self._put_back, begin, room)

    def _put_back(self, begin: int, room: int) -> None:
        insort(self._free, (begin, begin + room))
        joined: list[tuple[int, int]] = []
        for first, end in self._free:
            if joined and joined[-1][1] == first:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((first, end))
        self._free = joined
        self._serve()

    def _serve(self) -> None:
        """Give those that wait what they asked for, in order, as far as it goes."""
        while self._waiting:
            room, begin = self._waiting[0]
            if begin.done():  # cancelled
                self._waiting.popleft()
                continue
            place = self._cut(room)
            if place is None:
                return
            self._waiting.popleft()
            begin.set_result(place)

    def _cut(self, room: int) -> int | None:
        """Take the first free piece that is large enough; returns where it begins."""
        for i, (first, end) in enumerate(self._free):
            if end - first >= room:
                self._free[i : i + 1] = [(first + room, end)] if end - first > room else []
                return first
        return None

    def _room_for(self, size: int) -> int:
        room = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        if room > self._buffer.numel():
            raise FrameError(
                f"a payload of {size} bytes does not fit the receiver's pool of {self._buffer.numel()}; give it more"
                " (workers: --transfer-memory-mib)"
            )
        return room


def host_pool(size: int, *, pinned: bool = False, patience_s: float = 60.0) -> RegionPool:
    """A pool of `size` bytes of host memory; pinned: a CUDA device can copy from and to it directly."""
    return RegionPool(torch.empty(size, dtype=torch.uint8, pin_memory=pinned), patience_s)


class PooledRegion:
    """Part of a pool."""

    def __init__(self, pool: RegionPool, begin: int, size: int, room: int) -> None:
        self._pool, self._begin, self._size, self._room = pool, begin, size, room
        self.crossing_s = 0.0
        self._held = [True]  # popped by the first release; a list does that at once for all threads

    @property
    def tensor(self) -> torch.Tensor:
        """The region, uint8 [size], on the pool's device."""
        return self._pool.buffer[self._begin : self._begin + self._size]

    @property
    def payload(self) -> Payload:
        """The region as payloads are handed on: bytes in this process's memory, or a tensor on a device."""
        tensor = self.tensor
        return tensor if tensor.is_cuda else tensor.numpy().data

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        with contextlib.suppress(IndexError):
            self._held.pop()
            self._pool.put_back(self._begin, self._room)
