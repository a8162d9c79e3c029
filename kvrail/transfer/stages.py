"""Payloads of earlier stages, kept until the last stage of their pages has come, where that is decoded from them."""

from contextlib import AbstractContextManager

import numpy as np
import torch

from kvrail.codec.frame import Bounds, FrameHeader
from kvrail.transfer.observer import ReceivingObserver
from kvrail.transport.base import Payload


class KeptStages(AbstractContextManager["KeptStages"]):
    """What one attempt keeps, block by block; nothing once it is left, however it ends.

    wanted: whether the codec decodes a stage from the payloads of those before it; else nothing is kept.
    Payloads are kept as copies: the regions into which they came are few, and others wait for them. Frames must have
    been admitted: stages of a block come in order.
    """

    def __init__(self, observer: ReceivingObserver, wanted: bool) -> None:
        self._observer = observer
        self._wanted = wanted
        self._payloads: dict[Bounds, list[Payload]] = {}

    def __exit__(self, *_: object) -> None:
        for bounds in list(self._payloads):
            self._drop(bounds)

    def add(self, header: FrameHeader, payload: Payload) -> list[Payload]:
        """The payloads from which a frame's stage is decoded: those of earlier stages, and its own as it came.

        The last stage lets go of what was kept of its block.
        """
        if not self._wanted:
            return [payload]
        earlier = self._payloads.get(header.bounds, [])
        if header.stage == header.num_stages - 1:
            self._drop(header.bounds)
        else:
            self._payloads[header.bounds] = [*earlier, _copy_of(payload)]
            self._observer.kept(payload.nbytes)
        return [*earlier, payload]

    def _drop(self, bounds: Bounds) -> None:
        dropped = sum(payload.nbytes for payload in self._payloads.pop(bounds, ()))
        if dropped:
            self._observer.kept(-dropped)


def _copy_of(payload: Payload) -> Payload:
    """A copy in its own memory. `bytes` would hold the interpreter's lock, for milliseconds a payload."""
    if isinstance(payload, torch.Tensor):
        return payload.clone()
    copy = np.empty(payload.nbytes, dtype=np.uint8)
    np.copyto(copy, np.frombuffer(payload, dtype=np.uint8))
    return copy.data.toreadonly()
