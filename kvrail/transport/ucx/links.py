"""Endpoints, one for each peer, kept as long as the peer lives."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from kvrail.errors import reason_of
from kvrail.transport.ucx.address import UcxAddress
from kvrail.transport.ucx.tags import EXACT, HELLO
from kvrail.transport.ucx.worker import UcxWorker

logger = logging.getLogger(__name__)

MAX_IDLE = 64
"""Endpoints without an attempt that are kept; beyond, the one that was idle longest is closed."""
_PERIOD_NS = 500_000_000
_ATTEMPTS = 4
"""UCXX cancels what is under way and closes, trying so often, each so long."""


class Link:
    """One endpoint. A peer that restarts has another address, hence another link."""

    def __init__(self, address: UcxAddress, endpoint: Any) -> None:
        self.address = address
        self.endpoint = endpoint
        self.users = 0
        self._closing: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether payloads can be sent: neither closed nor known to have lost its peer."""
        return self._closing is None and self.endpoint is not None and bool(self.endpoint.alive)

    async def cut(self) -> None:
        """Close by force: every operation through this endpoint ends, other attempts' too."""
        if self._closing is None:
            self._closing = asyncio.create_task(asyncio.to_thread(self._close))
        await asyncio.shield(self._closing)

    def _close(self) -> None:
        self.endpoint.remove_close_callback()
        try:
            self.endpoint.close_blocking(period=_PERIOD_NS, max_attempts=_ATTEMPTS)
        except Exception as error:  # noqa: BLE001 what UCXX raises; what is still under way goes into quarantine
            logger.warning("an endpoint of transport ucx did not close: %s", reason_of(error))
        self.endpoint = None  # it would keep the worker alive, for as long as an attempt remembers it


class Links:
    """All endpoints of a worker. Belongs to one event loop."""

    def __init__(self, worker: UcxWorker, *, peer_failure: bool) -> None:
        self._worker = worker
        self._peer_failure = peer_failure
        self._loop = asyncio.get_running_loop()
        self._links: dict[bytes, Link] = {}  # the one used last stands last
        self._cuts: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._links) + len(self._cuts)

    def hold(self, address: UcxAddress) -> Link:
        """The link to a peer, made where there is none; `release` ends the hold. Raises one of the worker's errors."""
        self._worker.sweep(HELLO, EXACT)
        link = self._links.pop(address.worker, None)
        if link is not None and not link.alive:
            self._drop(link)
            link = None
        if link is None:
            endpoint = self._worker.connect(address.worker, peer_failure=self._peer_failure)
            endpoint.set_close_callback(self._lost)
            # Connects: whoever waits for this peer is told if it is not there, or goes.
            self._worker.send(endpoint, bytearray(1), HELLO)
            link = Link(address, endpoint)
        self._links[address.worker] = link
        link.users += 1
        return link

    def release(self, link: Link) -> None:
        """One attempt less uses it."""
        link.users -= 1
        self._reap()

    async def aclose(self) -> None:
        """Close all."""
        for link in self._links.values():
            self._drop(link)
        self._links.clear()
        if self._cuts:
            await asyncio.wait(self._cuts)

    def _lost(self) -> None:
        """A peer has gone. Called by UCX's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        """Close the links without a user that have lost their peer, and the oldest of too many."""
        idle = [link for link in self._links.values() if link.users == 0]
        gone = [link for link in idle if not link.alive]
        kept = [link for link in idle if link.alive]
        for link in gone + kept[: max(0, len(kept) - MAX_IDLE)]:
            del self._links[link.address.worker]
            self._drop(link)

    def _drop(self, link: Link) -> None:
        task = self._loop.create_task(link.cut())
        self._cuts.add(task)
        task.add_done_callback(_logged(self._cuts.discard))


def _logged(then: Callable[[asyncio.Task[None]], None]) -> Callable[[asyncio.Task[None]], None]:
    def done(task: asyncio.Task[None]) -> None:
        then(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("an endpoint of transport ucx did not close: %s", reason_of(error))

    return done
