"""The transports of which the suite holds. One more is one more line of TRANSPORTS."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvrail.transport.base import Payload, Region, Transport
from kvrail.transport.regions import RegionPool, host_pool
from kvrail.transport.tcp import TcpTransport
from kvrail.transport.tcp.messages import MOST_CONNECTIONS
from kvrail.transport.ucx import UcxTransport, available
from tests.inproc.transport import InprocTransport
from tests.transport.ucx.starting import CMA, start_cma, start_tcp


@dataclass(frozen=True)
class Kind:
    """One transport under test, on host memory or on a CUDA device.

    start: makes an end that can send and receive, with so many bytes of pool. pool: the one of an end, for host
    payloads; without it regions are not the transport's. one_object: the same transport serves both ends. processes:
    they are tried in two processes, too. notices_death: a killed peer ends what waits for it; else `aclose` must.
    needs_peer: a payload comes only from a process that lives and runs; else what was sent may be read from one that
    does not. keeps: what connects two ends is kept after the first attempt. on_device: payloads lie on the CUDA
    device. met: whether the receiver has come to a sender; true where it does not come. unavailable: why it cannot run.
    """

    name: str
    start: Callable[[int], Awaitable[Transport]]
    pool: Callable[[Transport], RegionPool] | None = None
    one_object: bool = False
    processes: bool = True
    notices_death: bool = True
    needs_peer: bool = True
    keeps: bool = False
    on_device: bool = False
    met: Callable[[Any], bool] = lambda sender: True
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
    return InprocTransport()


async def start_plain(pool_bytes):
    return await TcpTransport.start(RegionPool(torch.zeros(pool_bytes, dtype=torch.uint8)), host="127.0.0.1")


async def start_sealed(pool_bytes):
    pool = RegionPool(torch.zeros(pool_bytes, dtype=torch.uint8))
    return await TcpTransport.start(pool, host="127.0.0.1", connections=MOST_CONNECTIONS, sealed=True)


async def start_device(pool_bytes):
    return await UcxTransport.start(
        pool=host_pool(1 << 20, pinned=True), device=torch.device("cuda", 0), device_bytes=pool_bytes, settings=CMA
    )


def device_unavailable():
    return available() or ("" if torch.cuda.is_available() else "no CUDA device")


TRANSPORTS = [
    Kind("inproc", start_inproc, one_object=True, processes=False),
    Kind("tcp", start_plain, lambda transport: transport.pool, met=lambda sender: bool(sender._connected())),
    Kind("tcp-sealed", start_sealed, lambda transport: transport.pool, processes=False),  # as tcp there, which is tried
    Kind("ucx-tcp", start_tcp, lambda transport: transport.pools.host, keeps=True, unavailable=available),
    Kind(
        "ucx-cma",
        start_cma,
        lambda transport: transport.pools.host,
        keeps=True,
        needs_peer=False,
        unavailable=available,
    ),
    Kind(
        "ucx-cuda",
        start_device,
        lambda transport: transport.pools.device,
        keeps=True,
        needs_peer=False,
        on_device=True,
        unavailable=device_unavailable,
    ),
]
PARAMETERS = [pytest.param(kind, marks=pytest.mark.gpu if kind.on_device else (), id=kind.name) for kind in TRANSPORTS]
