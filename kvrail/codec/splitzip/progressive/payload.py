"""The payloads of the two stages: what README.md says of their headers, and where tensors lie in them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrail.codec.base import BlockSpec, CodecError
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.splitzip.progressive.plan import Plans
from kvrail.codec.splitzip.tiles.payload import Layout, Part, StageHeader, check_body, checked_part, scale_bytes_of

MAGIC = b"SPLP"
VERSION = 2


def _header(stage: int, plans: Plans) -> StageHeader:
    keys, values = plans
    return StageHeader(MAGIC, VERSION, stage, keys, (keys.kept_bits, values.kept_bits))


@dataclass(frozen=True)
class StageLayout(Layout):
    """The layout of a stage's payload. Parts of the first stage have no records; those of the second are RestParts."""

    plans: Plans
    stage: int

    def header(self) -> bytes:
        """The first HEADER_BYTES bytes."""
        keys, values = self.parts
        counts = (keys.records, keys.extensions, values.records, values.extensions)
        return _header(self.stage, self.plans).packed((keys.raw, values.raw), counts)


class RestPart(Part):
    """Where one tensor lies in a second stage: nowhere, if it travels raw, for the first has it whole."""

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense part, padding included."""
        return 0 if self.raw else self.plan.fixed_bytes


def layouts_of(plans: Plans, parts: Sequence[Part], scale_bytes: int) -> tuple[StageLayout, StageLayout]:
    """The layouts of both stages; parts: what became of keys and values."""
    first = [Part(plan, part.raw, 0, 0) for plan, part in zip(plans, parts, strict=True)]
    second = [
        RestPart(plan.rest, part.raw, part.records, part.extensions) for plan, part in zip(plans, parts, strict=True)
    ]
    return (
        StageLayout(first[0], first[1], scale_bytes, plans, 0),
        StageLayout(second[0], second[1], 0, plans, 1),
    )


def parse_anchor(payload: Bytes, spec: BlockSpec, plans: Plans) -> StageLayout:
    """The layout of a first stage that came, all of it checked; raises CodecError, naming what is wrong."""
    raw, counts = _header(0, plans).parsed(payload)
    if any(counts):
        raise CodecError(f"a first stage says that it has escapes: {counts}")
    parts = [checked_part(plan, raw[number], 0, 0) for number, plan in enumerate(plans)]
    layout, _ = layouts_of(plans, parts, scale_bytes_of(spec))
    if payload.size != layout.size:
        raise CodecError(f"a first stage has {payload.size} bytes; by its header it has {layout.size}")
    return layout


def parse_rest(payload: Bytes, plans: Plans) -> StageLayout:
    """The layout of a second stage that came, all of it checked; raises CodecError, naming what is wrong."""
    raw, counts = _header(1, plans).parsed(payload)
    parts = [checked_part(plan, raw[number], *counts[2 * number : 2 * number + 2]) for number, plan in enumerate(plans)]
    _, layout = layouts_of(plans, parts, 0)
    check_body(payload, layout)
    return layout


def parse_both(first: Bytes, second: Bytes, spec: BlockSpec, plans: Plans) -> tuple[StageLayout, StageLayout]:
    """The layouts of both stages of a block; raises CodecError also where they do not agree on what travels raw."""
    layouts = parse_anchor(first, spec, plans), parse_rest(second, plans)
    raw, later = ([part.raw for part in layout.parts] for layout in layouts)
    if raw != later:
        raise CodecError(f"keys and values travel raw {raw} by a first stage and {later} by a second: of other blocks")
    return layouts
