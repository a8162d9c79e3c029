"""What the two ends say to each other: the transport's address, and the few fixed messages of a connection."""

import struct
from dataclasses import dataclass

from kvrail.errors import WorkerUnavailableError
from kvrail.transport.base import Peer

VERSION = 1
SECRET_BYTES = 32
MAGIC = b"kvrail\x00\x01"
SEALED_MAGIC = b"kvrail\x00\x02"
NAME_BYTES = 16
SALT_BYTES = 24
KEY = struct.Struct("!Q")
SIZE = struct.Struct("!Q")
"""A payload's size in bytes: a grant of the receiver, and what leads a payload."""

_ADDRESS = struct.Struct(f"!BH{SECRET_BYTES}s")
_HELLO = struct.Struct(f"!{len(MAGIC)}s{SECRET_BYTES}sQ")
_SEALED_HELLO = struct.Struct(f"!{len(SEALED_MAGIC)}s{NAME_BYTES}s{SALT_BYTES}s")
HELLO_BYTES = _HELLO.size
assert _SEALED_HELLO.size == HELLO_BYTES


@dataclass(frozen=True, slots=True)
class Address:
    """Where a sender listens: a port of the host by which its gRPC port was reached."""

    port: int
    secret: bytes
    host: str = ""

    def pack(self) -> bytes:
        """The form that peers get: without the host, which they know."""
        return _ADDRESS.pack(VERSION, self.port, self.secret)

    @classmethod
    def of(cls, peer: Peer) -> "Address":
        """Read a peer's. Raises WorkerUnavailableError if it names no port of the host that was called.

        A peer does not choose where this end connects to: an address that names a host is refused.
        """
        data = peer.address
        if len(data) != _ADDRESS.size or data[0] != VERSION:
            raise WorkerUnavailableError(
                f"the prefill worker's data address has {len(data)} bytes; one of version {VERSION} has"
                f" {_ADDRESS.size}, and names no host: data comes from the host that was called ({peer.host}). Give the"
                " worker a data port, and run the same release on both ends"
            )
        _, port, secret = _ADDRESS.unpack(data)
        if not port or not peer.host:
            raise WorkerUnavailableError(
                f"port {port} of host {peer.host!r} is no place to fetch data from; give the prefill worker a data port"
            )
        return cls(port, secret, peer.host)


def hello(secret: bytes, key: int) -> bytes:
    """What a receiver says first."""
    return _HELLO.pack(MAGIC, secret, key)


def read_hello(data: bytes) -> tuple[bytes, int] | None:
    """The secret and the key of a hello, or None where it is none."""
    magic, secret, key = _HELLO.unpack(data)
    return (secret, key) if magic == MAGIC else None


def sealed_hello(name: bytes, salt: bytes) -> bytes:
    """What a receiver says first where what follows is encrypted."""
    return _SEALED_HELLO.pack(SEALED_MAGIC, name, salt)


def read_sealed_hello(data: bytes) -> tuple[bytes, bytes] | None:
    """The name and the salt of such a hello, or None where it is none."""
    magic, name, salt = _SEALED_HELLO.unpack(data)
    return (name, salt) if magic == SEALED_MAGIC else None
