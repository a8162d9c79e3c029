"""SplitZip on a CPU: ranges of tiles on several threads, straight from pages into a payload and back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrail.codec.base import PagedBlock
from kvrail.codec.core import buffers
from kvrail.codec.core.arrays import Bytes, Ints
from kvrail.codec.core.cpu import CpuEncoding, append, byte_pools, gather, on_threads, scatter
from kvrail.codec.core.sections import aligned, pad
from kvrail.codec.splitzip.cpu_geometry import geometry_of
from kvrail.codec.splitzip.cpu_kernels import decode_tiles, encode_tiles
from kvrail.codec.splitzip.formats import SEGMENTS
from kvrail.codec.splitzip.payload import (
    HEADER_BYTES,
    Layout,
    Part,
    pad_sections,
    scale_bytes_of,
    stats_of,
    tile_escapes,
    travels_raw,
    write_groups,
)
from kvrail.codec.splitzip.plan import TensorPlan


@dataclass(frozen=True, slots=True)
class Escapes:
    """Escapes of a range of tiles, in `memory` on loan: records and extensions are slices of it."""

    memory: Bytes
    records: Bytes
    extensions: Bytes


class TileEncoder(Protocol):
    """Fills a tensor's dense sections but for groups."""

    def __call__(self, first: int, last: int, records: npt.NDArray[np.uint16], extensions: Bytes) -> tuple[int, int]:
        """Encode tiles `first` to `last`; how many records and extensions they have, or less than 0 if too many."""


class TileDecoder(Protocol):
    """Writes a tensor's values into its pages."""

    def __call__(self, first: int, last: int, records: Bytes, extensions: Bytes) -> None:
        """Decode tiles `first` to `last`, whose records and extensions begin with these."""


def encode(
    pages: PagedBlock, plans: Sequence[TensorPlan], tops: Sequence[Ints | None], codebook_id: int
) -> CpuEncoding:
    """Encode keys and values by their plans.

    tops: of keys and of values, int64 [layers], or None where channels have their own. Raises CodecError where a
    pool's tensor is not contiguous.
    """

    def encoder(pool: Bytes, page_ids: Ints, parts: Sequence[Part], dense: Bytes) -> TileEncoder:
        plan = plans[len(parts)]
        geometry, window_tops = geometry_of(plan), _as_bytes(plan, tops[len(parts)])

        def encode_range(first: int, last: int, records: npt.NDArray[np.uint16], extensions: Bytes) -> tuple[int, int]:
            found: tuple[int, int] = encode_tiles(
                pool, page_ids, first, last, geometry, window_tops, dense, records, extensions
            )
            return found

        return encode_range

    body, parts = encode_body(pages, plans, encoder)
    layout = Layout(parts[0], parts[1], scale_bytes_of(pages.spec), codebook_id)
    body[:HEADER_BYTES] = np.frombuffer(layout.header(), dtype=np.uint8)
    return CpuEncoding([body.data[: layout.size]], stats_of(parts))


def encode_body(
    pages: PagedBlock,
    plans: Sequence[TensorPlan],
    encoder: Callable[[Bytes, Ints, Sequence[Part], Bytes], TileEncoder],
) -> tuple[Bytes, list[Part]]:
    """A payload but for its header, in memory on loan, and what it came to.

    encoder: of a tensor, given its pool, the page ids, the parts of the tensors before it and where its dense part
    goes. Raises CodecError where a pool's tensor is not contiguous.
    """
    pools, page_ids = byte_pools(pages), np.array(pages.page_ids, dtype=np.int64)
    scale_bytes = scale_bytes_of(pages.spec)
    memory = buffers.take(HEADER_BYTES + sum(aligned(plan.raw_bytes) for plan in plans) + aligned(scale_bytes))
    parts: list[Part] = []
    escapes, offset = [], HEADER_BYTES
    for pool, plan in zip(pools, plans, strict=False):  # the pools of scales come after
        dense = memory[offset:]
        coded = plan.fits and not travels_raw(plan, 0, 0)
        found = encode_on_threads(plan, dense, encoder(pool, page_ids, parts, dense)) if coded else None
        if found is None:
            pad(dense, gather(pool, page_ids, dense, 0))
        records = sum(each.records.size // 2 for each in found or ())
        extensions = sum(each.extensions.size for each in found or ())
        parts.append(Part(plan, found is None, records, extensions))
        escapes.append(found or [])
        offset += parts[-1].dense_bytes
    for pool in pools[2:]:
        offset = gather(pool, page_ids, memory, offset)
    offset = pad(memory, offset)
    for found in escapes:
        offset = pad(memory, append(memory, offset, [each.records for each in found]))
        offset = pad(memory, append(memory, offset, [each.extensions for each in found]))
    return memory, parts


def decode(payload: Bytes, layout: Layout, tops: Sequence[Ints | None], out: PagedBlock) -> None:
    """Write a payload into `out`; layout: what payload.parse says of it, tops: as of `encode`.

    Raises CodecError, with `out` untouched, where a pool's tensor is not contiguous.
    """

    def decoder(pool: Bytes, page_ids: Ints, number: int, dense: Bytes) -> TileDecoder:
        plan = layout.parts[number].plan
        geometry, window_tops = geometry_of(plan), _as_bytes(plan, tops[number])

        def decode_range(first: int, last: int, records: Bytes, extensions: Bytes) -> None:
            decode_tiles(pool, page_ids, first, last, geometry, window_tops, dense, records, extensions)

        return decode_range

    decode_body(payload, layout, out, decoder)


def decode_body(
    payload: Bytes, layout: Layout, out: PagedBlock, decoder: Callable[[Bytes, Ints, int, Bytes], TileDecoder]
) -> None:
    """Write what follows a payload's header into `out`.

    decoder: of a tensor, given its pool, the page ids, whether it is the keys (0) or the values (1), and its dense
    part. Raises CodecError, with `out` untouched, where a pool's tensor is not contiguous.
    """
    pools, page_ids = byte_pools(out), np.array(out.page_ids, dtype=np.int64)
    for number, (part, start) in enumerate(zip(layout.parts, layout.dense_offsets, strict=True)):
        if part.raw:
            scatter(pools[number], page_ids, payload[start : start + part.plan.raw_bytes])
        else:
            dense = payload[start:]
            left = payload[layout.escape_offsets[number] :]
            decode_on_threads(part, dense, left, decoder(pools[number], page_ids, number, dense))
    offset = layout.scale_offset
    for pool in pools[2:]:
        size = layout.scale_bytes // 2
        scatter(pool, page_ids, payload[offset : offset + size])
        offset += size


def encode_on_threads(plan: TensorPlan, dense: Bytes, encode_range: TileEncoder) -> list[Escapes] | None:
    """Fill the beginning of `dense`, gaps and all; None where the code does not make the tensor smaller."""
    most = (plan.raw_bytes - plan.fixed_bytes) // 2  # records of a tensor that does not travel raw

    def on_range(first: int, last: int) -> Escapes | None:
        tile_values = SEGMENTS * plan.segment_values
        size = min(most, (last - first) * tile_values) + tile_values
        memory = buffers.take(3 * size)
        records, extensions = memory[: 2 * size].view(np.uint16), memory[2 * size : 3 * size]
        counts = encode_range(first, last, records, extensions)
        return None if counts[0] < 0 else Escapes(memory, memory[: 2 * counts[0]], extensions[: counts[1]])

    found = on_threads(on_range, plan.tiles, plan.raw_bytes)
    escapes = [each for each in found if each is not None]
    records = sum(each.records.size // 2 for each in escapes)
    extensions = sum(each.extensions.size for each in escapes)
    if len(escapes) < len(found) or travels_raw(plan, records, extensions):
        return None
    pad_sections(plan, dense)
    write_groups(dense, plan)
    return escapes


def decode_on_threads(part: Part, dense: Bytes, escapes: Bytes, decode_range: TileDecoder) -> None:
    """Write the tiles of one tensor into its pages; escapes: its records and what follows."""
    extensions = escapes[aligned(2 * part.records) :]
    records, wide = tile_escapes(dense, part.plan)

    def on_range(first: int, last: int) -> None:
        decode_range(first, last, escapes[2 * int(records[:first].sum()) :], extensions[int(wide[:first].sum()) :])

    on_threads(on_range, part.plan.tiles, part.plan.raw_bytes)


def _as_bytes(plan: TensorPlan, tops: Ints | None) -> Bytes:
    return np.zeros(plan.num_layers, dtype=np.uint8) if tops is None else tops.astype(np.uint8)
