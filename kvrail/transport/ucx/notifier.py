"""Waits for operations, or for news that concern all who wait."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any


class Notifier:
    """Belongs to one event loop.

    A thousand payloads may wait at once: a future that they shared would be searched for each that leaves.
    """

    def __init__(self) -> None:
        self._sleepers: set[Callable[..., None]] = set()

    def notify(self) -> None:
        """Wake all who wait."""
        for wake in list(self._sleepers):
            wake()

    async def wait(self, pending: Collection[asyncio.Future[Any]]) -> None:
        """Wait until one of `pending` is done or `notify` is called. None of them may be done."""
        asleep: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake(_: object = None) -> None:
            if not asleep.done():
                asleep.set_result(None)

        self._sleepers.add(wake)
        for each in pending:
            each.add_done_callback(wake)
        try:
            await asleep
        finally:
            self._sleepers.discard(wake)
            for each in pending:
                each.remove_done_callback(wake)
