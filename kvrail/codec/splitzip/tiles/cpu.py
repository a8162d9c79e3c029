"""What the forms share on a CPU: ranges of tiles on several threads, and where their escapes go."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrail.codec.core import buffers
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.cpu import on_threads
from kvrail.codec.core.sections import aligned, pad_all
from kvrail.codec.splitzip.tiles.format import SEGMENTS
from kvrail.codec.splitzip.tiles.payload import Part, tile_escapes, travels_raw, write_groups
from kvrail.codec.splitzip.tiles.plan import TensorPlan


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
    pad_all(dense, plan.sections)
    write_groups(dense, plan)
    return escapes


def decode_on_threads(part: Part, dense: Bytes, escapes: Bytes, decode_range: TileDecoder) -> None:
    """Write the tiles of one tensor into its pages; escapes: its records and what follows."""
    extensions = escapes[aligned(2 * part.records) :]
    records, wide = tile_escapes(dense, part.plan)

    def on_range(first: int, last: int) -> None:
        decode_range(first, last, escapes[2 * int(records[:first].sum()) :], extensions[int(wide[:first].sum()) :])

    on_threads(on_range, part.plan.tiles, part.plan.raw_bytes)
