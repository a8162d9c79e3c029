"""Lynx on a CPU: elements of every type as float32 and back, and what a stage says of chunks."""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type, operator"

import numpy as np
from numba import float32 as f32
from numba import njit
from numba import uint16 as u16
from numba import uint32 as u32

BFLOAT16, FLOAT16 = 7, 10
"""Formats by their mantissa bits; the third, float32, has 23."""
TINY = 2.0**-110


@njit(nogil=True)
def load(page, start, mantissa_bits, elements):
    """Elements of a page of bytes from number `start` on, as uint32."""
    if mantissa_bits in (BFLOAT16, FLOAT16):
        source = page.view(np.uint16)[start:][: elements.size]
        for j in range(elements.size):
            elements[j] = u32(source[j])
    else:
        whole = page.view(np.uint32)[start:][: elements.size]
        for j in range(elements.size):
            elements[j] = whole[j]


@njit(nogil=True)
def widen(elements, mantissa_bits, bits):
    """Elements as the bits of float32 numbers."""
    if mantissa_bits == BFLOAT16:
        for j in range(bits.size):
            bits[j] = elements[j] << u32(16)
    elif mantissa_bits == FLOAT16:
        numbers = bits.view(np.float32)
        for j in range(bits.size):
            bits[j] = (elements[j] & u32(0x7FFF)) << u32(13)
        for j in range(bits.size):
            numbers[j] = numbers[j] * f32(2.0**112)
        for j in range(bits.size):
            endless = u32(0x7F800000) if elements[j] & u32(0x7FFF) >= u32(0x7C00) else u32(0)
            bits[j] |= endless | (elements[j] & u32(0x8000)) << u32(16)
    else:
        for j in range(bits.size):
            bits[j] = elements[j]


@njit(nogil=True)
def round_to(numbers, mantissa_bits, elements):
    """Bits of the nearest finite elements, ties to the even one, uint32; `numbers` is left clamped."""
    if mantissa_bits == BFLOAT16:
        most = f32(3.3895313892515355e38)
    elif mantissa_bits == FLOAT16:
        most = f32(65504.0)
    else:
        most = f32(3.4028234663852886e38)
    for j in range(numbers.size):
        number = numbers[j]
        number = most if number > most else number
        numbers[j] = -most if number < -most else number
    bits = numbers.view(np.uint32)
    if mantissa_bits == BFLOAT16:
        for j in range(bits.size):
            elements[j] = (bits[j] + u32(0x7FFF) + (bits[j] >> u32(16) & u32(1))) >> u32(16)
    elif mantissa_bits == FLOAT16:
        sums = np.empty(numbers.size, np.float32)
        for j in range(numbers.size):
            sums[j] = abs(numbers[j]) + f32(0.5)  # whose last bit is worth a subnormal's
        subnormals = sums.view(np.uint32)
        for j in range(bits.size):
            size = bits[j] & u32(0x7FFFFFFF)
            normal = (size + u32(0xFFF) + (size >> u32(13) & u32(1)) - u32(112 << 23)) >> u32(13)
            size = subnormals[j] - u32(0x3F000000) if size < u32(0x38800000) else normal
            elements[j] = size | (bits[j] >> u32(16) & u32(0x8000))
    else:
        for j in range(bits.size):
            elements[j] = bits[j]


@njit(nogil=True)
def store(elements, page, start, mantissa_bits):
    """Write elements' bits into a page of bytes from number `start` on."""
    if mantissa_bits in (BFLOAT16, FLOAT16):
        target = page.view(np.uint16)[start:][: elements.size]
        for j in range(elements.size):
            target[j] = u16(elements[j])
    else:
        whole = page.view(np.uint32)[start:][: elements.size]
        for j in range(elements.size):
            whole[j] = elements[j]


@njit(nogil=True)
def read_chunk(dense, stage, geometry, number, chunk, left, centres, scales):
    """Centres and scales of a block's columns in one chunk of page `number`; centres are 0 where a stage has none."""
    width = centres.size
    place = number * geometry.columns + left
    here = dense[stage.scales + 2 * place :][: 2 * width].view(np.uint16)
    bits = scales.view(np.uint32)
    for j in range(width):
        bits[j] = u32(here[j]) << u32(16)
    centres[:] = f32(0)
    if stage.minima >= 0:
        elements = np.empty(width, np.uint32)
        load(dense[stage.minima :], place, geometry.mantissa_bits, elements)
        widen(elements, geometry.mantissa_bits, centres.view(np.uint32))
        for j in range(width):
            centres[j] = centres[j] + scales[j]
    if geometry.chunks > 1:
        place = (number * geometry.chunks + chunk) * geometry.columns + left
        widths = dense[stage.widths + place :][:width]
        if stage.lows >= 0:
            lows = dense[stage.lows + place :][:width]
            for j in range(width):
                ends = f32(widths[j]) + f32(2) * f32(lows[j])
                centres[j] = centres[j] + scales[j] * ((ends - f32(255)) * f32(1 / 255))
        for j in range(width):
            scale = scales[j] * (f32(widths[j]) * f32(1 / 255))
            scales[j] = f32(0) if scale < f32(TINY) else scale


@njit(nogil=True)
def units_of(scales, units, rates):
    """128ths of scales, and how many of them are 1; 0 where the scale is 0."""
    for j in range(scales.size):
        units[j] = scales[j] * f32(2.0**-7)
        rates[j] = f32(128) / scales[j] if scales[j] > f32(0) else f32(0)
