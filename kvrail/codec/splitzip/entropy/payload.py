"""A payload in pieces: what the payload of one stage is cut into, and how they travel. README.md has the layout."""

import struct
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvrail.codec.base import CodecError
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.splitzip.one_stage.payload import Layout
from kvrail.codec.splitzip.tiles.payload import HEADER_BYTES

LENGTHS = struct.Struct("<5Q")
BODY = HEADER_BYTES + LENGTHS.size
"""Where the pieces begin."""


def pieces_of(layout: Layout) -> list[slice]:
    """The inner payload after its header, cut in five: README.md lists them."""
    pieces = []
    for part, start in zip(layout.parts, layout.dense_offsets, strict=True):
        split = start if part.raw else start + part.plan.sections["code0"].offset
        pieces += [slice(start, split), slice(split, start + part.dense_bytes)]
    return [*pieces, slice(layout.scale_offset, layout.size)]


def cut(payload: Bytes, layout: Layout, places: Sequence[slice]) -> list[Bytes]:
    """A payload's pieces as they came; raises CodecError where lengths don't fit it."""
    if payload.size < BODY:
        raise CodecError(f"a payload has {payload.size} bytes; its header and lengths alone have {BODY}")
    lengths = LENGTHS.unpack_from(payload.data, HEADER_BYTES)
    for number, (length, place) in enumerate(zip(lengths, places, strict=True)):
        if length > place.stop - place.start:
            raise CodecError(f"piece {number} of a payload has {length} bytes for {place.stop - place.start}")
    if payload.size != BODY + sum(lengths):
        raise CodecError(f"a payload has {payload.size} bytes; by its lengths it has {BODY + sum(lengths)}")
    ends = np.cumsum([BODY, *lengths])
    return [payload[start:end] for start, end in pairwise(ends)]
