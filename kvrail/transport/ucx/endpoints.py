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
"""UCXX cancels what is under way and closes, in this many tries, each this long."""


class Endpoint:
    """One endpoint. A peer that restarts has another address, hence another endpoint."""

    def __init__(self, address: UcxAddress, handle: Any) -> None:
        self.address = address
        self.handle = handle
        self.users = 0
        self._closing: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether payloads can be sent: neither closed nor known to have lost its peer."""
        return self._closing is None and self.handle is not None and bool(self.handle.alive)

    async def cut(self) -> None:
        """Close by force: every operation through this endpoint ends, other attempts' too."""
        if self._closing is None:
            self._closing = asyncio.create_task(asyncio.to_thread(self._close))
        await asyncio.shield(self._closing)

    def _close(self) -> None:
        self.handle.remove_close_callback()
        try:
            self.handle.close_blocking(period=_PERIOD_NS, max_attempts=_ATTEMPTS)
        except Exception as error:  # noqa: BLE001 what UCXX raises; what is still under way goes to the retired buffers
            logger.warning("an endpoint of transport ucx did not close: %s", reason_of(error))
        self.handle = None  # it would keep the worker alive, for as long as an attempt remembers it


class Endpoints:
    """All endpoints of a worker. Belongs to one event loop."""

    def __init__(self, worker: UcxWorker, *, peer_failure: bool) -> None:
        self._worker = worker
        self._peer_failure = peer_failure
        self._loop = asyncio.get_running_loop()
        self._endpoints: dict[bytes, Endpoint] = {}  # the one used last stands last
        self._cuts: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._endpoints) + len(self._cuts)

    def hold(self, address: UcxAddress) -> Endpoint:
        """A peer's endpoint, made where there is none; `release` ends the hold. Raises one of the worker's errors."""
        self._worker.sweep(HELLO, EXACT)
        endpoint = self._endpoints.pop(address.worker, None)
        if endpoint is not None and not endpoint.alive:
            self._drop(endpoint)
            endpoint = None
        if endpoint is None:
            handle = self._worker.connect(address.worker, peer_failure=self._peer_failure)
            handle.set_close_callback(self._lost)
            # Connects: attempts with this peer fail if it is not there, or goes.
            self._worker.send(handle, bytearray(1), HELLO)
            endpoint = Endpoint(address, handle)
        self._endpoints[address.worker] = endpoint
        endpoint.users += 1
        return endpoint

    def release(self, endpoint: Endpoint) -> None:
        """One attempt less uses it."""
        endpoint.users -= 1
        self._reap()

    async def aclose(self) -> None:
        """Close all."""
        for endpoint in self._endpoints.values():
            self._drop(endpoint)
        self._endpoints.clear()
        if self._cuts:
            await asyncio.wait(self._cuts)

    def _lost(self) -> None:
        """A peer has gone. Called by UCX's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        """Close the endpoints without a user that have lost their peer, and the oldest of too many."""
        idle = [endpoint for endpoint in self._endpoints.values() if endpoint.users == 0]
        gone = [endpoint for endpoint in idle if not endpoint.alive]
        kept = [endpoint for endpoint in idle if endpoint.alive]
        for endpoint in gone + kept[: max(0, len(kept) - MAX_IDLE)]:
            del self._endpoints[endpoint.address.worker]
            self._drop(endpoint)

    def _drop(self, endpoint: Endpoint) -> None:
        task = self._loop.create_task(endpoint.cut())
        self._cuts.add(task)
        task.add_done_callback(_logged(self._cuts.discard))


def _logged(then: Callable[[asyncio.Task[None]], None]) -> Callable[[asyncio.Task[None]], None]:
    def done(task: asyncio.Task[None]) -> None:
        then(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("an endpoint of transport ucx did not close: %s", reason_of(error))

    return done
