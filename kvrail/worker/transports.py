"""The transports of one worker: started once, the best first."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import torch

from kvrail.config.origins import flag_name
from kvrail.config.settings import DecodeSettings, PrefillSettings, WorkerSettings
from kvrail.errors import ConfigError, IncompatibleError
from kvrail.runtime.limits import usable_cores
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
    async def start(cls, settings: WorkerSettings, device: torch.device) -> "Transports":
        """Start a worker's: what prefills sends, and what decodes receives, into one pool of host memory.

        Raises ConfigError if one that the settings name cannot be started.
        """
        options = _options(settings, device)

        def refusal(info: TransportInfo) -> str:
            return _refusal(info, settings)

        started, obstacles = await registry.start(settings.transport, options, refusal)
        names = ", else by ".join(transport.name for transport in started)
        where = " from GPU to GPU" if started[0].on_device else ""
        why = "".join(f"; {obstacle}" for obstacle in obstacles)
        open_ones = in_clear(settings, [transport.name for transport in started])
        clear = f", unencrypted by {', '.join(open_ones)} although calls are encrypted" if open_ones else ""
        level, asked = logging.WARNING if clear else logging.INFO, f"{flag_name('transport')} {settings.transport}"
        logger.log(level, "KV crosses by %s%s%s (%s)%s", names, where, clear, asked, why)
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


def in_clear(settings: WorkerSettings, names: Sequence[str]) -> list[str]:
    """Those of the transports `names` by which KV would cross unencrypted beside encrypted calls."""
    return [name for name in names if settings.tls_cert and not registry.get(name).encrypts]


def taken(settings: WorkerSettings) -> list[str]:
    """Names of the transports that a worker's settings allow, best first, whether they can be started here or not.

    Raises ConfigError as `Transports.start`.
    """
    return [info.name for info in registry.candidates(settings.transport) if not _refusal(info, settings)]


def _options(settings: WorkerSettings, device: torch.device) -> TransportOptions:
    on_cuda, ends = device.type == "cuda", dict[str, Any]()
    if isinstance(settings, PrefillSettings):
        ends |= {"host": settings.host, "port": settings.data_port}
    if isinstance(settings, DecodeSettings):
        ends["pool"] = host_pool(
            settings.transfer_memory_mib << 20, pinned=on_cuda, patience_s=settings.transfer_timeout_s
        )
    polls = on_cuda and usable_cores() >= POLLING_CORES
    return TransportOptions(
        device,
        encrypt=bool(settings.tls_cert),
        silence_s=settings.transfer_timeout_s,
        poll=polls,
        ucx_host=settings.ucx_host,
        **ends,
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
