"""Whose frames leave next on the way to one decode worker."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SLOTS = 2
"""Frames that are encoded and handed to the transport at once: one leaves while the next is made."""


class Link:
    """Gives turns to the oldest request that has a frame to send.

    Sharing a full link equally would let all transfers end late; in order, the first ends after its own bytes and none
    ends later than it would have. Belongs to one event loop.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._free = slots
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = 0

    @asynccontextmanager
    async def turn(self, order: int) -> AsyncIterator[None]:
        """Wait until a slot is free and no request with a lower `order` wants it; hold it for the block."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._waiting, (order, self._count, turn))
        self._grant_soon()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += 1
                self._grant_soon()

    def _grant_soon(self) -> None:
        """Grant at the loop's next turn: whoever gives a slot back may ask again first."""
        asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        while self._free and self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._free -= 1
                turn.set_result(None)
