"""The transports of one worker: started once, the best first."""

import asyncio
import logging
import os
from collections.abc import Sequence

import torch

from kvrail.config.settings import DecodeSettings, PrefillSettings, WorkerSettings, flag_name
from kvrail.errors import ConfigError, IncompatibleError, KvrailError, reason_of
from kvrail.transport import ucx
from kvrail.transport.base import Transport
from kvrail.transport.regions import ALIGNMENT, RegionPool
from kvrail.transport.tcp import TcpTransport, Timeouts
from kvrail.worker.codecs import WITHOUT_CODE

logger = logging.getLogger("kvrail.transports")

POLLING_CORES = 8
"""Where a worker on a GPU may use so many, one of them polls UCX by itself."""


class Transports:
    """Transports of a worker, best first. Belongs to one event loop."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.all = tuple(transports)
        self._by_name = {transport.name: transport for transport in self.all}

    @classmethod
    async def to_send(cls, settings: PrefillSettings, device: torch.device) -> "Transports":
        """A prefill worker's. Raises ConfigError where one that the settings name cannot be started."""
        fast, obstacle = await _ucx(settings, device, ALIGNMENT)  # it receives nothing
        sealed = bool(settings.tls_cert)
        transports: list[Transport] = [] if fast is None else [fast]
        try:
            if settings.transport != "ucx":
                times = Timeouts(silence_s=settings.transfer_timeout_s)
                transports.append(
                    await TcpTransport.start(host=settings.host, port=settings.data_port, timeouts=times, sealed=sealed)
                )
        except BaseException:
            await cls(transports).aclose()
            raise
        return cls._told(transports, settings, obstacle)

    @classmethod
    async def to_receive(cls, settings: DecodeSettings, device: torch.device) -> "Transports":
        """A decode worker's, with one host pool. Raises ConfigError where one that is named cannot be started."""
        sealed = bool(settings.tls_cert)
        pool_bytes = max(settings.receive_pool_mib << 20, 2 * settings.max_frame_bytes)
        fast, obstacle = await _ucx(settings, device, pool_bytes)
        transports: list[Transport] = [] if fast is None else [fast]
        if fast is not None and settings.transport != "ucx":
            transports.append(await TcpTransport.start(fast.pools.host, sealed=sealed))
        elif fast is None:
            buffer = torch.empty(pool_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            transports.append(await TcpTransport.start(RegionPool(buffer), sealed=sealed))
        return cls._told(transports, settings, obstacle)

    @classmethod
    def _told(cls, transports: Sequence[Transport], settings: WorkerSettings, obstacle: str) -> "Transports":
        names = ", else by ".join(transport.name for transport in transports)
        why = f"; not by ucx: {obstacle}" if obstacle else ""
        where = " from GPU to GPU" if transports[0].on_device else ""
        logger.info("KV crosses by %s%s (%s %s)%s", names, where, flag_name("transport"), settings.transport, why)
        return cls(transports)

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


async def _ucx(settings: WorkerSettings, device: torch.device, pool_bytes: int) -> tuple[ucx.UcxTransport | None, str]:
    """The UCX transport, where the settings want it and, with auto, where it can be had; else why not."""
    if settings.transport == "tcp":
        return None, ""
    if settings.tls_cert and not settings.ucx_in_clear:
        if settings.transport == "auto":
            return None, "it knows no encryption, and --ucx-in-clear is not set"
        raise ConfigError(
            "--transport ucx sends KV unencrypted beside --tls-cert; use --transport tcp, or say --ucx-in-clear where"
            " the network between prefill and decode workers is trusted"
        )
    if settings.transport == "auto" and (obstacle := ucx.available()):
        return None, obstacle
    on_cuda = device.type == "cuda"
    polls = settings.ucx_polling == "on" or (settings.ucx_polling == "auto" and on_cuda and _cores() >= POLLING_CORES)
    try:
        return await ucx.UcxTransport.start(
            host_bytes=pool_bytes,
            device=device if on_cuda else None,
            device_bytes=pool_bytes if on_cuda else 0,
            settings=ucx.UcxSettings(spin=polls),
            silence_s=settings.transfer_timeout_s,
        ), ""
    except (KvrailError, RuntimeError, OSError) as error:
        if settings.transport != "auto":
            raise
        logger.warning("transport ucx does not start: %s", reason_of(error))
        return None, reason_of(error)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
