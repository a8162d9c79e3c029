"""The two stages on a CPU: made from the payload in one stage, which is cut, and back."""

from collections.abc import Sequence

import numpy as np

from kvrail.codec.base import PagedBlock
from kvrail.codec.core import buffers
from kvrail.codec.core.arrays import Bytes, Ints
from kvrail.codec.core.cpu import CpuEncoding, byte_pools, on_threads
from kvrail.codec.core.host import host_bytes
from kvrail.codec.core.sections import HEADER_BYTES, packed_header, pad_all
from kvrail.codec.splitzip.entropy.cpu import coded_pieces, decode_inner, joined_pieces, restore_pieces
from kvrail.codec.splitzip.entropy.payload import pieces_of
from kvrail.codec.splitzip.one_stage import cpu as one_stage
from kvrail.codec.splitzip.one_stage.cpu_geometry import geometry_of
from kvrail.codec.splitzip.one_stage.plan import Coding
from kvrail.codec.splitzip.progressive_ans.cpu_kernels import complete_tiles, cut_tiles, join_tiles
from kvrail.codec.splitzip.progressive_ans.payload import (
    SHOWN,
    FirstLayout,
    RestLayout,
    StageLayout,
    rest_layout,
    uncoded_pieces,
)
from kvrail.codec.splitzip.progressive_ans.plan import CutPlan, Plans
from kvrail.codec.splitzip.tiles.payload import parse_header


def encode(pages: PagedBlock, plans: Plans) -> CpuEncoding:
    """Encode keys and values by their plans. Raises CodecError where a pool's tensor is not contiguous."""
    uncut = plans[0].whole, plans[1].whole
    encoding = one_stage.encode(pages, Coding(uncut))
    inner = host_bytes("splitzip-progressive-ans", encoding.stages()[0])
    layout = parse_header(inner, pages.spec, uncut)
    pieces = [inner[place] for place in pieces_of(layout)]
    raw = layout.parts[0].raw, layout.parts[1].raw
    later = rest_layout(raw, plans)
    second = buffers.take(later.size)
    second[:HEADER_BYTES] = np.frombuffer(packed_header(later.raw), dtype=np.uint8)
    shown = [buffers.take(0 if whole else plan.shown_bytes) for whole, plan in zip(raw, plans, strict=True)]
    for number, whole, plan, place, memory in zip(SHOWN, raw, plans, later.places, shown, strict=True):
        if not whole:
            _cut(plan, pieces[number], memory, second[place])
            pieces[number] = memory[: plan.shown_bytes]
    first = joined_pieces(layout.header(), coded_pieces(pieces))
    return CpuEncoding([first, second.data[: later.size]], encoding.stats())


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
    """Put the payload in one stage together, its low mantissa bits those of the middle, and decode that."""
    byte_pools(out)
    memory = buffers.take(layout.inner.size)
    inner = memory[: layout.inner.size]
    places, uncoded = pieces_of(layout.inner), uncoded_pieces(layout.inner, plans)
    shown = buffers.take(sum(uncoded[number].stop - uncoded[number].start for number in SHOWN))
    targets = [inner[place] for place in places]
    split = uncoded[0].stop
    targets[0], targets[2] = shown[:split], shown[split : split + uncoded[2].stop - uncoded[2].start]
    restore_pieces([payload[piece] for piece in layout.pieces], targets)
    for number, part, plan in zip(SHOWN, layout.inner.parts, plans, strict=True):
        if not part.raw:
            _join(plan, targets[number], inner[places[number]])
    decode_inner(inner, layout.inner, out)


def _decode_rest(payload: Bytes, layout: RestLayout, plans: Plans, out: PagedBlock) -> None:
    """Replace the low mantissa bits of values in their pages."""
    pools, page_ids = byte_pools(out), np.array(out.page_ids, dtype=np.int64)
    for pool, whole, plan, place in zip(pools, layout.raw, plans, layout.places, strict=False):
        if not whole and plan.rest_bits:
            _complete(pool, page_ids, plan, payload[place])


def _complete(pool: Bytes, page_ids: Ints, plan: CutPlan, rest: Bytes) -> None:
    geometry, tiles = geometry_of(plan.whole), plan.whole.tiles

    def on_range(first: int, last: int) -> None:
        complete_tiles(pool, page_ids, first, last, tiles, geometry, plan.rest_bits, rest)

    on_threads(on_range, tiles, plan.whole.raw_bytes)


def _cut(plan: CutPlan, source: Bytes, shown: Bytes, rest: Bytes) -> None:
    """Cut one tensor's significands, planes in `source`, into planes of both stages, gaps and all."""
    shape = plan.whole.tiles, plan.whole.segment_values, plan.field_bits, plan.rest_bits

    def on_range(first: int, last: int) -> None:
        cut_tiles(source, first, last, *shape, shown, rest)

    on_threads(on_range, plan.whole.tiles, plan.whole.raw_bytes)
    pad_all(shown, plan.shown)
    pad_all(rest, plan.rest)


def _join(plan: CutPlan, shown: Bytes, target: Bytes) -> None:
    """Put one tensor's significands together from the first stage's planes: their low bits are the middle's."""
    shape = plan.whole.tiles, plan.whole.segment_values, plan.field_bits, plan.rest_bits

    def on_range(first: int, last: int) -> None:
        join_tiles(shown, first, last, *shape, target)

    on_threads(on_range, plan.whole.tiles, plan.whole.raw_bytes)
