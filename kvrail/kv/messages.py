"""The control messages of a transfer as bytes: the receiver's offer, and what the sender says after it, in order.

    offer        JSON, from the receiver, once
    "A" + JSON   accepted: the codec, the transport and its address
    "F" + frame  a frame leaves: payload's size (8 bytes), whether it is on a device (1 byte), the frame's head
    "E" + counts the end: frames and payload bytes (8 bytes each)
    "W"          the sender is at work, though nothing leaves
    "X" + text   the sender gave up, and why

All numbers are big-endian. What does not read as such is refused with FrameError.
"""

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

from kvrail.errors import FrameError
from kvrail.transport.base import MAX_ADDRESS_BYTES, Announcement
from kvrail.values.layout import DTYPE_BYTES, KVLayout

VERSION = 2
MAX_OFFER_BYTES = 64 << 10
MAX_TEXT = 1024
MAX_REQUEST_BYTES = 255
"""A request's name has no more in UTF-8: a frame's head has no room for them."""

_FRAME = struct.Struct("!Q?")
_END = struct.Struct("!QQ")


@dataclass(frozen=True, slots=True)
class OfferedTransport:
    """A transport by which the receiver can be reached."""

    name: str
    address: bytes
    on_device: bool


@dataclass(frozen=True, slots=True)
class Offer:
    """What a receiver wants, and how it can take it: codecs and transports, best first.

    codecs: the number of each one's parameters, by name. key: of this attempt. frame_layers: most layers of a frame;
    0: any number.
    """

    request: str
    key: int
    layout: KVLayout
    num_pages: int
    codecs: dict[str, int]
    transports: tuple[OfferedTransport, ...]
    max_frame_bytes: int
    frame_layers: int
    encrypt: bool

    def pack(self) -> bytes:
        """As the sender gets it."""
        fields = asdict(self) | {"version": VERSION}
        fields["transports"] = [[each.name, each.address.hex(), each.on_device] for each in self.transports]
        return json.dumps(fields).encode()

    @classmethod
    def unpack(cls, data: bytes) -> "Offer":
        """Read one. Raises FrameError."""
        fields = _json(data, "an offer", MAX_OFFER_BYTES)
        try:
            if fields.pop("version") != VERSION:
                raise FrameError(f"the offer is not of version {VERSION}; run the same version of kvrail at both ends")
            layout = KVLayout(**fields.pop("layout"))
            transports = tuple(OfferedTransport(str(n), _address(a), bool(d)) for n, a, d in fields.pop("transports"))
            offer = cls(layout=layout, transports=transports, **fields)
            numbers = (offer.key, offer.num_pages, offer.max_frame_bytes, offer.frame_layers, *offer.codecs.values())
            sizes = [value for name, value in asdict(layout).items() if name not in ("dtype", "page_format")]
            if not all(type(each) is int and 0 <= each < 1 << 64 for each in (*numbers, *sizes)):
                raise ValueError("a number is not one of 64 bits")
            if (
                type(offer.encrypt) is not bool
                or layout.dtype not in DTYPE_BYTES
                or not all(isinstance(s, str) for s in (offer.request, layout.page_format))
            ):
                raise ValueError("encrypt, dtype, page format or request is none")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FrameError(f"the offer is malformed: {error}") from error
        return offer


@dataclass(frozen=True, slots=True)
class Accepted:
    """The sender's choice."""

    codec: str
    transport: str
    address: bytes


@dataclass(frozen=True, slots=True)
class End:
    """Every frame has left: how many, and the bytes of their payloads."""

    frames: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Working:
    """The sender is at work, though nothing leaves."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The sender sends no more."""

    reason: str


Message = Accepted | Announcement | End | Working | GivenUp


def pack(message: Message) -> bytes:
    """A sender's message as bytes."""
    match message:
        case Accepted():
            fields = {"codec": message.codec, "transport": message.transport, "address": message.address.hex()}
            return b"A" + json.dumps(fields).encode()
        case Announcement():
            return b"F" + _FRAME.pack(message.payload_bytes, message.on_device) + message.head
        case End():
            return b"E" + _END.pack(message.frames, message.payload_bytes)
        case Working():
            return b"W"
        case GivenUp():
            return b"X" + message.reason[:MAX_TEXT].encode(errors="replace")


def unpack(data: bytes) -> Message:
    """Read a sender's message. Raises FrameError."""
    kind, body = data[:1], data[1:]
    try:
        if kind == b"A":
            fields = _json(body, "an acceptance", MAX_OFFER_BYTES)
            return Accepted(str(fields["codec"]), str(fields["transport"]), _address(fields["address"]))
        if kind == b"F":
            size, on_device = _FRAME.unpack_from(body)
            return Announcement(body[_FRAME.size :], size, on_device)
        if kind == b"E":
            return End(*_END.unpack(body))
        if data == b"W":
            return Working()
        if kind == b"X":
            return GivenUp(body[: 4 * MAX_TEXT].decode(errors="replace"))
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise FrameError(f"a control message is malformed: {error}") from error
    raise FrameError(f"a control message of kind {kind!r} is unknown; run the same version of kvrail at both ends")


def _json(data: bytes, what: str, most: int) -> dict[str, Any]:
    if len(data) > most:
        raise FrameError(f"{what} of {len(data)} bytes is longer than {most}")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"{what} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise FrameError(f"{what} is no object in JSON")
    return fields


def _address(text: Any) -> bytes:
    address = bytes.fromhex(text)
    if len(address) > MAX_ADDRESS_BYTES:
        raise ValueError(f"an address has {len(address)} bytes")
    return address
