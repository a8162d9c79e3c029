"""The transport `ucx`: payloads cross by UCX, through UCXX, between host and CUDA memory (docs/decisions/0016-ucx.md).

Nothing here needs UCXX before a transport is started; `available` says why one could not be.
"""

from kvrail.transport.regions import ALIGNMENT, host_pool
from kvrail.transport.registry import TransportInfo, TransportOptions
from kvrail.transport.ucx.library import available
from kvrail.transport.ucx.network import device_of
from kvrail.transport.ucx.settings import UcxSettings
from kvrail.transport.ucx.transport import UcxTransport

__all__ = ["TRANSPORT", "UcxSettings", "UcxTransport", "available"]


async def _start(options: TransportOptions) -> UcxTransport:
    on_cuda = options.device.type == "cuda"
    network = {"NET_DEVICES": device_of(options.ucx_host)} if options.ucx_host else {}
    pool = options.pool or host_pool(ALIGNMENT, pinned=on_cuda)  # an end that only sends receives nothing into it
    return await UcxTransport.start(
        pool=pool,
        device=options.device if on_cuda else None,
        device_bytes=pool.buffer.numel() if on_cuda else 0,
        settings=UcxSettings(spin=options.poll, extra=network),
        silence_s=options.silence_s,
    )


TRANSPORT = TransportInfo("ucx", _start, obstacle=available)
