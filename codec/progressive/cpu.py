"""The two stages on a CPU: straight from pages into payloads and back, one pass over the pages each way."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from codec.base import PagedBlock
from codec.progressive.cpu_geometry import geometry_of
from codec.progressive.cpu_kernels import decode_tiles, encode_tiles, refine_tiles
from codec.progressive.payload import HEADER_BYTES, AnchorPayload, RestPayload, anchor_payload
from codec.progressive.plan import AnchorPlan, Plans
from codec.splitzip import buffers
from codec.splitzip.cpu import (
    CpuEncoding,
    TileDecoder,
    TileEncoder,
    byte_pools,
    decode_body,
    encode_body,
    on_threads,
)
from codec.splitzip.payload import Bytes, Ints, Part, pad_sections, scale_bytes_of, stats_of


def encode(pages: PagedBlock, plans: Plans) -> CpuEncoding:
    """Encode keys and values by their plans. Raises CodecError where a pool's tensor is not contiguous."""
    rest = buffers.take(HEADER_BYTES + sum(plan.later_bytes for plan in plans))

    def encoder(pool: Bytes, page_ids: Ints, parts: Sequence[Part], dense: Bytes) -> TileEncoder:
        plan = plans[len(parts)]
        geometry = geometry_of(plan)
        before = sum(part.plan.later_bytes for part in parts if not part.raw)
        target = rest[HEADER_BYTES + before :][: plan.later_bytes]

        def encode_range(first: int, last: int, records: npt.NDArray[np.uint16], extensions: Bytes) -> tuple[int, int]:
            found: tuple[int, int] = encode_tiles(
                pool, page_ids, first, last, geometry, dense, target, records, extensions
            )
            return found

        return encode_range

    anchor, parts = encode_body(pages, plans, encoder)
    first = anchor_payload(plans, parts, scale_bytes_of(pages.spec))
    second = RestPayload(plans, (first.keys.raw, first.values.raw))
    for memory, layout in ((anchor, first), (rest, second)):
        memory[:HEADER_BYTES] = np.frombuffer(layout.header(), dtype=np.uint8)
    for plan, raw, offset in zip(second.rests, second.raw, second.offsets, strict=True):
        if not raw:
            pad_sections(plan, rest[offset:])
    return CpuEncoding([anchor.data[: first.size], rest.data[: second.size]], stats_of(parts))


def decode_anchor(payload: Bytes, layout: AnchorPayload, out: PagedBlock) -> None:
    """Write a first stage into `out`. Raises CodecError, with `out` untouched, where a pool is not contiguous."""

    def decoder(pool: Bytes, page_ids: Ints, number: int, dense: Bytes) -> TileDecoder:
        geometry = geometry_of(layout.plans[number])

        def decode_range(first: int, last: int, records: Bytes, extensions: Bytes) -> None:
            decode_tiles(pool, page_ids, first, last, geometry, dense, records, extensions)

        return decode_range

    decode_body(payload, layout, out, decoder)


def refine(payload: Bytes, layout: RestPayload, out: PagedBlock) -> None:
    """Write a second stage into `out`, which holds the first. Raises CodecError where a pool is not contiguous."""
    pools, page_ids = byte_pools(out), np.array(out.page_ids, dtype=np.int64)
    for pool, plan, raw, offset in zip(pools, layout.plans, layout.raw, layout.offsets, strict=False):
        if not raw and plan.rest.rest_bits:
            _refine(pool, page_ids, plan, payload[offset:])


def _refine(pool: Bytes, page_ids: Ints, plan: AnchorPlan, rest: Bytes) -> None:
    geometry = geometry_of(plan)

    def refine_range(first: int, last: int) -> None:
        refine_tiles(pool, page_ids, first, last, geometry, rest)

    on_threads(refine_range, plan)
