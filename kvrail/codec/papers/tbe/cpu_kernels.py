"""Loops over BlockTiles, compiled by numba; the bits: README.md beside this."""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import numpy as np
from numba import int64, njit, uint8, uint16, uint64

from kvrail.codec.core.cpu_compile import compiled_when_called

_BLOCK, _FRAGMENT, _FRAGMENTS = 64, 8, 16


@compiled_when_called
def count_exponents(bits, counts):
    """Add to `counts`, int64 [256], how often each exponent occurs in `bits`, uint16 [n].

    Two tables, so that equal neighbours do not wait for each other.
    """
    even, odd = np.zeros(512, np.int64), np.zeros(512, np.int64)
    for at in range(0, bits.size - 1, 2):
        even[bits[at] >> 7] += 1
        odd[bits[at + 1] >> 7] += 1
    if bits.size % 2:
        even[bits[-1] >> 7] += 1
    for exponent in range(256):
        counts[exponent] += even[exponent] + even[exponent + 256] + odd[exponent] + odd[exponent + 256]


@njit(inline="always")
def _corner(strip, fragment):
    """Row and column in a BlockTile of a strip's FragTile: those of a TensorCoreTile lie column by column."""
    return 16 * strip + 8 * (fragment % 2), 8 * (fragment // 2)


@njit(inline="always")
def _take_block(bits, block, across, filler, held):
    """Copy a BlockTile of `bits` to `held`, uint16 [64, 64]; what lies outside of the weight is `filler`."""
    row, column = _BLOCK * (block // across), _BLOCK * (block % across)
    rows, columns = min(_BLOCK, bits.shape[0] - row), min(_BLOCK, bits.shape[1] - column)
    if rows < _BLOCK or columns < _BLOCK:
        held[:] = filler
    for r in range(rows):
        for c in range(columns):  # faster than a slice's assignment
            held[r, c] = bits[row + r, column + c]


@compiled_when_called
def map_blocks(bits, base, begin, end, bitmaps, counts):
    """Write the bitmaps of BlockTiles `begin` to `end`, and how many weights of each strip have a code.

    bits: uint16 [rows, columns]. bitmaps: uint64 [BlockTiles, 4, 3, 16]. counts: int64 [BlockTiles, 4].
    """
    across = (bits.shape[1] + _BLOCK - 1) // _BLOCK
    held = np.empty((_BLOCK, _BLOCK), np.uint16)
    codes = np.empty((_BLOCK, _BLOCK), np.uint8)
    first = uint8(base + 1)
    for block in range(begin, end):
        _take_block(bits, block, across, uint16((base + 1) << 7), held)
        for row in range(_BLOCK):
            for column in range(_BLOCK):
                above = uint8(uint8(held[row, column] >> 7) - first)
                codes[row, column] = uint8(above + 1) if above < 7 else uint8(0)
        for strip in range(4):
            counts[block, strip] = np.count_nonzero(codes[16 * strip : 16 * strip + 16])
        for number in range(4 * _FRAGMENTS):
            strip, fragment = number // _FRAGMENTS, number % _FRAGMENTS
            row, column = _corner(strip, fragment)
            first_bits, second_bits, third_bits = uint64(0), uint64(0), uint64(0)
            for r in range(_FRAGMENT):
                # Eight bytes, one bit of each: multiplied they come together in the upper byte.
                word = uint64(0)
                for c in range(_FRAGMENT):
                    word |= uint64(codes[row + r, column + c]) << uint64(8 * c)
                ones, gather = uint64(0x0101010101010101), uint64(0x0102040810204080)
                shift = uint64(8 * r)
                first_bits |= (((word & ones) * gather) >> uint64(56)) << shift
                second_bits |= ((((word >> uint64(1)) & ones) * gather) >> uint64(56)) << shift
                third_bits |= ((((word >> uint64(2)) & ones) * gather) >> uint64(56)) << shift
            bitmaps[block, strip, 0, fragment] = first_bits
            bitmaps[block, strip, 1, fragment] = second_bits
            bitmaps[block, strip, 2, fragment] = third_bits


@compiled_when_called
def fill_blocks(bits, base, bitmaps, begin, end, starts, sign_mantissas, full_values):
    """Write the values of BlockTiles `begin` to `end` into PackedSignMantissa, uint8, and FullValue, uint16.

    bits, bitmaps: as above. starts: int64 [BlockTiles, 2], where a block's values begin in either buffer, in values.
    """
    across = (bits.shape[1] + _BLOCK - 1) // _BLOCK
    held = np.empty((_BLOCK, _BLOCK), np.uint16)
    coded_values = np.empty(_BLOCK * _BLOCK + 1, np.uint8)
    others = np.empty(_BLOCK * _BLOCK + 1, np.uint16)
    for block in range(begin, end):
        _take_block(bits, block, across, uint16((base + 1) << 7), held)
        coded = other = 0
        for number in range(4 * _FRAGMENTS):
            strip, fragment = number // _FRAGMENTS, number % _FRAGMENTS
            row, column = _corner(strip, fragment)
            word = bitmaps[block, strip, 0, fragment] | bitmaps[block, strip, 1, fragment]
            word |= bitmaps[block, strip, 2, fragment]
            for r in range(_FRAGMENT):
                have_code = int64((word >> uint64(8 * r)) & uint64(255))
                if have_code == 255:  # four rows of five
                    for c in range(_FRAGMENT):
                        value = held[row + r, column + c]
                        coded_values[coded + c] = uint8(((value >> 8) & 0x80) | (value & 0x7F))
                    coded += _FRAGMENT
                    continue
                for c in range(_FRAGMENT):
                    value = held[row + r, column + c]
                    coded_values[coded] = uint8(((value >> 8) & 0x80) | (value & 0x7F))
                    others[other] = value
                    coded += (have_code >> c) & 1
                    other += 1 - ((have_code >> c) & 1)
        at, there = starts[block]
        sign_mantissas[at : at + coded] = coded_values[:coded]
        full_values[there : there + other] = others[:other]


@compiled_when_called
def count_bits(bitmaps, begin, end, counts):
    """Add to `counts` how many weights of each strip of BlockTiles `begin` to `end` have a code, by the bitmaps."""
    for block in range(begin, end):
        for number in range(4 * _FRAGMENTS):
            strip, fragment = number // _FRAGMENTS, number % _FRAGMENTS
            word = bitmaps[block, strip, 0, fragment] | bitmaps[block, strip, 1, fragment]
            word |= bitmaps[block, strip, 2, fragment]
            word -= (word >> uint64(1)) & uint64(0x5555555555555555)
            word = (word & uint64(0x3333333333333333)) + ((word >> uint64(2)) & uint64(0x3333333333333333))
            word = (word + (word >> uint64(4))) & uint64(0x0F0F0F0F0F0F0F0F)
            counts[block, strip] += (word * uint64(0x0101010101010101)) >> uint64(56)


@compiled_when_called
def read_blocks(bitmaps, base, begin, end, starts, sign_mantissas, full_values, bits):
    """Restore BlockTiles `begin` to `end` into `bits`, uint16 [rows, columns]; arguments as above, checked before."""
    across = (bits.shape[1] + _BLOCK - 1) // _BLOCK
    held = np.empty((_BLOCK, _BLOCK), np.uint16)
    for block in range(begin, end):
        at, there = starts[block]
        for number in range(4 * _FRAGMENTS):
            strip, fragment = number // _FRAGMENTS, number % _FRAGMENTS
            row, column = _corner(strip, fragment)
            first_bits, second_bits = bitmaps[block, strip, 0, fragment], bitmaps[block, strip, 1, fragment]
            third_bits = bitmaps[block, strip, 2, fragment]
            for place in range(_FRAGMENT * _FRAGMENT):
                one = uint64(1)
                code = (first_bits & one) | ((second_bits & one) << one) | ((third_bits & one) << uint64(2))
                first_bits, second_bits, third_bits = first_bits >> one, second_bits >> one, third_bits >> one
                if code:
                    value = uint16(sign_mantissas[at])
                    at += 1
                    value = ((value & 0x80) << 8) | uint16((base + code) << 7) | (value & 0x7F)
                else:
                    value = full_values[there]
                    there += 1
                held[row + place // 8, column + place % 8] = value
        row, column = _BLOCK * (block // across), _BLOCK * (block % across)
        rows, columns = min(_BLOCK, bits.shape[0] - row), min(_BLOCK, bits.shape[1] - column)
        for r in range(rows):
            for c in range(columns):
                bits[row + r, column + c] = held[r, c]
