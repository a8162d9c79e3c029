"""Payloads in host memory, and their way to a device."""

import numpy as np
import torch

from kvrail.codec.base import CodecError, Payload
from kvrail.codec.core.arrays import Bytes


def host_bytes(name: str, payload: Payload) -> Bytes:
    """A view of a payload, uint8 [n], which may be read-only. Raises CodecError where it does not lie in host memory.

    name: the codec's, for the message.
    """
    if isinstance(payload, torch.Tensor):
        raise CodecError(f"{name} decodes payloads in host memory, and this one is a tensor on {payload.device}")
    return np.frombuffer(payload, dtype=np.uint8)


def host_memory(size: int, device: torch.device) -> torch.Tensor:
    """Uninitialised memory for what comes from `device`, uint8 [size]; where that is CUDA, pinned.

    Pinned memory is torch's, which rounds it up to a power of two and gives it out again once nothing refers to it and
    the copies have run; allocating more takes the driver about a millisecond a MiB.
    """
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def to_device(source: Bytes, device: torch.device) -> torch.Tensor:
    """A copy on `device`, uint8 [n], made on the current stream.

    What is pinned is copied from where it lies, and must stay until the stream has done so. Other memory is copied to
    pinned memory first, so that the copy to the device waits for nothing; read-only views are taken for such.
    """
    if device.type == "cuda" and source.flags.writeable:
        found = torch.from_numpy(source)
        if found.is_pinned():
            return found.to(device, non_blocking=True)
    staging = host_memory(source.size, device)
    staging.numpy()[:] = source
    return staging.to(device, non_blocking=True)
