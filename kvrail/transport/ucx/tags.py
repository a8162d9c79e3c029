"""Tags of messages: 64 bits that say which attempt a message belongs to, and which part of it.

From the highest bit on: 44 drawn from the attempt's key, 3 for the kind, 17 for the payload's number.

The receiver draws the key, so only a sender with that key reaches its receives. A key is used once: a late
message finds no posted receive, and is swept away by its upper bits.
"""

import enum

NUMBER_BITS = 17
KIND_BITS = 3
PAYLOADS = 1 << NUMBER_BITS
"""Most payloads of an attempt."""
_ALL = (1 << 64) - 1
_SHORT_MASK = _ALL ^ ((1 << (NUMBER_BITS + KIND_BITS)) - 1)
_SCATTER = 0x9E37_79B9_7F4A_7C15  # 2^64 over the golden ratio: keys that differ anywhere differ in their upper bits


class Kind(enum.IntEnum):
    """What a message is; of 4 or above it travels to the sender of payloads."""

    BODY = 0
    """A payload."""
    SIZE = 1
    """A payload's size: UCX reports a payload that is too long, not one that is too short."""
    END = 2
    """The sender has ended."""
    ACK = 4
    """A payload has arrived."""
    STOP = 5
    """The receiver has ended."""
    HELLO = 6
    """The first message of an endpoint, of no attempt: UCX connects when something is sent."""


EXACT = _ALL
DIRECTION_MASK = _SHORT_MASK | 4 << NUMBER_BITS
"""Under this all tags of an attempt that travel to its receiver are equal, and all that travel to its sender."""


def shorten(key: int) -> int:
    """What of a key goes into its tags, where it stands there."""
    return key * _SCATTER & _SHORT_MASK


def tag(key: int, kind: Kind, number: int = 0) -> int:
    """The tag of a message."""
    return shorten(key) | kind << NUMBER_BITS | number


HELLO = tag(0, Kind.HELLO)
