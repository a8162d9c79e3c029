"""A payload in pieces: what the payload of one stage is cut into, and how they travel. README.md has the layout."""

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from kvrail.codec.base import CodecError
from kvrail.codec.core.arrays import Bytes, Ints
from kvrail.codec.core.sections import HEADER_BYTES
from kvrail.codec.splitzip.entropy.format import STATE_WORDS, SYMBOLS, TOTAL, num_blocks
from kvrail.codec.splitzip.tiles.payload import Layout

LENGTHS = struct.Struct("<5Q")
BODY = HEADER_BYTES + LENGTHS.size
"""Where the pieces begin."""
CODED = (1, 3, 4)
"""Numbers of the pieces that an encoder tries to code. The others hold significands."""
TABLE_BYTES = 2 * SYMBOLS
"""Frequencies, with which a piece coded by rANS begins."""
PIECE_ALIGNMENT = 8
"""Such a piece has a multiple of this many bytes, with zeros at its end."""


def pieces_of(layout: Layout) -> list[slice]:
    """The inner payload after its header, cut in five: README.md lists them."""
    pieces = []
    for part, start in zip(layout.parts, layout.offsets, strict=True):
        split = start if part.raw else start + part.plan.sections["code0"].offset
        pieces += [slice(start, split), slice(split, start + part.fixed_bytes)]
    return [*pieces, slice(layout.scale_offset, layout.size)]


def places_of(head: Bytes, payload_bytes: int, places: Sequence[slice]) -> list[slice]:
    """Where a payload's pieces lie as they came; head: its first BODY bytes, or all where it has fewer.

    places: where they go in the inner payload. Raises CodecError where lengths don't fit.
    """
    if payload_bytes < BODY:
        raise CodecError(f"a payload has {payload_bytes} bytes; its header and lengths alone have {BODY}")
    lengths = LENGTHS.unpack_from(head.data, HEADER_BYTES)
    for number, (length, place) in enumerate(zip(lengths, places, strict=True)):
        if length > place.stop - place.start:
            raise CodecError(f"piece {number} of a payload has {length} bytes for {place.stop - place.start}")
    if payload_bytes != BODY + sum(lengths):
        raise CodecError(f"a payload has {payload_bytes} bytes; by its lengths it has {BODY + sum(lengths)}")
    return [slice(*ends) for ends in pairwise(accumulate(lengths, initial=BODY))]


def head_bytes(size: int) -> int:
    """Bytes before the first block of a piece coded by rANS: frequencies and ends; size: of the piece uncoded."""
    return TABLE_BYTES + 4 * num_blocks(size)


def coded_bytes(size: int, words: int) -> int:
    """Bytes of a piece coded by rANS whose blocks have `words` words in all."""
    return -(-(head_bytes(size) + 2 * words) // PIECE_ALIGNMENT) * PIECE_ALIGNMENT


def checked_head(coded: Bytes, size: int) -> tuple[Ints, Ints]:
    """Frequencies, int64 [256], and ends of the blocks, int64 [blocks], of a piece coded by rANS.

    Raises CodecError where they don't fit each other or the piece's size, coded or not.
    """
    head = head_bytes(size)
    if coded.size < head:
        raise CodecError(f"a coded piece of a payload has {coded.size} bytes; its head alone has {head}")
    frequencies = coded[:TABLE_BYTES].view("<u2").astype(np.int64)
    ends = coded[TABLE_BYTES:head].view("<u4").astype(np.int64)
    if frequencies.sum() != TOTAL:
        raise CodecError(f"a coded piece of a payload is corrupt: its frequencies add up to {frequencies.sum()}")
    if np.diff(ends, prepend=0).min() < STATE_WORDS or coded.size != coded_bytes(size, int(ends[-1])):
        raise CodecError("a coded piece of a payload is corrupt: its blocks don't fit its size")
    if coded[head + 2 * int(ends[-1]) :].any():
        raise CodecError("a coded piece of a payload is corrupt: it doesn't end in zeros")
    return frequencies, ends
