"""The header of a payload: which tensors travel as they are, and how long what depends on the data is.

Little-endian. Codec, stage, parameters, shape and element type are in the frame's head (kvrail/codec/frame.py).

    offset  size  field
         0     4  flags: bit 0, keys travel raw; bit 1, values travel raw
         4    16  four counts, of which each codec says what they count
        20    12  zero
"""

import struct

from kvrail.codec.base import CodecError
from kvrail.codec.core.arrays import Bytes

_HEADER = struct.Struct("<5I12s")
HEADER_BYTES = _HEADER.size

Raw = tuple[bool, bool]
Counts = tuple[int, int, int, int]


def packed_header(raw: Raw, counts: Counts = (0, 0, 0, 0)) -> bytes:
    """HEADER_BYTES bytes. raw: which of keys and values travel as they are; counts: below 2^32 each."""
    return _HEADER.pack(raw[0] | raw[1] << 1, *counts, b"")


def parsed_header(payload: Bytes) -> tuple[Raw, Counts]:
    """Arguments of `packed_header` by the header of a payload that came; raises CodecError where it is none."""
    if payload.size < HEADER_BYTES:
        raise CodecError(f"a payload has {payload.size} bytes; its header alone has {HEADER_BYTES}")
    flags, keys, more_keys, values, more_values, end = _HEADER.unpack_from(payload.data)
    if flags > 3 or any(end):
        raise CodecError(f"a payload's header has flags {flags} and ends in {end.hex()}; it has flags 0 to 3 and zeros")
    return (bool(flags & 1), bool(flags & 2)), (keys, more_keys, values, more_values)
