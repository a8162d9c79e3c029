"""The transport `ucx`: payloads cross by UCX, through UCXX, between host and CUDA memory (docs/decisions/0016-ucx.md).

Nothing here needs UCXX before a transport is started; `available` says why one could not be.
"""

import logging

from kvrail.transport.regions import ALIGNMENT, host_pool
from kvrail.transport.registry import TransportInfo, TransportOptions
from kvrail.transport.ucx.library import available, prefers_system
from kvrail.transport.ucx.network import device_of, devices_of, rdma_ports
from kvrail.transport.ucx.settings import UcxSettings
from kvrail.transport.ucx.transport import UcxTransport

__all__ = ["TRANSPORT", "UcxSettings", "UcxTransport", "available"]


logger = logging.getLogger("kvrail.transports")


async def _start(options: TransportOptions) -> UcxTransport:
    on_cuda = options.device.type == "cuda"
    rdma = prefers_system() and bool(rdma_ports())
    network = {"NET_DEVICES": (devices_of if rdma else device_of)(options.ucx_host)} if options.ucx_host else {}
    if rdma:
        logger.info("UCX is the system's and may use RDMA: %s", network.get("NET_DEVICES") or ", ".join(rdma_ports()))
    pool = options.pool or host_pool(ALIGNMENT, pinned=on_cuda)  # an end that only sends receives nothing into it
    return await UcxTransport.start(
        pool=pool,
        device=options.device if on_cuda else None,
        device_bytes=pool.buffer.numel() if on_cuda else 0,
        settings=UcxSettings(spin=options.poll, rdma=rdma, extra=network),
        silence_s=options.silence_s,
    )


TRANSPORT = TransportInfo("ucx", _start, obstacle=available)
