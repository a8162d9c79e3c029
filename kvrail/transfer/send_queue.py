"""Which frames leave next on the way to one decode worker's host."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SLOTS = 3
"""Frames that are encoded and handed to the transport at once: one leaves while the next are made. With two,
transfers of 4,096 tokens at 10 Gb/s took 4 % longer (docs/decisions/0009-frame-size.md)."""

DIRECT_SLOTS = 8
"""The same from GPU to GPU, where a frame's way is short and what begins and ends it takes longest."""

LATER_SLOTS = 2
"""How many of them may be later stages of one request, which are encoded: one leaves while the next is framed."""

PATIENCE = 8
"""Turns of other requests' first stages that a later stage lets pass at most while it waits."""

STUCK_S = 5.0
"""A turn that lasts this long waits for a receiver that takes nothing; others go on."""
MOST_LENT = 4
"""Most turns, in units of `slots`, that are given in place of stuck ones: each holds a frame in memory."""

_Waiting = list[tuple[int, int, asyncio.Future[None]]]


class SendQueue:
    """Gives turns: to first stages before later ones, and among equals to the oldest request that has a frame.

    Sharing a full link equally would let all transfers end late; in order, the first ends after its own bytes and none
    ends later than it would have. First stages come first because a request can draft once it has them.

    Two bounds keep later stages moving. One that waits is passed by `patience` first stages of other requests at most;
    its own request's may all go before. And at `max_held_bytes` of later stages in memory (`hold`, `release`) no first
    stage gets a turn, since it would add to them: at most what `slots` turns bring comes on top.

    A turn that lasts longer than `stuck_s` no longer counts, up to a bound: one receiver that takes nothing does not
    keep the others of its machine from theirs. Belongs to one event loop.
    """

    def __init__(
        self, max_held_bytes: int, *, slots: int = SLOTS, patience: int = PATIENCE, stuck_s: float = STUCK_S
    ) -> None:
        self.slots = slots
        self._stuck_s = stuck_s
        self._lent: set[int] = set()  # turns, by number, that are stuck and do not count
        self._free = slots
        self._max_held_bytes = max_held_bytes
        self._patience = patience
        self._first: _Waiting = []
        self._later: _Waiting = []
        self._count = 0
        self._passed = 0  # first stages of other requests that went while a later one waited
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Payload bytes of later stages that wait for their turn."""
        return self._held_bytes

    @asynccontextmanager
    async def turn(self, order: int, *, later: bool = False) -> AsyncIterator[None]:
        """Wait for a slot, as the class says, and hold it for the block. order: the request's age, lower is older."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._count += 1
        number, stuck = self._count, None
        heapq.heappush(self._later if later else self._first, (order, number, turn))
        self._grant_soon()
        try:
            await turn
            stuck = loop.call_later(self._stuck_s, self._lend, number)
            yield
        finally:
            if stuck is not None:
                stuck.cancel()
            if number in self._lent:
                self._lent.discard(number)
            elif turn.done() and not turn.cancelled():
                self._free += 1
            self._grant_soon()

    def _lend(self, number: int) -> None:
        """A turn is stuck: let another one begin."""
        if len(self._lent) < MOST_LENT * self.slots:
            self._lent.add(number)
            self._free += 1
            self._grant_soon()

    def hold(self, payload_bytes: int) -> None:
        """A later stage's payload waits in memory from now on."""
        self._held_bytes += payload_bytes

    def release(self, payload_bytes: int) -> None:
        """It has left, or will never."""
        self._held_bytes -= payload_bytes
        self._grant_soon()

    def _grant_soon(self) -> None:
        """Grant at the loop's next turn: a sender that gives a slot back may ask again first."""
        asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        while self._free and (waiting := self._next()):
            _, _, turn = heapq.heappop(waiting)
            self._free -= 1
            turn.set_result(None)

    def _next(self) -> _Waiting | None:
        """Which of the two has the next turn; None where neither may go."""
        for waiting in (self._first, self._later):
            while waiting and waiting[0][2].done():  # cancelled
                heapq.heappop(waiting)
        # what a stuck receiver holds is not given back soon: others have as much once more
        full = self._held_bytes >= self._max_held_bytes * (2 if self._lent else 1)
        if self._later and (full or not self._first or self._passed >= self._patience):
            self._passed = 0
            return self._later
        if not self._first or full:
            return None
        if not self._later:
            self._passed = 0
        elif self._first[0][0] != self._later[0][0]:
            self._passed += 1
        return self._first
