"""The payloads of the two stages: their headers, and where everything lies. README.md has the layout."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from kvrail.codec.base import BlockSpec, CodecError
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.splitzip.entropy.payload import pieces_of, places_of
from kvrail.codec.splitzip.one_stage.payload import Layout
from kvrail.codec.splitzip.progressive_ans.plan import Plans
from kvrail.codec.splitzip.tiles.payload import HEADER_BYTES, StageHeader, checked_part, scale_bytes_of

MAGIC = b"SPLA"
VERSION = 1
SHOWN = (0, 2)
"""Numbers of the first stage's pieces that have significands, of keys and of values."""


@dataclass(frozen=True, slots=True)
class FirstLayout:
    """A first stage. inner: of the payload in one stage from which it is made; pieces: where its pieces lie."""

    inner: Layout
    pieces: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class RestLayout:
    """A second stage. raw: which of keys and values travel as they are, in the first; places: of their planes."""

    raw: tuple[bool, bool]
    places: tuple[slice, slice]

    @property
    def size(self) -> int:
        """Bytes in all."""
        end: int = self.places[1].stop
        return end


StageLayout = FirstLayout | RestLayout


def first_header(layout: Layout, plans: Plans) -> bytes:
    """The first HEADER_BYTES bytes of a first stage; layout: of the payload in one stage."""
    keys, values = layout.parts
    counts = (keys.records, keys.extensions, values.records, values.extensions)
    return _header(0, plans).packed((keys.raw, values.raw), counts)


def rest_header(layout: RestLayout, plans: Plans) -> bytes:
    """The first HEADER_BYTES bytes of a second stage."""
    return _header(1, plans).packed(layout.raw)


def uncoded_pieces(layout: Layout, plans: Plans) -> list[slice]:
    """The pieces of a first stage one after the other, none of them coded; layout: of the payload in one stage."""
    sizes = [place.stop - place.start for place in pieces_of(layout)]
    for number, part, plan in zip(SHOWN, layout.parts, plans, strict=True):
        sizes[number] = 0 if part.raw else plan.shown_bytes
    return [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]


def rest_layout(raw: tuple[bool, bool], plans: Plans) -> RestLayout:
    """The layout of a second stage."""
    sizes = (0 if whole else plan.rest_bytes for whole, plan in zip(raw, plans, strict=True))
    keys, values = (slice(*ends) for ends in pairwise(accumulate(sizes, initial=HEADER_BYTES)))
    return RestLayout(raw, (keys, values))


def parse_first(payload: Bytes, spec: BlockSpec, plans: Plans) -> FirstLayout:
    """The layout of a first stage that came, its header and lengths checked; raises CodecError, naming what is wrong.

    What is in the pieces is checked when they are decoded.
    """
    raw, counts = _header(0, plans).parsed(payload)
    parts = [
        checked_part(plan.whole, raw[number], *counts[2 * number : 2 * number + 2]) for number, plan in enumerate(plans)
    ]
    layout = Layout(parts[0], parts[1], scale_bytes_of(spec), 0)
    return FirstLayout(layout, tuple(places_of(payload, payload.size, uncoded_pieces(layout, plans))))


def parse_rest(payload: Bytes, plans: Plans) -> RestLayout:
    """The layout of a second stage that came, all of it checked; raises CodecError, naming what is wrong."""
    raw, counts = _header(1, plans).parsed(payload)
    if any(counts):
        raise CodecError(f"a second stage says that it has escapes: {counts}")
    layout = rest_layout(raw, plans)
    if payload.size != layout.size:
        raise CodecError(f"a second stage has {payload.size} bytes; by its header it has {layout.size}")
    return layout


def _header(stage: int, plans: Plans) -> StageHeader:
    keys, values = plans
    return StageHeader(MAGIC, VERSION, stage, keys.whole, (keys.kept_bits, values.kept_bits))
