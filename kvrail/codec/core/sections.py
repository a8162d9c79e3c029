"""Sections: what payloads are made of. Each begins at a multiple of ALIGNMENT; what lies between two is zero."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvrail.codec.core.arrays import Bytes

ALIGNMENT = 16
"""Every section starts at a multiple of this."""


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


def sections_of(sizes: dict[str, int]) -> dict[str, Section]:
    """Sections of such sizes one after the other, each aligned."""
    sections, offset = {}, 0
    for name, size in sizes.items():
        sections[name] = Section(offset, size)
        offset += aligned(size)
    return sections


def joined(pieces: Iterable[bytes]) -> bytes:
    """Sections one after the other, with the zeros between them and after the last."""
    return b"".join(piece.ljust(aligned(len(piece)), b"\0") for piece in pieces)


def pad(target: Bytes, end: int) -> int:
    """Zeros from `end` to the next section; where that begins."""
    target[end : aligned(end)] = 0
    return aligned(end)
