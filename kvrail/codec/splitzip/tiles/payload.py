"""What the payloads of all forms are: header, dense parts, scales, escapes; what is checked of one that came."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrail.codec.base import BlockSpec, CodecError, EncodingStats
from kvrail.codec.core.arrays import Bytes, Ints
from kvrail.codec.core.sections import PairLayout, PayloadPart, aligned, parsed_header
from kvrail.codec.splitzip.tiles.format import SEGMENTS
from kvrail.codec.splitzip.tiles.plan import TILES_PER_GROUP, TensorPlan

WIDE = 0x8000
"""Bit of a tile's count that says that its records have extensions."""


@dataclass(frozen=True, slots=True)
class Part(PayloadPart):
    """Where one tensor lies in a payload.

    raw: it travels as it is; then it has no records.
    """

    plan: TensorPlan
    raw: bool
    records: int
    extensions: int

    @property
    def pieces(self) -> tuple[int, int]:
        """Records, then extensions."""
        return 2 * self.records, self.extensions

    @property
    def counts(self) -> tuple[int, int]:
        """Records and extensions."""
        return self.records, self.extensions


Layout = PairLayout[Part]
"""With the scales of both tensors between what is fixed and what is variable."""


def travels_raw(plan: TensorPlan, records: int, extensions: int) -> bool:
    """Whether a tensor with these escapes travels as it is, because its coded form would be no smaller."""
    return plan.fixed_bytes + aligned(2 * records) + aligned(extensions) >= plan.raw_bytes


def stats_of(parts: Sequence[Part]) -> EncodingStats:
    """What an encoding came to; parts: of keys and values."""
    return EncodingStats(
        sum(part.plan.values for part in parts), sum(part.records for part in parts), sum(part.raw for part in parts)
    )


def scale_bytes_of(spec: BlockSpec) -> int:
    """Bytes of the scales of a block, 0 where its element type has none."""
    return 8 * spec.num_layers * spec.num_pages * spec.page_size * spec.num_kv_heads if spec.scaled else 0


def parse(payload: Bytes, spec: BlockSpec, plans: tuple[TensorPlan, TensorPlan]) -> Layout:
    """The layout of a payload that came, all of it checked; raises CodecError, naming what is wrong."""
    layout = parse_header(payload, spec, plans)
    _check_body(payload, layout)
    return layout


def parse_header(payload: Bytes, spec: BlockSpec, plans: tuple[TensorPlan, TensorPlan]) -> Layout:
    """The layout that the header of a payload gives; raises CodecError where no encoder would write it."""
    raw, counts = parsed_header(payload)
    keys, values = _checked_part(plans[0], raw[0], *counts[:2]), _checked_part(plans[1], raw[1], *counts[2:])
    return Layout((keys, values), scale_bytes_of(spec))


def _check_body(payload: Bytes, layout: Layout) -> None:
    """Check what comes after a header against it."""
    layout.check_size(payload)
    for part, start, escapes in zip(layout.parts, layout.offsets, layout.streams, strict=True):
        if not part.raw:
            dense = payload[start : start + part.fixed_bytes]
            _check_groups(dense, part)
            check_records(dense, payload[escapes : escapes + 2 * part.records].view("<u2"), part.plan)


def _checked_part(plan: TensorPlan, raw: bool, records: int, extensions: int) -> Part:
    """What a header says of one tensor; raises CodecError where no encoder would say it."""
    most = 0 if raw else plan.values
    if not extensions <= records <= most:
        raise CodecError(f"a payload has {records} records and {extensions} extensions for {most} values")
    if not raw and not plan.fits:
        raise CodecError(f"a payload has pages of {plan.rows} tokens in tiles of {plan.code.chunk}")
    if not raw and travels_raw(plan, records, extensions):
        raise CodecError(f"a payload has {records} records for {plan.values} values, more than pay off")
    return Part(plan, raw, records, extensions)


def _check_groups(dense: Bytes, part: Part) -> None:
    """Check that counts and group offsets of a dense part agree with each other and with the numbers of records."""
    records, extensions = tile_escapes(dense, part.plan)
    if records.size and int(records.max()) > SEGMENTS * part.plan.segment_values:
        raise CodecError(f"a tile has {records.max()} escapes of {SEGMENTS * part.plan.segment_values} values")
    groups = part.plan.sections["groups"].of(dense).view("<u4").reshape(-1, 2)
    expected = (("records", records, part.records), ("extensions", extensions, part.extensions))
    for column, (name, each, total) in enumerate(expected):
        if int(each.sum()) != total:
            raise CodecError(f"tiles have {each.sum()} {name}; the header says {total}")
        if not np.array_equal(groups[:, column], offsets_of_groups(each)):
            raise CodecError(f"offsets of {name} do not follow from the counts")


def check_records(dense: Bytes, records: npt.NDArray[np.uint16], plan: TensorPlan) -> None:
    """Check that every record lies on a value of its tile; records: uint16, as many as the counts say."""
    rows, columns, segment = plan.rows, plan.columns, plan.segment_values
    if plan.code.per_channel:
        padding = rows < SEGMENTS * plan.segment_rows or columns < plan.tiles_per_page * plan.tile_width
    else:
        padding = plan.page_values < plan.tiles_per_page * SEGMENTS * segment
    if not padding and SEGMENTS * segment == plan.code.chunk:
        return  # every position is one of a value
    position = records.astype(np.int64) & (plan.code.chunk - 1)
    tile = np.repeat(np.arange(plan.tiles), tile_escapes(dense, plan)[0]) % max(plan.tiles_per_page, 1)
    s, j = position & (SEGMENTS - 1), position // SEGMENTS
    if plan.code.per_channel:
        row, column = s * plan.segment_rows + j // plan.tile_width, tile * plan.tile_width + j % plan.tile_width
        stray = (row >= rows) | (column >= columns)
    else:
        stray = (tile * SEGMENTS + s) * segment + j >= plan.page_values
    stray |= j >= segment
    if stray.any():
        raise CodecError(f"a record has position {position[stray][0]}, where its tile has no value")


def write_groups(dense: Bytes, plan: TensorPlan) -> None:
    """Write the group offsets that follow from the counts of a dense part."""
    groups = plan.sections["groups"].of(dense).view("<u4").reshape(-1, 2)
    for column, each in enumerate(tile_escapes(dense, plan)):
        groups[:, column] = offsets_of_groups(each)


def tile_escapes(dense: Bytes, plan: TensorPlan) -> tuple[Ints, Ints]:
    """Records and extensions of each tile by the counts of a dense part, int64 [tiles] each."""
    counts = plan.sections["counts"].of(dense).view("<u2")
    records = (counts & (WIDE - 1)).astype(np.int64)
    return records, np.where(counts & WIDE, records, 0)


def offsets_of_groups(sizes: Ints) -> Ints:
    """Sum of `sizes` before the first tile of each group."""
    ends = np.cumsum(sizes)
    first = np.arange(0, sizes.size, TILES_PER_GROUP)
    return np.where(first > 0, ends[first - 1], 0)
