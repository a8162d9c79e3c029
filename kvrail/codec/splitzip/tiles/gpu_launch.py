"""Launches of the Triton kernels, on the current stream, and the device memory that they need.

Encoding is two launches: gpu_encode_kernel.py reads the pages once and leaves every tile's escapes in a slot of its
own, gpu_pack_kernel.py brings them together. Decoding is one, gpu_decode_kernel.py. No kernel is compiled again for
another number of layers or pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from kvrail.codec.base import PagedBlock
from kvrail.codec.core.arrays import Ints
from kvrail.codec.core.gpu import alignment_of
from kvrail.codec.splitzip.tiles.format import SEGMENTS
from kvrail.codec.splitzip.tiles.gpu_geometry import geometries_of
from kvrail.codec.splitzip.tiles.gpu_pack_kernel import pack_kernel
from kvrail.codec.splitzip.tiles.payload import Layout, Part, travels_raw
from kvrail.codec.splitzip.tiles.plan import TensorPlan

Plans = tuple[TensorPlan, TensorPlan]
Tops = Sequence[Ints | None]
Pair = tuple[torch.Tensor, torch.Tensor]


ENCODE_WORDS, DECODE_WORDS = 8, 4
"""Words of a segment that a thread has."""
_MOST_WARPS = 8
_PACK_PROGRAMS, _PACK_TILES, _PACK_RECORDS, _PACK_WARPS = 128, 128, 16, 16
"""Most programs that bring one tensor's escapes together; tiles and records of each that one takes at a time; warps."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Device memory of one tensor's escapes.

    records uint16, extensions uint8: one a value; packed: what travels, with room for all that a tensor smaller than
    raw can have.
    """

    records: torch.Tensor
    extensions: torch.Tensor
    packed_records: torch.Tensor
    packed_extensions: torch.Tensor

    @classmethod
    def allocate(cls, plan: TensorPlan, device: torch.device) -> Self:
        """Uninitialised memory for a plan; none where it is not coded."""
        tiles = tiles_of(plan)
        values = SEGMENTS * tiles * plan.segment_values if tiles else 0
        room = plan.raw_bytes - plan.fixed_bytes if tiles else 0
        return cls(
            torch.empty(values, dtype=torch.uint16, device=device),
            torch.empty(values, dtype=torch.uint8, device=device),
            torch.empty(room // 2, dtype=torch.uint16, device=device),
            torch.empty(room // 3, dtype=torch.uint8, device=device),
        )


@dataclass(frozen=True, slots=True)
class EncodeBuffers:
    """Device memory of an encoding; it may be used again for blocks of the same plans, also by a captured graph.

    body: uint8, dense parts of keys and values as they travel, then the scales; totals: int64 [2, 2], records and
    extensions of keys and of values.
    """

    body: torch.Tensor
    slots: tuple[Slots, Slots]
    totals: torch.Tensor

    @classmethod
    def allocate(cls, plans: Plans, scale_bytes: int, device: torch.device, memory: torch.Tensor | None = None) -> Self:
        """Uninitialised memory for plans of keys and values, and for `scale_bytes` bytes of scales.

        memory: uint8, of whose beginning the body is made, where it is given.
        """
        size = sum(_dense_bytes(plan) for plan in plans) + scale_bytes
        return cls(
            torch.empty(size, dtype=torch.uint8, device=device) if memory is None else memory[:size],
            (Slots.allocate(plans[0], device), Slots.allocate(plans[1], device)),
            torch.empty((2, 2), dtype=torch.int64, device=device),
        )

    def dense(self, plans: Plans) -> Pair:
        """The dense parts of keys and of values."""
        first, second = _dense_bytes(plans[0]), _dense_bytes(plans[1])
        return self.body[:first], self.body[first : first + second]

    def scales(self, plans: Plans) -> torch.Tensor:
        """The bytes of the scales."""
        return self.body[sum(_dense_bytes(plan) for plan in plans) :]


def warps_for(words: int, a_thread: int) -> int:
    """Warps for segments of `words`; both are powers of two."""
    return max(1, min(_MOST_WARPS, words // (32 * a_thread)))


def tiles_of(plan: TensorPlan) -> int:
    """Tiles of a tensor; 0 where it travels raw whatever it holds."""
    return plan.tiles if plan.fits and not travels_raw(plan, 0, 0) else 0


def parts_of(plans: Plans, totals: torch.Tensor) -> tuple[Part, Part]:
    """What became of keys and values; totals: of EncodeBuffers, in host memory."""
    parts = []
    for plan, (records, extensions) in zip(plans, totals.tolist(), strict=True):
        raw = not tiles_of(plan) or travels_raw(plan, records, extensions)
        parts.append(Part(plan, True, 0, 0) if raw else Part(plan, False, records, extensions))
    return parts[0], parts[1]


def make_table(pages: PagedBlock, tops: Tops) -> torch.Tensor:
    """Page ids, then the keys' and the values' tops (0 for None), int64 [pages + 2 * layers], on the pool's device.

    On CUDA the copy runs on the current stream.
    """
    given = [np.zeros(len(pages.layers), dtype=np.int64) if each is None else each for each in tops]
    table = torch.from_numpy(np.concatenate([np.array(pages.page_ids, dtype=np.int64), *given]))
    return table.pin_memory().to(pages.device, non_blocking=True) if pages.device.type == "cuda" else table


def gather_scales(pools: list[torch.Tensor], table: torch.Tensor, scales: torch.Tensor) -> None:
    """Copy the scales of the pages in `table`, where pools have them, to `scales`: those of keys, then of values."""
    for number, scale in enumerate(pools[2:]):
        half = scales[number * (scales.numel() // 2) :][: scales.numel() // 2].view(scale.shape[0], -1, scale.shape[2])
        torch.index_select(scale, 1, table[: half.shape[1]], out=half)


def place_whole(payload: torch.Tensor, layout: Layout, pools: list[torch.Tensor], index: torch.Tensor) -> None:
    """Copy what a payload brings as it is into the pages `index`: scales, and keys or values that travel raw."""
    starts = [(dense, part.plan.raw_bytes) for dense, part in zip(layout.offsets, layout.parts, strict=True)]
    half = layout.scale_bytes // 2
    starts += [(layout.scale_offset, half), (layout.scale_offset + half, half)]
    for number, (pool, (start, size)) in enumerate(zip(pools, starts, strict=False)):
        if number >= 2 or layout.parts[number].raw:
            pool.index_copy_(1, index, payload[start : start + size].view(pool.shape[0], -1, pool.shape[2]))


def _dense_bytes(plan: TensorPlan) -> int:
    return plan.fixed_bytes if tiles_of(plan) else 0


def launch_tiles(
    kernel: Any,
    words_a_thread: int,
    pages: PagedBlock,
    pools: list[torch.Tensor],
    plans: Plans,
    tiles: Sequence[int],
    table: torch.Tensor,
    tensors: Sequence[tuple[torch.Tensor, ...]],
    *,
    kept_bits: tuple[int, int] = (0, 0),
    **constants: bool,
) -> None:
    """Launch a kernel of one program a tile.

    tensors: what it takes of keys and of values beside the pools. It gets the number of layers where it names that.
    kept_bits: as of geometries_of. constants: the kernel's own.
    """
    keys, values = pools[:2]
    plan, other = plans if tiles[0] else plans[::-1]  # of a tensor without tiles nothing is looked at
    columns = (plan.columns, other.columns if all(tiles) else plan.columns)
    columns = columns if tiles[0] else columns[::-1]
    alignment = alignment_of((keys, values))
    geometries = geometries_of(plan.format, plan.code, plan.rows, columns, kept_bits, alignment)
    words = max(geometry.segment_words for geometry in geometries)
    kernel[(sum(tiles),)](
        keys, values, keys.stride(0), values.stride(0), keys.stride(1), values.stride(1),
        table, len(pages.page_ids), *([len(pages.layers)] if "num_layers" in kernel.arg_names else []), *tiles,
        *(tensor for pair in zip(*tensors, strict=True) for tensor in pair), *geometries,
        **constants, num_warps=warps_for(words, words_a_thread),
    )  # fmt: skip


def launch_pack(plans: Plans, tiles: Sequence[int], dense: Pair, buffers: EncodeBuffers) -> None:
    """Launch the kernel that brings the escapes of both tensors together."""
    runs = [_PACK_TILES * max(1, -(-each // (_PACK_TILES * _PACK_PROGRAMS))) for each in tiles]
    programs = [max(1, -(-each // run)) for each, run in zip(tiles, runs, strict=True)]
    tensors = []
    for plan, each, part, slots in zip(plans, tiles, dense, buffers.slots, strict=True):
        counts, offsets = (plan.sections[name].of(part) if each else part for name in ("counts", "groups"))
        packed = slots.packed_records, slots.packed_extensions
        tensors.append(
            (counts.view(torch.uint16), offsets.view(torch.uint32), slots.records, slots.extensions, *packed)
        )
    pack_kernel[(sum(programs),)](
        programs[0], *tiles, *runs,
        *(tensor for pair in zip(*tensors, strict=True) for tensor in pair),
        *(slots.packed_records.numel() for slots in buffers.slots),
        *(slots.packed_extensions.numel() for slots in buffers.slots),
        buffers.totals,
        *(SEGMENTS * plan.segment_values if each else 1 for plan, each in zip(plans, tiles, strict=True)),
        _PACK_TILES, _PACK_RECORDS,
        num_warps=_PACK_WARPS,
    )  # fmt: skip
