"""Restores compact weights value by value, from README.md beside this; slow, for tests."""

import numpy as np
import torch

from kvrail.codec.compact.format import CompactWeight


def unpack(weight: CompactWeight) -> torch.Tensor:
    """The weight, bfloat16 [rows, columns], on the CPU."""
    blocks = weight.blocks.cpu().numpy()
    index, counts, shifts = (part.cpu().numpy() for part in (weight.index, weight.counts, weight.shifts))
    bits = np.zeros((weight.rows, weight.columns), dtype=np.uint16)
    across = weight.columns // 64
    for tile in range(weight.rows // 16 * across):
        block = blocks[16 * int(index[tile]) :]
        exponents = _escaped(block, int(counts[tile]))
        for lane in range(32):
            for number in range(32):
                row, column = lane % 16, 32 * (lane // 16) + number
                low = int(block[512 * (number // 16) + 16 * lane + number % 16])
                sign, code = _field(block, lane, number // 4, number % 4)
                upper = exponents.get((row, column), 60 + code)
                exponent = 2 * upper + (low >> 7)
                at = (16 * (tile // across) + row, 64 * (tile % across) + column)
                if exponent not in (0, 255):
                    exponent += int(shifts[at[0]])
                bits[at] = sign << 15 | exponent << 7 | low & 0x7F
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _escaped(block: np.ndarray, count: int) -> dict[tuple[int, int], int]:
    """Upper bits of the exponents of a tile's escapes, by row and column."""
    total, first = count & 0xFFFF, count >> 16
    found = {}
    for number in range(total):
        record = int(block[1408 + 2 * number]) | int(block[1409 + 2 * number]) << 8
        found[(record >> 5) & 15, (record & 31) + (32 if number >= first else 0)] = record >> 9
    return found


def _field(block: np.ndarray, lane: int, group: int, number: int) -> tuple[int, int]:
    """Sign and code of a weight."""

    def bits(word: int, byte: int, low: int, count: int) -> int:
        return int(block[1024 + 128 * word + 4 * lane + byte]) >> low & ((1 << count) - 1)

    if group == 6:
        return bits(2, number, 5, 1), bits(0, number, 5, 2)
    if group == 7:
        return bits(2, number, 6, 1), bits(1, number, 5, 2)
    if group % 2:
        return bits(group // 2, (number + 1) % 4, 2, 1), bits(group // 2, number, 3, 2)
    return bits(group // 2, number, 7, 1), bits(group // 2, number, 0, 2)
