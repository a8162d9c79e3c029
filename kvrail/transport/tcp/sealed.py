"""A connection whose bytes are encrypted and authenticated, with keys from what the gRPC call carried.

TLS on this socket would take a call of OpenSSL for each 16 KiB, and none while another thread waits to read. Here a
payload takes two calls for each SEGMENT_BYTES (docs/decisions/0021-tls.md). What is sent is a row of segments, AES-256
in GCM (NIST SP 800-38D): ciphertext, then its tag of 16 bytes. The nonce is the segment's number in its direction, and
each direction of each connection has a key of its own (HKDF, RFC 5869), so that no nonce is used twice.
"""

import hmac
import math
import secrets
from dataclasses import dataclass

from kvrail.transport.tcp.messages import FIRST, KEY, NAME_BYTES, SALT_BYTES, Place
from kvrail.transport.tcp.stream import Stream

SEGMENT_BYTES = 8 << 20
"""Bytes of a segment. Each takes the interpreter's lock twice at either end, beside an engine that wants it too."""
TAG_BYTES = 16
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Keys:
    """One key for each direction: for bytes of the payloads' receiver, and of their sender."""

    receiver: bytes
    sender: bytes

    @classmethod
    def derive(cls, secret: bytes, key: int, salt: bytes) -> "Keys":
        """Derive both from the sender's secret, an attempt's key and a salt that is new for each connection."""
        from cryptography.hazmat.primitives.hashes import SHA256  # only where sealing is asked for
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        made = HKDF(SHA256(), 2 * _KEY_BYTES, salt, b"kvrail payloads 1").derive(secret + KEY.pack(key))
        return cls(made[:_KEY_BYTES], made[_KEY_BYTES:])


def name_of(secret: bytes, key: int, place: Place = FIRST) -> bytes:
    """Names the attempt that a connection belongs to, and its place; reveals neither the secret nor the key."""
    return hmac.digest(secret, b"name" + KEY.pack(key) + place.pack(), "sha256")[:NAME_BYTES]


def new_salt() -> bytes:
    """A salt for one connection."""
    return secrets.token_bytes(SALT_BYTES)


class _Direction:
    """One direction's cipher and the number of its next segment."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self.cipher = AESGCM(key)
        self._number = 0

    def nonce(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(12)


class SealedStream(Stream):
    """Sends each part as segments of its own: the other end receives parts of the same lengths."""

    def __init__(self, stream: Stream, keys: Keys, *, receiver: bool) -> None:
        """Go on where `stream`, which is used no more, has come to. receiver: whether this end receives payloads."""
        self._sock, self._stall_s = stream._sock, stream._stall_s
        ours, theirs = (keys.receiver, keys.sender) if receiver else (keys.sender, keys.receiver)
        self._out, self._in = _Direction(ours), _Direction(theirs)
        self._scratch = memoryview(bytearray(0))

    def send(self, *parts: memoryview) -> None:
        """Send all of `parts`, one after the other."""
        for part in parts:
            for segment in _segments(part):
                sealed = self._room(segment.nbytes)
                self._out.cipher.encrypt_into(self._out.nonce(), segment, None, sealed)
                super().send(sealed)

    def receive(self, *parts: memoryview, begun: bool = False, silence_s: float = math.inf) -> None:
        """Fill all of `parts`, one after the other; bytes that the other end has not sent are a ConnectionError."""
        from cryptography.exceptions import InvalidTag

        for part in parts:
            for segment in _segments(part):
                sealed = self._room(segment.nbytes)
                super().receive(sealed, begun=begun, silence_s=silence_s)
                begun = True
                try:
                    self._in.cipher.decrypt_into(self._in.nonce(), sealed, None, segment)
                except InvalidTag as error:
                    segment[:] = b"\xff" * segment.nbytes  # it has been written; it must not be read, least as a size
                    raise ConnectionAbortedError("the bytes are not those that the other end sent") from error

    def post(self, message: bytes) -> None:
        """Send a few bytes without waiting, beside a thread that receives."""
        super().post(self._out.cipher.encrypt(self._out.nonce(), message, None))

    def _room(self, size: int) -> memoryview:
        """Memory for a sealed segment; a short attempt takes no more than it needs."""
        if self._scratch.nbytes < size + TAG_BYTES:
            self._scratch = memoryview(bytearray(size + TAG_BYTES))
        return self._scratch[: size + TAG_BYTES]


def _segments(part: memoryview) -> list[memoryview]:
    return [part[begin : begin + SEGMENT_BYTES] for begin in range(0, part.nbytes, SEGMENT_BYTES)]
