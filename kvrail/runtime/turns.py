"""Long work of many clients, each client in its turn, beside the event loop.

A client that sends much waits behind its own work; others get through. The order is that of kvrail.runtime.queueing.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvrail.runtime.queueing import FairQueue, Ticket

T = TypeVar("T")


class Turns:
    """Gives clients their turns. Belongs to one event loop.

    places: pieces of work that run at once, each in a thread.
    """

    def __init__(self, places: int = 1) -> None:
        self._queue = FairQueue(share=0)
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._free = places

    async def run(self, client: str, work: Callable[[], T], cost: int = 1) -> T:
        """Do `work` once it is the client's turn. cost: what it counts in the client's further turns.

        A caller that is cancelled while it waits leaves nothing to do. Once begun, work keeps its place until it ends,
        even if its caller is cancelled.
        """
        ticket = Ticket(client, places=1, tokens=0)
        granted = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._queue.add(ticket)
        self._serve()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # the turn came at the same moment
                self._leave(ticket, 0)
            raise
        running = asyncio.create_task(asyncio.to_thread(work))

        def ended(task: asyncio.Task[T]) -> None:
            if not task.cancelled():
                task.exception()  # it is taken, even if the caller has gone
            self._leave(ticket, cost)

        running.add_done_callback(ended)
        return await asyncio.shield(running)

    def _serve(self) -> None:
        """Give free places to the next clients. A caller that has left is dropped here."""
        while self._free and (ticket := next(self._queue.turns(self._free), None)) is not None:
            granted = self._waiting.pop(ticket)
            if granted.cancelled():
                self._queue.remove(ticket)
                continue
            self._queue.granted(ticket)
            self._free -= 1
            granted.set_result(None)

    def _leave(self, ticket: Ticket, cost: int) -> None:
        self._free += 1
        self._queue.charge(ticket.client, cost)  # not before: a client that comes meanwhile is next
        self._queue.ended(ticket)
        self._serve()
