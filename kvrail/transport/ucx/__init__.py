"""The carrier `ucx`: payloads cross by UCX, through UCXX, between host and CUDA memory (docs/decisions/0016-ucx.md).

Nothing here needs UCXX before a carrier is started; `available` says why one could not be.
"""

from kvrail.transport.ucx.carrier import UcxCarrier
from kvrail.transport.ucx.library import available
from kvrail.transport.ucx.settings import UcxSettings

__all__ = ["UcxCarrier", "UcxSettings", "available"]
