"""The transports of one worker: started once, the best first."""

import asyncio
import logging
import os
from collections.abc import Sequence

import torch

from kvrail.config.settings import DecodeSettings, PrefillSettings, WorkerSettings, flag_name
from kvrail.errors import ConfigError, IncompatibleError, KvrailError, reason_of
from kvrail.transport import ucx
from kvrail.transport.base import Carrier
from kvrail.transport.regions import ALIGNMENT, RegionPool
from kvrail.transport.sockets import SocketCarrier, Timeouts
from kvrail.worker.codecs import WITHOUT_CODE

logger = logging.getLogger("kvrail.carriers")

POLLING_CORES = 8
"""Where a worker on a GPU may use so many, one of them polls UCX by itself."""


class Carriers:
    """Carriers of a worker, best first. Belongs to one event loop."""

    def __init__(self, carriers: Sequence[Carrier]) -> None:
        self.all = tuple(carriers)
        self._by_name = {carrier.name: carrier for carrier in self.all}

    @classmethod
    async def to_send(cls, settings: PrefillSettings, device: torch.device) -> "Carriers":
        """A prefill worker's. Raises ConfigError where one that the settings name cannot be started."""
        fast, obstacle = await _ucx(settings, device, ALIGNMENT)  # it receives nothing
        sealed = bool(settings.tls_cert)
        carriers: list[Carrier] = [] if fast is None else [fast]
        try:
            if settings.transport != "ucx":
                times = Timeouts(silence_s=settings.transfer_timeout_s)
                carriers.append(
                    await SocketCarrier.start(
                        host=settings.host, port=settings.data_port, timeouts=times, sealed=sealed
                    )
                )
        except BaseException:
            await cls(carriers).aclose()
            raise
        return cls._told(carriers, settings, obstacle)

    @classmethod
    async def to_receive(cls, settings: DecodeSettings, device: torch.device) -> "Carriers":
        """A decode worker's, with one host pool. Raises ConfigError where one that is named cannot be started."""
        sealed = bool(settings.tls_cert)
        pool_bytes = settings.transfer_memory_mib << 20
        fast, obstacle = await _ucx(settings, device, pool_bytes)
        carriers: list[Carrier] = [] if fast is None else [fast]
        if fast is not None and settings.transport != "ucx":
            carriers.append(await SocketCarrier.start(fast.pools.host, sealed=sealed))
        elif fast is None:
            buffer = torch.empty(pool_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            carriers.append(await SocketCarrier.start(RegionPool(buffer), sealed=sealed))
        return cls._told(carriers, settings, obstacle)

    @classmethod
    def _told(cls, carriers: Sequence[Carrier], settings: WorkerSettings, obstacle: str) -> "Carriers":
        names = ", else by ".join(carrier.name for carrier in carriers)
        why = f"; not by ucx: {obstacle}" if obstacle else ""
        where = " from GPU to GPU" if carriers[0].on_device else ""
        logger.info("KV crosses by %s%s (%s %s)%s", names, where, flag_name("transport"), settings.transport, why)
        return cls(carriers)

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

    def get(self, name: str) -> Carrier:
        """The carrier called `name`; raises IncompatibleError where this worker has none."""
        carrier = self._by_name.get(name)
        if carrier is None:
            raise IncompatibleError(f"the other end chose transport {name!r}; this worker has {', '.join(self.names)}")
        return carrier

    async def aclose(self) -> None:
        """Close them all."""
        await asyncio.gather(*(carrier.aclose() for carrier in self.all))


async def _ucx(settings: WorkerSettings, device: torch.device, pool_bytes: int) -> tuple[ucx.UcxCarrier | None, str]:
    """The UCX carrier, where the settings want it and, with auto, where it can be had; else why not."""
    if settings.transport == "grpc":
        return None, ""
    if settings.tls_cert and not settings.ucx_in_clear:
        if settings.transport == "auto":
            return None, "it knows no encryption, and --ucx-in-clear is not set"
        raise ConfigError(
            "--transport ucx sends KV unencrypted beside --tls-cert; use --transport grpc, or say --ucx-in-clear where"
            " the network between prefill and decode workers is trusted"
        )
    if settings.transport == "auto" and (obstacle := ucx.available()):
        return None, obstacle
    on_cuda = device.type == "cuda"
    polls = on_cuda and _cores() >= POLLING_CORES
    try:
        return await ucx.UcxCarrier.start(
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
