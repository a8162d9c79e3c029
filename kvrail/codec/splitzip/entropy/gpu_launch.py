"""Launches of the Triton kernels, on the current stream, and the device memory that they need.

Pieces are coded by four launches: their bytes are counted, made a model, coded block by block into slots, and, when the
host has learned the sizes, brought to their places. Decoding is two: what each slot of a model stands for, and the
blocks. A third checks what was decoded, as the inner codec's host does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrail.codec.splitzip.entropy.format import (
    BLOCK_BYTES,
    LANES,
    MOST_PIECES,
    STATE_WORDS,
    SYMBOLS,
    TOTAL,
    num_blocks,
)
from kvrail.codec.splitzip.entropy.gpu_decode_kernels import check_kernel, decode_kernel, slots_kernel
from kvrail.codec.splitzip.entropy.gpu_encode_kernels import count_kernel, encode_kernel, model_kernel, place_kernel
from kvrail.codec.splitzip.tiles.format import WindowCode
from kvrail.codec.splitzip.tiles.payload import Layout
from kvrail.codec.splitzip.tiles.plan import TILES_PER_GROUP

COUNT_AT_ONCE, COUNT_WARPS = 4096, 4
"""Bytes that a program counts at once."""
PLACE_AT_ONCE, PLACE_WARPS = 2048, 8
"""Words that a program moves at once."""
SLOTS_AT_ONCE = 64
"""Slots of a model that a program finds: each is compared with every symbol."""
RECORDS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class CodedPieces:
    """Pieces in blocks, on the device: what is needed to bring them to a payload.

    model: uint32 [pieces, 256]; slots: uint16 [blocks, ...]; ends: int64 [blocks], sums of the blocks' words.
    """

    places: tuple[slice, ...]
    model: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor


def _table(
    places: Sequence[slice], fields: Sequence[tuple[int, ...]], device: torch.device
) -> tuple[torch.Tensor, int]:
    """The table that kernels take, on the device, and blocks in all; on CUDA the copy runs on the current stream.

    places: of the pieces uncoded; fields: what else a row has, behind its first block and its bytes.
    """
    blocks, rows = 0, []
    for place, others in zip(places, fields, strict=True):
        rows.append((blocks, place.stop - place.start, *others))
        blocks += num_blocks(place.stop - place.start)
    rows += [(blocks, 0, *(0 for _ in fields[0]))] * (MOST_PIECES - len(rows))
    table = torch.tensor(rows, dtype=torch.int64)
    moved = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
    return moved, blocks


def launch_code(inner: torch.Tensor, places: Sequence[slice]) -> CodedPieces:
    """Launch the coding of some pieces of `inner`, uint8; each has a multiple of four bytes, and is not empty."""
    device, count = inner.device, len(places)
    table, blocks = _table(places, [(place.start, -1) for place in places], device)
    counts = torch.zeros((count, SYMBOLS), dtype=torch.int64, device=device)
    model = torch.empty((count, SYMBOLS), dtype=torch.uint32, device=device)
    reciprocals = torch.empty((count, SYMBOLS), dtype=torch.int64, device=device)
    slots = torch.empty((blocks, BLOCK_BYTES + STATE_WORDS), dtype=torch.uint16, device=device)
    sizes = torch.empty(blocks, dtype=torch.int64, device=device)
    count_kernel[(blocks,)](inner, table, counts, COUNT_AT_ONCE, num_warps=COUNT_WARPS)
    model_kernel[(count,)](counts, model, reciprocals, num_warps=1)
    encode_kernel[(blocks,)](inner, table, model, reciprocals, slots, sizes, num_warps=LANES // 32)
    return CodedPieces(tuple(places), model, slots, sizes.cumsum(0))


def launch_place(coded: CodedPieces, offsets: Sequence[int], payload: torch.Tensor) -> None:
    """Launch the way of coded pieces to their offsets in `payload`, uint8; less than 0: such a piece stays away."""
    fields = [(place.start, offset) for place, offset in zip(coded.places, offsets, strict=True)]
    table, blocks = _table(coded.places, fields, payload.device)
    place_kernel[(blocks,)](table, coded.model, coded.slots, coded.ends, payload, PLACE_AT_ONCE, num_warps=PLACE_WARPS)


def launch_decode_pieces(
    payload: torch.Tensor, sources: Sequence[slice], inner: torch.Tensor, places: Sequence[slice], wrong: torch.Tensor
) -> None:
    """Launch the decoding of coded pieces, at `sources` of `payload`, to their places in `inner`; both uint8.

    sources begin at multiples of eight bytes and have heads at least; wrong: int32 [1], set to 1 where one is corrupt.
    """
    fields = [(come.start, come.stop - come.start, place.start) for come, place in zip(sources, places, strict=True)]
    table, blocks = _table(places, fields, payload.device)
    count = len(places)
    slots = torch.empty((count, TOTAL), dtype=torch.uint32, device=payload.device)
    slots_kernel[(count, TOTAL // SLOTS_AT_ONCE)](payload, table, slots, wrong, SLOTS_AT_ONCE)
    decode_kernel[(blocks,)](payload, table, slots, inner, wrong, num_warps=LANES // 32)


def launch_check(inner: torch.Tensor, layout: Layout, code: WindowCode, wrong: torch.Tensor) -> None:
    """Launch the check of an inner payload's escapes; wrong: int32 [1], set to 1 where they don't fit."""
    tiles = [0 if part.raw else part.plan.tiles for part in layout.parts]
    if not sum(tiles):
        return
    counts, groups, records = [], [], []
    for part, dense, escapes in zip(layout.parts, layout.offsets, layout.streams, strict=True):
        sections = part.plan.sections
        where = (
            [0, 0, 0] if part.raw else [dense + sections["counts"].offset, dense + sections["groups"].offset, escapes]
        )
        counts.append(inner[where[0] :].view(torch.uint16))
        groups.append(inner[where[1] :].view(torch.uint32))
        records.append(inner[where[2] :].view(torch.uint16))
    plans = [part.plan for part in layout.parts]
    check_kernel[(sum(tiles),)](
        *tiles, *counts, *groups, *records, *(part.records for part in layout.parts),
        *(part.extensions for part in layout.parts), plans[0].rows, plans[0].segment_rows,
        *(plan.columns for plan in plans), *(plan.tile_width for plan in plans),
        *(plan.tiles_per_page for plan in plans), wrong, code.chunk, TILES_PER_GROUP, RECORDS_AT_ONCE, num_warps=1,
    )  # fmt: skip
