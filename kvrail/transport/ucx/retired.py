"""Regions that UCX may still write though their endpoint has been closed."""

import logging
from collections.abc import Collection

from kvrail.transport.regions import PooledRegion
from kvrail.transport.ucx.worker import Operation

logger = logging.getLogger(__name__)


class RetiredBuffers:
    """Keeps regions from their pool until UCX has let go of them. Belongs to one event loop.

    UCX ends every operation of an endpoint that is closed by force, where the endpoint notices failures. So this stays
    empty but for a transport that breaks its word. What comes here is lost to the pool, and from a limit on that is an
    error: a worker whose pool shrinks must be seen and restarted.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self.held_bytes = 0

    def keep(self, region: PooledRegion, pending: Collection[Operation]) -> None:
        """Release `region` once all of `pending` have ended, and not before."""
        size = region.tensor.numel()
        self.held_bytes += size
        left = set(pending)

        def ended(operation: Operation) -> None:
            left.discard(operation)
            if not left:
                self.held_bytes -= size
                region.release()

        for operation in pending:
            operation.add_done_callback(ended)
        level = logging.ERROR if self.held_bytes > self._limit else logging.WARNING
        logger.log(
            level,
            "UCX still holds a region of %d bytes of a closed endpoint, %d bytes in all; restart this worker where that"
            " does not go away",
            size,
            self.held_bytes,
        )
