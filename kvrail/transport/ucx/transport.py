"""The transport: one UCX worker, its endpoints, its pools, and the attempts that use them."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import torch

from kvrail.errors import TransferAbortedError, WorkerUnavailableError
from kvrail.transport.base import Peer
from kvrail.transport.regions import RegionPool
from kvrail.transport.ucx.address import UcxAddress, device_uuid
from kvrail.transport.ucx.attempt import Attempt
from kvrail.transport.ucx.endpoints import Endpoint, Endpoints
from kvrail.transport.ucx.receiver import Pools, UcxReceiver
from kvrail.transport.ucx.retired import RetiredBuffers
from kvrail.transport.ucx.sender import UcxSender
from kvrail.transport.ucx.settings import UcxSettings
from kvrail.transport.ucx.tags import shorten
from kvrail.transport.ucx.worker import UcxWorker

logger = logging.getLogger(__name__)

_KEYS = 4096
"""Keys that are remembered, so that none is used twice."""


class UcxTransport:
    """Payloads by UCX; made with `start`. See `Transport` for each member's contract."""

    name = "ucx"

    def __init__(
        self,
        worker: UcxWorker,
        pools: Pools,
        settings: UcxSettings,
        address: bytes,
        grace_s: float,
        silence_s: float,
    ) -> None:
        self._worker, self._pools, self._grace_s, self._silence_s = worker, pools, grace_s, silence_s
        self._endpoints = Endpoints(worker, peer_failure=settings.peer_failure)
        self._retired = RetiredBuffers(pools.host.buffer.numel() // 4)
        self._keys: dict[int, None] = {}  # in the order of their use
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = address

    @classmethod
    async def start(
        cls,
        *,
        pool: RegionPool,
        device: torch.device | None = None,
        device_bytes: int = 0,
        settings: UcxSettings | None = None,
        grace_s: float = 5.0,
        silence_s: float = 60.0,
    ) -> "UcxTransport":
        """Start UCX and take the device's pool.

        Payloads land in `pool`, in host memory, and in `device_bytes` on `device`. `grace_s` is how long a peer may
        take to let go of an attempt that was given up, before it is cut off; `silence_s` how long one may take nothing
        of what waits for it. Raises ConfigError if UCXX is absent or does not start.
        """
        settings = settings or UcxSettings()
        worker = UcxWorker(settings, device)
        try:
            on_device = device is not None and device_bytes > 0 and worker.cuda
            if device is not None and device_bytes > 0 and not worker.cuda:
                logger.warning("UCX has no CUDA here: payloads of %s pass through the host", device)
            memory = torch.empty(device_bytes if on_device else 0, dtype=torch.uint8, device=device)
            pools = Pools(pool, RegionPool(memory, silence_s) if on_device else None)
            uuid = device_uuid(device) if on_device and device is not None else None
            address = UcxAddress(worker.address, uuid).pack()
        except BaseException:
            await worker.aclose()
            raise
        return cls(worker, pools, settings, address, grace_s, silence_s)

    @property
    def on_device(self) -> bool:
        """Whether payloads can go from and to this worker's CUDA device without passing through the host."""
        return self._pools.device is not None

    @property
    def pools(self) -> Pools:
        """What payloads are received into."""
        return self._pools

    @property
    def endpoints(self) -> int:
        """Endpoints that are open."""
        return len(self._endpoints)

    @property
    def retired_bytes(self) -> int:
        """Bytes of the pools that UCX holds though their endpoint has been closed."""
        return self._retired.held_bytes

    async def sender(self, peer: Peer, key: int) -> UcxSender:
        """The sending end of attempt `key`. Raises TransferAbortedError where the peer cannot be reached."""
        address = UcxAddress.unpack(peer.address)
        endpoint = self._hold(address, TransferAbortedError)
        on_device = self.on_device and address.device is not None
        return UcxSender(self._attempt(endpoint, key), on_device=on_device, silence_s=self._silence_s)

    async def receiver(self, peer: Peer, key: int) -> UcxReceiver:
        """The receiving end of attempt `key`, which must be new.

        Raises WorkerUnavailableError where the peer cannot be reached, TransferAbortedError where the key was used.
        """
        short = shorten(key)
        if short in self._keys:
            raise TransferAbortedError(f"the key {key:#x} has been used; draw 64 random bits")
        endpoint = self._hold(UcxAddress.unpack(peer.address), WorkerUnavailableError)
        self._keys[short] = None
        if len(self._keys) > _KEYS:
            del self._keys[next(iter(self._keys))]
        return UcxReceiver(self._attempt(endpoint, key), self._pools, self._retired)

    async def aclose(self) -> None:
        """Close everything; senders and receivers have been closed before.

        A peer has a grace to take what is on its way and to report its own end.
        """
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=self._grace_s)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)
        await self._endpoints.aclose()
        await self._worker.aclose()

    def _hold(self, address: UcxAddress, error: type[Exception]) -> Endpoint:
        try:
            return self._endpoints.hold(address)
        except self._worker.errors as failed:
            raise error(
                f"UCX finds no way to the peer: {failed}; both ends need a network or host in common"
            ) from failed

    def _attempt(self, endpoint: Endpoint, key: int) -> Attempt:
        def leave(last: Callable[[], Coroutine[Any, Any, None]]) -> None:
            task = asyncio.create_task(self._part(endpoint, key, last))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return Attempt(self._worker, endpoint, key, self._grace_s, leave)

    async def _part(self, endpoint: Endpoint, key: int, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do what is left to do for an attempt that was closed, then release its endpoint."""
        try:
            await last()
        finally:
            self._endpoints.release(endpoint)
