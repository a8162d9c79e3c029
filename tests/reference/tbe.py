"""TCA-TBE value by value, from README.md beside this and ZipServ's algorithms 1 and 2; slow, for tests."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from kvrail.codec.papers.tbe.format import TbeWeight


def compress(weight: torch.Tensor) -> TbeWeight:
    """A weight, bfloat16 [rows, columns], as TCA-TBE (algorithm 1)."""
    rows, columns = weight.shape
    bits = weight.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
    exponents = Counter(int(value) >> 7 & 255 for value in bits.reshape(-1))
    base = max(range(249), key=lambda base: (sum(exponents[base + code] for code in range(1, 8)), -base))
    coded, full = bytearray(), list[int]()
    bitmaps, offsets = [], []
    for top in range(0, rows, 64):
        for left in range(0, columns, 64):
            begin, entry, within = len(coded), [len(coded) // 16, len(full) // 8], []
            for strip in range(4):
                tiles = [_push(bits, *corner, base, coded, full) for corner in _corners(top + 16 * strip, left)]
                bitmaps.append([list(plane) for plane in zip(*tiles, strict=True)])
                within.append(len(coded) - begin)
            offsets.append([*entry, within[0] | within[1] << 16, within[2] | within[3] << 16])
            coded += bytes(-len(coded) % 16)
            full += [0] * (-len(full) % 8)
    parts = (
        np.array([base], np.int32),
        np.array(bitmaps, np.uint64).reshape(-1, 4, 3, 16).view(np.int64),
        np.frombuffer(coded + bytes(16), np.uint8).copy(),
        np.array([*full, *[0] * 8], np.uint16).view(np.int16),
        np.array(offsets, np.int32).reshape(-1, 4),
    )
    return TbeWeight(rows, columns, *map(torch.from_numpy, parts))


def decompress(weight: TbeWeight) -> torch.Tensor:
    """The weight, bfloat16 [rows, columns], on the CPU: algorithm 2 for each position of each FragTile."""
    base, bitmaps = int(weight.base), weight.bitmaps.cpu().numpy().view(np.uint64)
    coded, full = weight.sign_mantissas.cpu().tolist(), weight.full_values.cpu().tolist()
    bits = np.zeros((weight.rows, weight.columns), dtype=np.uint16)
    across = -(-weight.columns // 64)
    for block, (first_coded, first_full, *_) in enumerate(weight.offsets.cpu().tolist()):
        coded_at, full_at = 16 * first_coded, 8 * first_full
        for strip in range(4):
            corners = _corners(64 * (block // across) + 16 * strip, 64 * (block % across))
            for fragment, (top, left) in enumerate(corners):
                one, two, three = (int(bitmaps[block, strip, plane, fragment]) for plane in range(3))
                indicator = one | two | three
                for place in range(64):
                    before = (indicator & (1 << place) - 1).bit_count()
                    if indicator >> place & 1:
                        value = coded[coded_at + before]
                        code = (three >> place & 1) << 2 | (two >> place & 1) << 1 | one >> place & 1
                        value = (value & 0x80) << 8 | (base + code) << 7 | value & 0x7F
                    else:
                        value = full[full_at + place - before] & 0xFFFF
                    row, column = top + place // 8, left + place % 8
                    if row < weight.rows and column < weight.columns:
                        bits[row, column] = value
                coded_at += indicator.bit_count()
                full_at += 64 - indicator.bit_count()
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _corners(top: int, left: int) -> Iterator[tuple[int, int]]:
    """Corners of a strip's FragTiles: TensorCoreTiles from left to right, the FragTiles of each column by column."""
    for tile in range(4):
        for part in range(4):
            yield top + 8 * (part % 2), left + 16 * tile + 8 * (part // 2)


def _push(bits: np.ndarray, top: int, left: int, base: int, coded: bytearray, full: list[int]) -> tuple[int, int, int]:
    """Encode a FragTile; beyond the weight it has the smallest value of the window. Returns its bitmaps."""
    words = [0, 0, 0]
    for place in range(64):
        row, column = top + place // 8, left + place % 8
        inside = row < bits.shape[0] and column < bits.shape[1]
        value = int(bits[row, column]) if inside else base + 1 << 7
        code = (value >> 7 & 255) - base
        if 1 <= code <= 7:
            for plane in range(3):
                words[plane] |= (code >> plane & 1) << place
            coded.append(value >> 8 & 0x80 | value & 0x7F)
        else:
            full.append(value)
    return words[0], words[1], words[2]
