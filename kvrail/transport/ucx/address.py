"""How a UCX transport calls itself: its worker's address and what its device is.

Packed, little-endian: b"kvux", a byte of version (2), a byte of flags (1 = payloads may lie on a CUDA device), that
device's UUID in 16 bytes or zeros, CRC-32 of all else in 4, UCX's worker address.
"""

import struct
import uuid
import zlib
from dataclasses import dataclass

import torch

from kvrail.errors import IncompatibleError
from kvrail.transport.base import MAX_ADDRESS_BYTES

_HEAD = struct.Struct("<4sBB16s")
_CHECK = struct.Struct("<I")
_MAGIC = b"kvux"
_VERSION = 2
_ON_DEVICE = 1


@dataclass(frozen=True, slots=True)
class UcxAddress:
    """What the other end must know."""

    worker: bytes
    device: uuid.UUID | None = None
    """The CUDA device that payloads may lie on."""

    def pack(self) -> bytes:
        """As bytes, at most MAX_ADDRESS_BYTES. Raises IncompatibleError where UCX has too many network devices."""
        head = _HEAD.pack(_MAGIC, _VERSION, _ON_DEVICE if self.device else 0, self.device.bytes if self.device else b"")
        packed = head + _CHECK.pack(zlib.crc32(head + self.worker)) + self.worker
        if len(packed) > MAX_ADDRESS_BYTES:
            raise IncompatibleError(
                f"UCX's address has {len(packed)} bytes, at most {MAX_ADDRESS_BYTES} are sent; name the network devices"
                " in UCX_NET_DEVICES"
            )
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> "UcxAddress":
        """Read what `pack` made. Raises IncompatibleError: UCX itself does not check what it is given."""
        begin = _HEAD.size + _CHECK.size
        if not begin < len(packed) <= MAX_ADDRESS_BYTES or packed[:4] != _MAGIC:
            raise IncompatibleError(
                f"{len(packed)} bytes are no address of transport 'ucx'; both ends need --transport ucx"
            )
        _, version, flags, device = _HEAD.unpack_from(packed)
        if version != _VERSION:
            raise IncompatibleError(
                f"the peer's ucx address has version {version}, this end reads {_VERSION}; update both"
            )
        head, worker = packed[: _HEAD.size], packed[begin:]
        if _CHECK.unpack_from(packed, _HEAD.size)[0] != zlib.crc32(head + worker):
            raise IncompatibleError("the peer's ucx address was damaged on its way")
        return cls(worker, uuid.UUID(bytes=device) if flags & _ON_DEVICE else None)


def device_uuid(device: torch.device) -> uuid.UUID:
    """The UUID by which the driver knows a CUDA device."""
    return uuid.UUID(str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-"))
