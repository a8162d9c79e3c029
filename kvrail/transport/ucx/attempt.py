"""What both ends of one attempt need of their transport."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from kvrail.errors import TransferAbortedError
from kvrail.transport.ucx.endpoints import Endpoint
from kvrail.transport.ucx.tags import DIRECTION_MASK, Kind, tag
from kvrail.transport.ucx.worker import Operation, UcxWorker

LINGER_S = 30.0
"""After its end an attempt waits this long for the other end to report its own end."""
ACKNOWLEDGED_BELOW = 1 << 16
"""Shorter payloads are acknowledged: UCX may take a copy of one, and its send end, before it is received. The send
of a longer one ends when the receiver has read it."""
_SETTLE_S = 0.05


@dataclass(frozen=True, slots=True)
class Attempt:
    """One end's share of an attempt at a transfer."""

    worker: UcxWorker
    endpoint: Endpoint
    key: int
    grace_s: float
    leave: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
    """Called once, when the end was closed: runs what is left to do, then releases the endpoint."""

    def send(self, buffer: Any, kind: Kind, number: int = 0) -> Operation:
        """Send a message of this attempt. Raises TransferAbortedError if the endpoint was cut."""
        if not self.endpoint.alive:
            raise TransferAbortedError("the other end is gone: its endpoint was cut")
        return self.worker.send(self.endpoint.handle, buffer, tag(self.key, kind, number))

    def receive(self, buffer: Any, kind: Kind, number: int = 0) -> Operation:
        """Receive a message of this attempt."""
        return self.worker.receive(self.endpoint.handle, buffer, tag(self.key, kind, number))

    def end(self, kind: Kind, number: int = 0) -> None:
        """End a receive that nothing has matched."""
        self.worker.end(tag(self.key, kind, number))

    async def sweep(self, kind: Kind) -> None:
        """Take what is left over of this attempt, of all kinds that travel in one direction with `kind`.

        The other end's last word has come, and with it all that it sent before. What `end` may have left over when it
        met a message on its way takes a moment.
        """
        self.sweep_now(kind)
        await asyncio.sleep(_SETTLE_S)
        self.sweep_now(kind)

    def sweep_now(self, kind: Kind) -> None:
        """Take what has come already."""
        self.worker.sweep(tag(self.key, kind), DIRECTION_MASK)
