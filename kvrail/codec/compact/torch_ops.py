"""Compresses weights in torch operations, on the device where they lie."""

import torch

from kvrail.codec.compact.format import (
    CODE_BYTES,
    FIRST_EXPONENT,
    FIXED_BYTES,
    LOW_BYTES,
    UNIT,
    WINDOW,
    CompactWeight,
)
from kvrail.codec.fused.launch import STRIP_ROWS
from kvrail.codec.fused.weight import TILE_COLUMNS, refusal

_ROWS_AT_ONCE = 4096
"""Rows compressed at once: the operations hold some forty bytes for each weight."""
_MOST_UNITS = 1 << 31
"""Units that an index can name: blocks of one weight take less than 32 GiB."""


def compress(weight: torch.Tensor) -> CompactWeight:
    """Compress a weight, bfloat16 [rows, columns], rows a multiple of 16 and columns one of 64.

    Raises ValueError for any other weight.
    """
    why = refusal(weight)
    if why:
        raise ValueError(f"the weight cannot be compressed: {why}")
    rows, columns = weight.shape
    parts = [_fields(weight[at : at + _ROWS_AT_ONCE]) for at in range(0, rows, _ROWS_AT_ONCE)]
    fixed, escaped, records, shifts = (torch.cat(part) for part in zip(*parts, strict=True))
    totals = escaped.sum(1)
    units = (FIXED_BYTES + 2 * totals + UNIT - 1) // UNIT
    begins = units.cumsum(0) - units
    end = int(units.sum())
    if end >= _MOST_UNITS:
        raise ValueError(
            f"the weight cannot be compressed: its blocks take {end * UNIT} bytes; at most 32 GiB can be named"
        )
    blocks = torch.zeros(end * UNIT, dtype=torch.uint8, device=weight.device)
    at = begins[:, None] + torch.arange(FIXED_BYTES // UNIT, device=weight.device)
    blocks.view(-1, UNIT)[at] = fixed.view(len(fixed), -1, UNIT)
    tile = torch.repeat_interleave(torch.arange(len(totals), device=weight.device), totals)
    rank = torch.arange(len(records), device=weight.device) - (totals.cumsum(0) - totals)[tile]
    blocks.view(torch.int16)[begins[tile] * (UNIT // 2) + FIXED_BYTES // 2 + rank] = records
    counts = totals | (escaped[:, 0] << 16)
    return CompactWeight(
        rows, columns, blocks, begins.int(), counts.int(), shifts, torch.exp2(shifts.to(torch.float32))
    )


def _fields(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of some strips: uint8 [tiles, 1408], escapes by half, int64 [tiles, 2], records int16, shifts int32 [rows]."""
    bits = weight.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    exponents, mantissas = (bits >> 7) & 0xFF, bits & 0x7F
    shifts = _shifts(exponents, mantissas)
    special = (exponents == 0) | (exponents == 255)
    stored = torch.where(special, exponents, exponents - shifts[:, None])
    inside = (stored >= FIRST_EXPONENT) & (stored < FIRST_EXPONENT + WINDOW)
    low = _by_lane(((stored & 1) << 7) | mantissas)
    codes = _by_lane(torch.where(inside, (stored - FIRST_EXPONENT) >> 1, 0)).view(-1, 32, 8, 4)
    signs = _by_lane(bits >> 15).view(-1, 32, 8, 4)
    lows = low.view(-1, 32, 2, 16).transpose(1, 2).reshape(-1, LOW_BYTES).to(torch.uint8)
    words = _words(codes, signs).transpose(1, 2).reshape(-1, CODE_BYTES).to(torch.uint8)
    escapes = ~_by_lane(inside).view(-1, 2, 512)
    place = escapes.view(-1).nonzero()[:, 0]
    records = (place & 511) | ((_by_lane(stored).view(-1)[place] >> 1) << 9)
    records = torch.where(records >= 1 << 15, records - (1 << 16), records).to(torch.int16)
    return torch.cat([lows, words], 1), escapes.sum(2), records, shifts


def _shifts(exponents: torch.Tensor, mantissas: torch.Tensor) -> torch.Tensor:
    """The shift of each row with the fewest escapes, int32 [rows]; of equals the lowest."""
    rows = len(exponents)
    histogram = torch.zeros(rows, 256, dtype=torch.int32, device=exponents.device)
    histogram.scatter_add_(1, exponents.long(), torch.ones_like(exponents))
    histogram[:, [0, 255]] = 0
    sums = torch.nn.functional.pad(histogram.cumsum(1), (1, 0))
    begins = torch.arange(1, 256 - WINDOW, device=exponents.device)
    inside = sums[:, begins + WINDOW] - sums[:, begins]
    number = torch.arange(256, device=exponents.device)
    least = torch.where(histogram > 0, number, 255).min(1).values
    most = torch.where(histogram > 0, number, 0).max(1).values
    shifts = begins - FIRST_EXPONENT
    allowed = (least[:, None] - shifts >= 1) & (most[:, None] - shifts <= 254)
    subnormal = ((exponents == 0) & (mantissas != 0)).any(1)
    allowed &= ~subnormal[:, None] | (shifts == 0)
    return shifts[torch.where(allowed, inside, -1).argmax(1)].to(torch.int32)


def _by_lane(values: torch.Tensor) -> torch.Tensor:
    """[rows, columns] to [tiles, 32 lanes, 32 weights]."""
    rows, columns = values.shape
    tiles = values.view(rows // STRIP_ROWS, STRIP_ROWS, columns // TILE_COLUMNS, 2, 32).permute(0, 2, 3, 1, 4)
    return tiles.reshape(-1, 32, 32)


def _words(codes: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Bytes of the three words of each lane, int32 [tiles, 32, 3, 4]. codes, signs: [tiles, 32, 8 groups, 4]."""
    even = codes[:, :, 0:6:2] | (signs[:, :, 0:6:2] << 7)
    odd = (codes[:, :, 1:6:2] << 3) | (signs[:, :, 1:6:2].roll(1, -1) << 2)
    words = even | odd
    words[:, :, 0] |= codes[:, :, 6] << 5
    words[:, :, 1] |= codes[:, :, 7] << 5
    words[:, :, 2] |= (signs[:, :, 6] << 5) | (signs[:, :, 7] << 6)
    return words
