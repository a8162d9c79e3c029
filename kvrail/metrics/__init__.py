"""Every metric's name, and the few objects through which processes record them; kvrail/exposition.py shows them.

docs/metrics.md lists them all; `make docs-metrics` writes it from here. Router and workers share no name but those of
`show_process`.
"""

from kvrail.metrics.making import show_certificates, show_process
from kvrail.metrics.router import COUNTED_TOKENS, RouterMetrics
from kvrail.metrics.worker import CodecMetrics, EngineMetrics, TransferMetrics

__all__ = [
    "COUNTED_TOKENS",
    "CodecMetrics",
    "EngineMetrics",
    "RouterMetrics",
    "TransferMetrics",
    "show_certificates",
    "show_process",
]
