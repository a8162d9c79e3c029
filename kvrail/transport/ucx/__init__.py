"""The transport `ucx`: payloads cross by UCX, through UCXX, between host and CUDA memory (docs/decisions/0016-ucx.md).

Nothing here needs UCXX before a transport is started; `available` says why one could not be.
"""

from kvrail.transport.ucx.library import available
from kvrail.transport.ucx.settings import UcxSettings
from kvrail.transport.ucx.transport import UcxTransport

__all__ = ["UcxSettings", "UcxTransport", "available"]
