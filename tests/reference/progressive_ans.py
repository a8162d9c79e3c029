"""The two stages value by value, from the reference of one stage: what the others must equal bit for bit."""

from collections.abc import Sequence

import numpy as np

from kvrail.codec.base import PagedBlock
from kvrail.codec.core.arrays import Bytes, Ints
from kvrail.codec.core.cpu import CpuEncoding
from kvrail.codec.core.sections import joined, packed_header
from kvrail.codec.splitzip.entropy.payload import CODED, LENGTHS, pieces_of
from kvrail.codec.splitzip.one_stage.plan import Coding
from kvrail.codec.splitzip.progressive_ans.payload import (
    SHOWN,
    FirstLayout,
    RestLayout,
    StageLayout,
    uncoded_pieces,
)
from kvrail.codec.splitzip.progressive_ans.plan import CutPlan, Plans
from kvrail.codec.splitzip.tiles.format import SEGMENTS, planes_of
from kvrail.codec.splitzip.tiles.payload import parse, parse_header
from tests.reference import entropy as rans
from tests.reference import one_stage, tiles
from tests.reference.pools import matrices


def encode(pages: PagedBlock, plans: Plans) -> CpuEncoding:
    """The payloads that README.md asks for. Raises CodecError where a pool's tensor is not contiguous."""
    encoding = one_stage.encode(pages, _coding(plans))
    inner = np.frombuffer(encoding.payloads[0], dtype=np.uint8)
    layout = parse_header(inner, pages.spec, (plans[0].whole, plans[1].whole))
    pieces = [inner[place].tobytes() for place in pieces_of(layout)]
    raw, rests = (layout.parts[0].raw, layout.parts[1].raw), []
    for number, whole, plan in zip(SHOWN, raw, plans, strict=True):
        if not whole:
            fields = _read(np.frombuffer(pieces[number], dtype=np.uint8), plan, plan.field_bits)
            pieces[number] = _written(fields >> plan.rest_bits, plan, plan.field_bits - plan.rest_bits)
            rests.append(_written(fields & (1 << plan.rest_bits) - 1, plan, plan.rest_bits))
    for number in CODED:
        coded = rans.encode(np.frombuffer(pieces[number], dtype=np.uint8)) if pieces[number] else b""
        pieces[number] = min(pieces[number], coded, key=len)
    first = layout.header() + LENGTHS.pack(*map(len, pieces)) + b"".join(pieces)
    second = packed_header(raw) + b"".join(rests)
    return CpuEncoding([memoryview(first), memoryview(second)], encoding.stats())


def decode(
    stage: int, payloads: Sequence[Bytes], layouts: Sequence[StageLayout], plans: Plans, out: PagedBlock
) -> None:
    """Write a stage into `out`. Raises CodecError, with `out` untouched, where it cannot."""
    layout = layouts[-1]
    if isinstance(layout, FirstLayout):
        _decode_first(payloads[-1], layout, plans, out)
    else:
        _decode_rest(payloads[-1], layout, plans, out)


def _decode_first(payload: Bytes, layout: FirstLayout, plans: Plans, out: PagedBlock) -> None:
    inner, pieces = np.zeros(layout.inner.size, dtype=np.uint8), []
    for came, place in zip(layout.pieces, uncoded_pieces(layout.inner, plans), strict=True):
        piece, size = payload[came], place.stop - place.start
        pieces.append(piece if piece.size == size else np.frombuffer(rans.decode(piece, size), dtype=np.uint8))
    for number, part, plan in zip(SHOWN, layout.inner.parts, plans, strict=True):
        if not part.raw:
            fields = _read(pieces[number], plan, plan.field_bits - plan.rest_bits) << plan.rest_bits
            middle = 1 << plan.rest_bits - 1 if plan.rest_bits else 0
            pieces[number] = np.frombuffer(_written(fields | middle, plan, plan.field_bits), dtype=np.uint8)
    for piece, place in zip(pieces, pieces_of(layout.inner), strict=True):
        inner[place] = piece
    header = layout.inner.header()
    inner[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    coding = _coding(plans)
    one_stage.decode(0, [inner], [parse(inner, out.spec, coding.plans)], coding, out)


def _decode_rest(payload: Bytes, layout: RestLayout, plans: Plans, out: PagedBlock) -> None:
    page_ids = np.array(out.page_ids, dtype=np.int64)
    for pool, whole, plan, place in zip(matrices(out), layout.raw, plans, layout.places, strict=False):
        if not whole:
            low = _read(payload[place], plan, plan.rest_bits)
            for tile, _, bits, real in tiles.tiles(pool, page_ids, plan.whole):
                tiles.store(
                    pool, page_ids, plan.whole, tile, bits >> plan.rest_bits << plan.rest_bits | low[tile], real
                )


def _read(source: Bytes, plan: CutPlan, bits: int) -> Ints:
    """Fields of `bits` bits, int64 [tiles, 8, J], from their planes."""
    whole, shift = plan.whole, 0
    fields = np.zeros((whole.tiles, SEGMENTS, whole.segment_values), dtype=np.int64)
    for width, where in zip(planes_of(bits), plan.planes(bits).values(), strict=True):
        plane = source[where.offset : where.end].reshape(whole.tiles, width, whole.segment_values)
        for s in range(SEGMENTS):
            fields[:, s] |= (plane[:, s % width].astype(np.int64) >> s // width * width & (1 << width) - 1) << shift
        shift += width
    return fields


def _written(fields: Ints, plan: CutPlan, bits: int) -> bytes:
    """Fields of `bits` bits, [tiles, 8, J], as planes."""
    whole, shift, planes = plan.whole, 0, []
    for width in planes_of(bits):
        plane = np.zeros((whole.tiles, width, whole.segment_values), dtype=np.uint8)
        for s in range(SEGMENTS):
            part = fields[:, s] >> shift & (1 << width) - 1
            plane[:, s % width] |= (part << s // width * width).astype(np.uint8)
        planes.append(plane.tobytes())
        shift += width
    return joined(planes)


def _coding(plans: Plans) -> Coding:
    """The coding of the payload in one stage."""
    return Coding((plans[0].whole, plans[1].whole), (None, None))
