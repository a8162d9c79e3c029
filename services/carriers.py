"""The transports of one worker: started once, the best first."""

import logging
from collections.abc import Callable, Sequence

import torch

from kvrail.config import WorkerSettings, flag_name
from kvrail.errors import IncompatibleError
from kvrail.transport.base import Carrier

logger = logging.getLogger("kvrail.carriers")


class Carriers:
    """Carriers of a worker, best first. Belongs to one event loop."""

    def __init__(self, carriers: Sequence[Carrier]) -> None:
        self.all = tuple(carriers)
        self._by_name = {carrier.name: carrier for carrier in self.all}

    @classmethod
    async def start(cls, settings: WorkerSettings, device: torch.device) -> "Carriers":
        """Those that the settings name; with auto, UCX where it can be used, and in any case plain sockets.

        Raises ConfigError where one that is named cannot be started.
        """
        pool_bytes = max(settings.receive_pool_mib << 20, 2 * settings.max_frame_bytes)
        carriers: list[Carrier] = []
        obstacle = "" if settings.transport != "auto" else ucx.available()
        if settings.transport != "grpc" and not obstacle:
            carriers.append(await ucx.UcxCarrier.start(device=device, pool_bytes=pool_bytes))
        if settings.transport != "ucx":
            pinned = device.type == "cuda"
            buffer = torch.empty(pool_bytes, dtype=torch.uint8, pin_memory=pinned)
            carriers.append(await SocketCarrier.start(settings.host, settings.data_port, buffer))
        names = ", else by ".join(carrier.name for carrier in carriers)
        why = f"; without UCX: {obstacle}" if obstacle else ""
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

    def get(self, name: str) -> Carrier:
        """The carrier called `name`; raises IncompatibleError where this worker has none."""
        carrier = self._by_name.get(name)
        if carrier is None:
            raise IncompatibleError(f"the other end chose transport {name!r}; this worker has {', '.join(self.names)}")
        return carrier

    async def aclose(self) -> None:
        """Close them all."""
        for carrier in self.all:
            await carrier.aclose()
