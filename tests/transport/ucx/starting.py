"""Transports on loopback: by tcp alone, as between hosts, and with cma, as within one."""

import os
from types import MappingProxyType

from kvrail.transport.regions import host_pool
from kvrail.transport.ucx import UcxSettings, UcxTransport, available

assert not (os.environ.get("CI") and available()), available()  # a skip would hide faults

LOOPBACK = MappingProxyType({"NET_DEVICES": "lo"})
TCP = UcxSettings(transports="tcp,self", extra=LOOPBACK)
CMA = UcxSettings(transports="tcp,cma,self", extra=LOOPBACK)
GRACE_S = 0.5
"""A peer that stands still gets so long."""


async def start_tcp(pool_bytes):
    return await UcxTransport.start(pool=host_pool(pool_bytes), settings=TCP, grace_s=GRACE_S)


async def start_cma(pool_bytes):
    return await UcxTransport.start(pool=host_pool(pool_bytes), settings=CMA, grace_s=GRACE_S)
