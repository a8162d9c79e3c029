"""A block's payload. README.md has the layout; nothing here computes codes."""

import struct
from dataclasses import dataclass

from kvrail.codec.base import BlockSpec, CodecError
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.splitzip.tiles import payload as tiles
from kvrail.codec.splitzip.tiles.format import WindowCode
from kvrail.codec.splitzip.tiles.payload import HEADER_BYTES, check_body, checked_part, scale_bytes_of
from kvrail.codec.splitzip.tiles.plan import plans_of

MAGIC = b"SPLZ"
VERSION = 1
_HEADER = struct.Struct("<4s5B7sQ4Q8s")


@dataclass(frozen=True)
class Layout(tiles.Layout):
    """The layout of one payload."""

    codebook_id: int
    entropy_coded: bool = False

    def header(self) -> bytes:
        """The first HEADER_BYTES bytes."""
        code = self.keys.plan.code
        flags = self.keys.raw | self.values.raw << 1 | self.entropy_coded << 2
        counts = (self.keys.records, self.keys.extensions, self.values.records, self.values.extensions)
        kind = (flags, code.code_bits, code.position_bits, code.per_channel)
        return _HEADER.pack(MAGIC, VERSION, *kind, b"", self.codebook_id, *counts, b"")


def parse(payload: Bytes, spec: BlockSpec, code: WindowCode, codebook_id: int) -> Layout:
    """The layout of a payload that came, all of it checked; raises CodecError, naming what is wrong."""
    layout = parse_header(payload, spec, code, codebook_id, entropy_coded=False)
    check_body(payload, layout)
    return layout


def parse_header(payload: Bytes, spec: BlockSpec, code: WindowCode, codebook_id: int, *, entropy_coded: bool) -> Layout:
    """The layout that a payload's header tells; raises CodecError where it isn't one of this code."""
    if payload.size < HEADER_BYTES:
        raise CodecError(f"a payload has {payload.size} bytes; its header alone has {HEADER_BYTES}")
    fields = _HEADER.unpack_from(payload.data)
    magic, version, flags, code_bits, position_bits, per_channel, gap, book, *counts, end = fields
    if (magic, version) != (MAGIC, VERSION):
        raise CodecError(f"a payload begins with {magic!r}, version {version}; it must be {MAGIC!r}, version {VERSION}")
    if any(gap + end):
        raise CodecError(f"a payload's header has {(gap + end).hex()} where its version {VERSION} has zeros")
    theirs = (code_bits, position_bits, per_channel, flags >> 2)
    ours = (code.code_bits, code.position_bits, code.per_channel, int(entropy_coded))
    if theirs != ours:
        raise CodecError(
            f"a payload has (code bits, position bits, per channel, entropy) {theirs}; this code has {ours}"
        )
    if book != codebook_id:
        raise CodecError(f"a payload was made with codebook {book:016x}; this worker has {codebook_id:016x}")
    parts = []
    for number, plan in enumerate(plans_of(spec, code)):
        parts.append(checked_part(plan, bool(flags >> number & 1), *counts[2 * number : 2 * number + 2]))
    return Layout(parts[0], parts[1], scale_bytes_of(spec), book, entropy_coded)
