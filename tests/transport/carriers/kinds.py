"""The carriers of which the suite holds. One more is one more line of CARRIERS."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

from kvrail.transport.base import Carrier
from kvrail.transport.inproc import InprocCarrier
from kvrail.transport.regions import RegionPool
from kvrail.transport.sockets import SocketCarrier
from kvrail.transport.ucx import available
from tests.transport.ucx.starting import start_cma, start_tcp


@dataclass(frozen=True)
class Kind:
    """One carrier under test, on host memory.

    start: makes an end that can send and receive, with so many bytes of pool. pool: the one of an end, for host
    payloads; without it regions are not the carrier's. one_object: the same carrier serves both ends. processes: the
    ends may be in two processes. notices_death: a killed peer ends what waits for it; else `aclose` must. needs_peer: a
    payload comes only from a process that lives and runs; else what was sent may be read from one that does not. keeps:
    what connects two ends is kept after the first attempt. unavailable: why it cannot run here.
    """

    name: str
    start: Callable[[int], Awaitable[Carrier]]
    pool: Callable[[Carrier], RegionPool] | None = None
    one_object: bool = False
    processes: bool = True
    notices_death: bool = True
    needs_peer: bool = True
    keeps: bool = False
    unavailable: Callable[[], str] = lambda: ""


async def start_inproc(pool_bytes):
    return InprocCarrier()


async def start_sockets(pool_bytes):
    return await SocketCarrier.start(RegionPool(torch.zeros(pool_bytes, dtype=torch.uint8)), host="127.0.0.1")


CARRIERS = [
    Kind("inproc", start_inproc, one_object=True, processes=False),
    Kind("grpc", start_sockets, lambda carrier: carrier.pool),
    Kind("ucx-tcp", start_tcp, lambda carrier: carrier.pools.host, keeps=True, unavailable=available),
    Kind("ucx-cma", start_cma, lambda carrier: carrier.pools.host, keeps=True, needs_peer=False, unavailable=available),
]
