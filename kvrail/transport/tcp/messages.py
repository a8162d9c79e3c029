"""What the two ends say to each other: the transport's address, and the few fixed messages of a connection."""

import struct
from dataclasses import dataclass

from kvrail.errors import WorkerUnavailableError
from kvrail.transport.base import Peer

VERSION = 2
SECRET_BYTES = 32
MAGIC = b"kvrail\x00\x03"
SEALED_MAGIC = b"kvrail\x00\x04"
NAME_BYTES = 16
SALT_BYTES = 24
KEY = struct.Struct("!Q")
SIZE = struct.Struct("!Q")
"""A payload's size in bytes: a grant of the receiver, and what leads a payload."""

MOST_CONNECTIONS = 4
"""Of one attempt. Encrypted, on 16 cores, one moves 2.1 GB/s, four 5.8, sixteen 6.1 (docs/decisions/0021-tls.md)."""
LEAST_PART_BYTES = 1 << 20
"""A payload has at least as many bytes for each connection that it uses."""

_ADDRESS = struct.Struct(f"!BH{SECRET_BYTES}s")
_HELLO = struct.Struct(f"!{len(MAGIC)}s{SECRET_BYTES + KEY.size}sBB")
HELLO_BYTES = _HELLO.size
assert SECRET_BYTES + KEY.size == NAME_BYTES + SALT_BYTES


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
                f"port {port} of host {peer.host!r} is no place to fetch data from; name the sender's host, and give it"
                " a data port"
            )
        return cls(port, secret, peer.host)


@dataclass(frozen=True, slots=True)
class Place:
    """Which of an attempt's connections one is: `number` of at most `count`. The receiver chooses the count."""

    number: int = 0
    count: int = 1

    @classmethod
    def read(cls, number: int, count: int) -> "Place | None":
        """That place, or None where there is none such."""
        return cls(number, count) if number < count <= MOST_CONNECTIONS else None

    def pack(self) -> bytes:
        """Two bytes."""
        return bytes((self.number, self.count))


FIRST = Place()


def hello(secret: bytes, key: int, place: Place = FIRST) -> bytes:
    """What a receiver says first on a connection."""
    return _HELLO.pack(MAGIC, secret + KEY.pack(key), place.number, place.count)


def sealed_hello(name: bytes, salt: bytes, place: Place = FIRST) -> bytes:
    """What a receiver says first where what follows is encrypted."""
    return _HELLO.pack(SEALED_MAGIC, name + salt, place.number, place.count)


def read_hello(magic: bytes, data: bytes) -> tuple[bytes, Place] | None:
    """What proves a receiver, and the place of its connection; None where this is no hello of the kind of `magic`."""
    found, proof, number, count = _HELLO.unpack(data)
    place = Place.read(number, count)
    return (proof, place) if found == magic and place else None


def parts_of(size: int, connections: int) -> list[slice]:
    """Which bytes of a payload each of the first connections of an attempt carries; both ends compute it."""
    count = max(1, min(connections, size // LEAST_PART_BYTES))
    each = -(-size // count)
    return [slice(number * each, min(size, (number + 1) * each)) for number in range(count)]
