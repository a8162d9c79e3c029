"""The payloads of the two stages: their headers, and where everything lies. README.md has the layout."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from kvrail.codec.base import BlockSpec, CodecError
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.sections import HEADER_BYTES, parsed_header
from kvrail.codec.splitzip.entropy.payload import pieces_of, places_of
from kvrail.codec.splitzip.progressive_ans.plan import Plans
from kvrail.codec.splitzip.tiles.payload import Layout, parse_header

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
    layout = parse_header(payload, spec, (plans[0].whole, plans[1].whole))
    return FirstLayout(layout, tuple(places_of(payload, payload.size, uncoded_pieces(layout, plans))))


def parse_rest(payload: Bytes, plans: Plans) -> RestLayout:
    """The layout of a second stage that came, all of it checked; raises CodecError, naming what is wrong."""
    raw, counts = parsed_header(payload)
    if any(counts):
        raise CodecError(f"a second stage says that it has escapes: {counts}")
    layout = rest_layout(raw, plans)
    if payload.size != layout.size:
        raise CodecError(f"a second stage has {payload.size} bytes; by its header it has {layout.size}")
    return layout
