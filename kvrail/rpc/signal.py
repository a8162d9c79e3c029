"""Waking tasks that wait for a change of state."""

import asyncio


class Signal:
    """Wakes all tasks that wait, each to look again at the state that it waits for. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def wake(self) -> None:
        """Wake every task that waits now."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Return at the next `wake`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
