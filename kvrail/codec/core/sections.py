"""What payloads are made of: a header, and sections. Each begins at a multiple of ALIGNMENT, with zeros between.

The header says which tensors travel as they are, and how long what depends on the data is. Little-endian;
codec, stage, parameters, shape and element type are in the frame's head (kvrail/codec/frame.py):

    offset  size  field
         0     4  flags: bit 0, keys travel raw; bit 1, values travel raw
         4    16  four counts; each codec says what they count
        20    12  zero
"""

import struct
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvrail.codec.base import CodecError
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.floats import FloatFormat

ALIGNMENT = 16
"""Every section starts at a multiple of this."""
_HEADER = struct.Struct("<5I12s")
HEADER_BYTES = _HEADER.size

Data = TypeVar("Data", Bytes, torch.Tensor)
Raw = tuple[bool, bool]
Counts = tuple[int, int, int, int]


def ceil_div(value: int, by: int) -> int:
    """`value / by`, rounded up."""
    return -(-value // by)


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of ALIGNMENT."""
    return ceil_div(size, ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Section:
    """`size` bytes at `offset` in the tensor's part of the payload."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.offset + self.size

    def of(self, data: Data) -> Data:
        """What lies there in the tensor's part, `data`; a view."""
        return data[self.offset : self.end]


def sections_of(sizes: dict[str, int]) -> dict[str, Section]:
    """Sections of such sizes one after the other, each aligned."""
    sections, offset = {}, 0
    for name, size in sizes.items():
        sections[name] = Section(offset, size)
        offset += aligned(size)
    return sections


def bytes_of(sections: Mapping[str, Section]) -> int:
    """Bytes of sections, with their padding."""
    return sum(aligned(section.size) for section in sections.values())


def joined(pieces: Iterable[bytes]) -> bytes:
    """Sections one after the other, with the zeros between them and after the last."""
    return b"".join(piece.ljust(aligned(len(piece)), b"\0") for piece in pieces)


def pad(target: Bytes, end: int) -> int:
    """Zeros from `end` to the next section; where that begins."""
    target[end : aligned(end)] = 0
    return aligned(end)


def pad_all(target: Bytes, sections: Mapping[str, Section]) -> None:
    """Zeros between sections and after the last."""
    for section in sections.values():
        pad(target, section.end)


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


def check_minima(minima: Bytes, format: FloatFormat) -> None:
    """Raise CodecError where a section of elements has one that is not finite."""
    infinite = format.exponents - 1 << format.mantissa_bits
    if (minima.view(f"<u{format.item_bytes}") & infinite == infinite).any():
        raise CodecError("a payload has a minimum that is not finite")


def check_scales(section: Bytes, end: int, least: int = 0) -> None:
    """Raise CodecError where scales of 16 bits have other bits than those of 0 or of `least` to `end` - 1."""
    scales = section.view("<u2")
    wrong = scales >= end  # with a sign too
    if least:
        wrong |= (scales > 0) & (scales < least)
    if wrong.any():
        raise CodecError(f"a payload has a scale of bits {scales[wrong][0]:#06x}, which none can have")


class PayloadPart:
    """What a payload has of keys or of values: sections of fixed places, then pieces of any size.

    raw: whether it travels as it is.
    """

    __slots__ = ()
    plan: Any
    raw: bool

    @property
    def sections(self) -> Mapping[str, Section]:
        """What has its place whatever the data is."""
        return {"elements": Section(0, self.plan.raw_bytes)} if self.raw else self.plan.sections

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the sections, padding included."""
        fixed: int = aligned(self.plan.raw_bytes) if self.raw else self.plan.fixed_bytes
        return fixed

    @property
    @abstractmethod
    def pieces(self) -> tuple[int, ...]:
        """Bytes of each piece, without padding."""

    @property
    def variable_bytes(self) -> int:
        """Bytes of the pieces, padding included."""
        return sum(map(aligned, self.pieces))

    @property
    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """Its counts in the header."""

    def cut(self, stream: Data) -> list[Data]:
        """The pieces, given a payload from the first on; views."""
        found, start = [], 0
        for size in self.pieces:
            found.append(stream[start : start + size])
            start += aligned(size)
        return found


@dataclass(frozen=True, slots=True)
class StreamPart(PayloadPart):
    """What a payload has of one tensor: sections, then a stream and escapes.

    raw: it travels as it is. words: of 32 bits, of the stream; escapes: values behind it. Both are 0 where raw.
    """

    plan: Any
    raw: bool = False
    words: int = 0
    escapes: int = 0

    @property
    def pieces(self) -> tuple[int, int, int]:
        """The stream, and the escapes' positions and elements."""
        return 4 * self.words, 4 * self.escapes, self.plan.format.item_bytes * self.escapes

    @property
    def counts(self) -> tuple[int, int]:
        """Words and escapes."""
        return self.words, self.escapes

    def escapes_of(self, stream: Bytes) -> tuple[npt.NDArray[np.uint32], Bytes]:
        """Positions, and bytes of the elements, of the escapes; stream: a payload from the tensor's stream on; views.

        Raises CodecError where they are not in order, or one is there twice.
        """
        _, found, elements = self.cut(stream)
        positions = found.view("<u4")
        if (positions[1:] <= positions[:-1]).any():
            raise CodecError("escapes are not in order")
        return positions, elements


PartT = TypeVar("PartT", bound=PayloadPart)


@dataclass(frozen=True)
class PairLayout(Generic[PartT]):
    """The layout of a payload: header, what is fixed of keys and of values, scales, then what is variable of each.

    scale_bytes: of keys' and values' scales together; 0 where elements have none.
    """

    parts: tuple[PartT, PartT]
    scale_bytes: int = 0

    @cached_property
    def offsets(self) -> tuple[int, int]:
        """Where what is fixed begins."""
        return HEADER_BYTES, HEADER_BYTES + self.parts[0].fixed_bytes

    @cached_property
    def scale_offset(self) -> int:
        """Where the scales begin."""
        return self.offsets[1] + self.parts[1].fixed_bytes

    @cached_property
    def streams(self) -> tuple[int, int]:
        """Where what is variable begins."""
        first = self.scale_offset + aligned(self.scale_bytes)
        return first, first + self.parts[0].variable_bytes

    @cached_property
    def size(self) -> int:
        """Bytes in all."""
        return self.streams[1] + self.parts[1].variable_bytes

    def header(self) -> bytes:
        """The first HEADER_BYTES bytes."""
        keys, values = self.parts
        return packed_header((keys.raw, values.raw), (*keys.counts, *values.counts))

    def complete(self, payload: Bytes) -> None:
        """Write what a payload has beside sections, scales and pieces: its header, and zeros behind each."""
        payload[:HEADER_BYTES] = np.frombuffer(self.header(), dtype=np.uint8)
        pad(payload, self.scale_offset + self.scale_bytes)
        for part, start, piece in zip(self.parts, self.offsets, self.streams, strict=True):
            for section in part.sections.values():
                pad(payload, start + section.end)
            for size in part.pieces:
                piece = pad(payload, piece + size)

    def check_size(self, payload: Bytes) -> None:
        """Raise CodecError where a payload has another size."""
        if payload.size != self.size:
            raise CodecError(f"a payload has {payload.size} bytes; by its header it has {self.size}")
