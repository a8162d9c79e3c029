"""The carriers of which the suite holds. One more is one more line of CARRIERS."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
import torch

from kvrail.transport.base import Carrier, Payload, Region
from kvrail.transport.inproc import InprocCarrier
from kvrail.transport.regions import RegionPool
from kvrail.transport.sockets import SocketCarrier
from kvrail.transport.ucx import UcxCarrier, available
from tests.transport.ucx.starting import CMA, start_cma, start_tcp


@dataclass(frozen=True)
class Kind:
    """One carrier under test, on host memory or on a CUDA device.

    start: makes an end that can send and receive, with so many bytes of pool. pool: the one of an end, for host
    payloads; without it regions are not the carrier's. one_object: the same carrier serves both ends. processes: they
    are tried in two processes too. notices_death: a killed peer ends what waits for it; else `aclose` must.
    needs_peer: a payload comes only from a process that lives and runs; else what was sent may be read from one that
    does not. keeps: what connects two ends is kept after the first attempt. on_device: payloads lie on the CUDA
    device. unavailable: why it cannot run here.
    """

    name: str
    start: Callable[[int], Awaitable[Carrier]]
    pool: Callable[[Carrier], RegionPool] | None = None
    one_object: bool = False
    processes: bool = True
    notices_death: bool = True
    needs_peer: bool = True
    keeps: bool = False
    on_device: bool = False
    unavailable: Callable[[], str] = lambda: ""

    def payload(self, data: bytes) -> Payload:
        """A copy of `data` where payloads lie, complete."""
        if not self.on_device:
            return memoryview(bytearray(data))
        copied = torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()
        torch.cuda.synchronize()
        return copied

    def wipe(self, memory: Payload) -> None:
        """Fill a payload or a pool's buffer with zeros, now."""
        if isinstance(memory, torch.Tensor):
            memory.zero_()
            if memory.is_cuda:
                torch.cuda.synchronize()
        else:
            memory[:] = bytes(memory.nbytes)

    def read(self, region: Region) -> bytes:
        """What a region holds."""
        payload = region.payload
        if self.on_device:
            assert isinstance(payload, torch.Tensor) and payload.is_cuda
            return payload.cpu().numpy().tobytes()
        return bytes(payload)


async def start_inproc(pool_bytes):
    return InprocCarrier()


async def start_sockets(pool_bytes):
    return await SocketCarrier.start(RegionPool(torch.zeros(pool_bytes, dtype=torch.uint8)), host="127.0.0.1")


async def start_sealed(pool_bytes):
    return await SocketCarrier.start(
        RegionPool(torch.zeros(pool_bytes, dtype=torch.uint8)), host="127.0.0.1", sealed=True
    )


async def start_device(pool_bytes):
    return await UcxCarrier.start(
        host_bytes=1 << 20, device=torch.device("cuda", 0), device_bytes=pool_bytes, settings=CMA
    )


def device_unavailable():
    return available() or ("" if torch.cuda.is_available() else "no CUDA device")


CARRIERS = [
    Kind("inproc", start_inproc, one_object=True, processes=False),
    Kind("grpc", start_sockets, lambda carrier: carrier.pool),
    Kind("grpc-sealed", start_sealed, lambda carrier: carrier.pool, processes=False),  # as grpc there, which is tried
    Kind("ucx-tcp", start_tcp, lambda carrier: carrier.pools.host, keeps=True, unavailable=available),
    Kind("ucx-cma", start_cma, lambda carrier: carrier.pools.host, keeps=True, needs_peer=False, unavailable=available),
    Kind(
        "ucx-cuda",
        start_device,
        lambda carrier: carrier.pools.device,
        keeps=True,
        needs_peer=False,
        on_device=True,
        unavailable=device_unavailable,
    ),
]
PARAMETERS = [pytest.param(kind, marks=pytest.mark.gpu if kind.on_device else (), id=kind.name) for kind in CARRIERS]
