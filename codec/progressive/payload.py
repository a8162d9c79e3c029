"""The payloads of the two stages: what README.md says of their headers, and where tensors lie in them."""

import struct
from dataclasses import dataclass, field
from functools import cached_property

from codec.base import BlockSpec, CodecError
from codec.progressive.plan import Plans, RestPlan
from codec.splitzip.payload import Bytes, Part, Payload, check_body, checked_part, scale_bytes_of

MAGIC = b"SPLP"
VERSION = 1
_HEADER = struct.Struct("<4s8B4s4Q16s")
HEADER_BYTES = _HEADER.size


def _kind(stage: int, plans: Plans) -> tuple[int, ...]:
    """What must be equal at both ends, in the header's order."""
    keys, values = plans
    code, mantissa_bits = keys.code, keys.format.mantissa_bits
    return (code.code_bits, code.position_bits, stage, mantissa_bits, keys.kept_bits, values.kept_bits)


def _header(stage: int, plans: Plans, flags: int, counts: tuple[int, int, int, int]) -> bytes:
    return _HEADER.pack(MAGIC, VERSION, flags, *_kind(stage, plans), b"", *counts, b"")


@dataclass(frozen=True)
class AnchorPayload(Payload):
    """The layout of a first stage."""

    plans: Plans = field(kw_only=True)

    def header(self) -> bytes:
        """The first HEADER_BYTES bytes."""
        counts = (self.keys.records, self.keys.extensions, self.values.records, self.values.extensions)
        return _header(0, self.plans, self.keys.raw | self.values.raw << 1, counts)


def anchor_payload(plans: Plans, parts: list[Part], scale_bytes: int) -> AnchorPayload:
    """The layout of a first stage; parts: of keys and values."""
    return AnchorPayload(parts[0], parts[1], scale_bytes, codebook_id=0, plans=plans)


@dataclass(frozen=True)
class RestPayload:
    """The layout of a second stage.

    raw: of keys and values, whether all of it has travelled in the first.
    """

    plans: Plans
    raw: tuple[bool, bool]

    @cached_property
    def rests(self) -> tuple[RestPlan, RestPlan]:
        """Plans of keys and values."""
        return self.plans[0].rest, self.plans[1].rest

    @cached_property
    def offsets(self) -> tuple[int, int]:
        """Of the keys' and the values' parts."""
        return HEADER_BYTES, HEADER_BYTES + (0 if self.raw[0] else self.rests[0].fixed_bytes)

    @cached_property
    def size(self) -> int:
        """Bytes in all."""
        return self.offsets[1] + (0 if self.raw[1] else self.rests[1].fixed_bytes)

    def header(self) -> bytes:
        """The first HEADER_BYTES bytes."""
        return _header(1, self.plans, self.raw[0] | self.raw[1] << 1, (0, 0, 0, 0))


def parse_anchor(payload: Bytes, spec: BlockSpec, plans: Plans) -> AnchorPayload:
    """The layout of a first stage that came, all of it checked; raises CodecError, naming what is wrong."""
    flags, counts = _parse_header(payload, 0, plans)
    parts = [
        checked_part(plan, bool(flags >> number & 1), *counts[2 * number : 2 * number + 2])
        for number, plan in enumerate(plans)
    ]
    layout = anchor_payload(plans, parts, scale_bytes_of(spec))
    check_body(payload, layout)
    return layout


def parse_rest(payload: Bytes, plans: Plans) -> RestPayload:
    """The layout of a second stage that came, all of it checked; raises CodecError, naming what is wrong."""
    flags, counts = _parse_header(payload, 1, plans)
    if any(counts):
        raise CodecError(f"a second stage says that it has escapes: {counts}")
    layout = RestPayload(plans, (bool(flags & 1), bool(flags >> 1)))
    for plan, raw in zip(plans, layout.raw, strict=True):
        checked_part(plan, raw, 0, 0)
    if payload.size != layout.size:
        raise CodecError(f"a second stage has {payload.size} bytes; by its header it has {layout.size}")
    return layout


def _parse_header(payload: Bytes, stage: int, plans: Plans) -> tuple[int, tuple[int, ...]]:
    """Flags, and the numbers of records and extensions."""
    if payload.size < HEADER_BYTES:
        raise CodecError(f"a payload has {payload.size} bytes; its header alone has {HEADER_BYTES}")
    magic, version, flags, *kind, gap, keys, far_keys, values, far_values, end = _HEADER.unpack_from(payload.data)
    if (magic, version) != (MAGIC, VERSION):
        raise CodecError(f"a payload begins with {magic!r}, version {version}; it must be {MAGIC!r}, version {VERSION}")
    if any(gap + end) or flags > 3:
        raise CodecError(
            f"a payload's header has {(gap + end).hex()} and flags {flags}, which version {VERSION} has not"
        )
    if tuple(kind) != _kind(stage, plans):
        raise CodecError(
            "a payload has (code bits, position bits, stage, mantissa bits of the element type, of keys and of values"
            f" in the first stage) {tuple(kind)}; expected {_kind(stage, plans)}"
        )
    return flags, (keys, far_keys, values, far_values)
