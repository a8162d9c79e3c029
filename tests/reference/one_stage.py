"""The payload value by value, by the code of `tiles`: what the others must equal bit for bit."""

from collections.abc import Sequence

import numpy as np

from kvrail.codec.base import PagedBlock
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.cpu import CpuEncoding
from kvrail.codec.core.sections import aligned, joined
from kvrail.codec.splitzip.one_stage.plan import Coding
from kvrail.codec.splitzip.tiles.payload import Layout, Part, stats_of, travels_raw
from tests.reference.pools import matrices
from tests.reference.tiles import decode_tensor, encode_tensor, place_whole


def encode(pages: PagedBlock, coding: Coding) -> CpuEncoding:
    """The payload that README.md asks for. Raises CodecError where a pool's tensor is not contiguous."""
    page_ids, pools = np.array(pages.page_ids, dtype=np.int64), matrices(pages)
    parts: list[Part] = []
    dense_parts: list[bytes] = []
    escapes: list[bytes] = []
    for pool, plan, tops in zip(pools, coding.plans, coding.tops, strict=False):  # the pools of scales come after
        raw = not plan.fits or not plan.values
        if not raw:
            dense = np.zeros(plan.fixed_bytes, dtype=np.uint8)
            records, extensions = encode_tensor(pool, page_ids, plan, tops, dense)
            raw = travels_raw(plan, records.size, extensions.size)
        if raw:
            parts.append(Part(plan, True, 0, 0))
            dense_parts.append(pool[:, page_ids].tobytes())
        else:
            parts.append(Part(plan, False, records.size, extensions.size))
            dense_parts.append(dense.tobytes())
            escapes += [records.tobytes(), extensions.tobytes()]
    scales = b"".join(pool[:, page_ids].tobytes() for pool in pools[2:])
    header = Layout((parts[0], parts[1]), len(scales)).header()
    return CpuEncoding([memoryview(joined((header, *dense_parts, scales, *escapes)))], stats_of(parts))


def decode(stage: int, payloads: Sequence[Bytes], layouts: Sequence[Layout], coding: Coding, out: PagedBlock) -> None:
    """Write the one payload into `out`. Raises CodecError, with `out` untouched, where a pool is not contiguous."""
    (source,), (layout,) = payloads, layouts
    page_ids, pools = np.array(out.page_ids, dtype=np.int64), matrices(out)
    starts = zip(layout.parts, layout.offsets, layout.streams, coding.tops, pools, strict=False)
    for part, dense, records, tops, pool in starts:
        if not part.raw:
            extensions = records + aligned(2 * part.records)
            decode_tensor(
                source[dense : dense + part.fixed_bytes],
                source[records : records + 2 * part.records].view("<u2"),
                source[extensions : extensions + part.extensions],
                page_ids,
                part.plan,
                tops,
                pool,
            )
    place_whole(source, layout, page_ids, pools)
