"""The transports of one worker: started once, the best first."""

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from kvrail.config.settings import DecodeSettings, PrefillSettings, WorkerSettings, flag_name
from kvrail.errors import ConfigError, IncompatibleError
from kvrail.transport import registry
from kvrail.transport.base import Transport
from kvrail.transport.regions import host_pool
from kvrail.transport.registry import TransportInfo, TransportOptions
from kvrail.worker.codecs import WITHOUT_CODE

logger = logging.getLogger("kvrail.transports")

POLLING_CORES = 8
"""A worker on a GPU with this many cores lets one of them poll UCX, unless settings say otherwise."""


class Transports:
    """Transports of a worker, best first. Belongs to one event loop."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.all = tuple(transports)
        self._by_name = {transport.name: transport for transport in self.all}

    @classmethod
    async def to_send(cls, settings: PrefillSettings, device: torch.device) -> "Transports":
        """Start a prefill worker's. Raises ConfigError if one that the settings name cannot be started."""
        return await cls._start(settings, _options(settings, device, host=settings.host, port=settings.data_port))

    @classmethod
    async def to_receive(cls, settings: DecodeSettings, device: torch.device) -> "Transports":
        """Start a decode worker's, which share one pool of host memory. Raises as `to_send`."""
        pool = host_pool(settings.transfer_memory_mib << 20, pinned=device.type == "cuda")
        return await cls._start(settings, _options(settings, device, pool=pool))

    @classmethod
    async def _start(cls, settings: WorkerSettings, options: TransportOptions) -> "Transports":
        def refusal(info: TransportInfo) -> str:
            return _refusal(info, settings)

        started, obstacles = await registry.start(settings.transport, options, refusal)
        names = ", else by ".join(transport.name for transport in started)
        where = " from GPU to GPU" if started[0].on_device else ""
        why = "".join(f"; {obstacle}" for obstacle in obstacles)
        logger.info("KV crosses by %s%s (%s %s)%s", names, where, flag_name("transport"), settings.transport, why)
        return cls(started)

    @property
    def names(self) -> list[str]:
        """Their names, best first."""
        return list(self._by_name)

    @property
    def on_device(self) -> bool:
        """Whether the best one can leave payloads on the GPUs."""
        return self.all[0].on_device

    def first_codec(self, usual: str) -> str:
        """Name of the codec to begin with, before the link has been measured: nothing pays from GPU to GPU."""
        return WITHOUT_CODE if self.on_device else usual

    def get(self, name: str) -> Transport:
        """The transport called `name`; raises IncompatibleError where this worker has none."""
        transport = self._by_name.get(name)
        if transport is None:
            raise IncompatibleError(f"the other end chose transport {name!r}; this worker has {', '.join(self.names)}")
        return transport

    async def aclose(self) -> None:
        """Close them all."""
        await asyncio.gather(*(transport.aclose() for transport in self.all))


def _options(settings: WorkerSettings, device: torch.device, **ends: Any) -> TransportOptions:
    on_cuda = device.type == "cuda"
    polls = on_cuda and _cores() >= POLLING_CORES
    return TransportOptions(
        device, encrypt=bool(settings.tls_cert), silence_s=settings.transfer_timeout_s, poll=polls, **ends
    )


def _refusal(info: TransportInfo, settings: WorkerSettings) -> str:
    """Why `auto` leaves a transport out; "" if it does not. Raises ConfigError for one that is named."""
    if not settings.tls_cert or info.encrypts or settings.ucx_in_clear:
        return ""
    if settings.transport == registry.AUTO:
        return "it knows no encryption, and --ucx-in-clear is not set"
    raise ConfigError(
        f"--transport {info.name} sends KV unencrypted beside --tls-cert; use --transport tcp, or say --ucx-in-clear"
        " where the network between prefill and decode workers is trusted"
    )


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
