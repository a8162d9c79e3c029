"""Triton: words of several values, which kernels handle at once.

A **word** is 32 bits of LANES neighbouring values, each in a lane of 32 / LANES bits: two of sixteen bits, four of
eight, or, where the geometry is odd, a single one. Each instruction on words works for all lanes, because no
intermediate result leaves its lane.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from triton.language import target_info
from triton.runtime import JITFunction


@triton.jit
def replicated(value, LANES: tl.constexpr):
    """`value`, which fits a lane, in every lane."""
    return value * (0xFFFFFFFF // ((1 << (32 // LANES)) - 1))


COMPILED = tl.constexpr(isinstance(replicated, JITFunction))
"""Whether there are the instructions of an NVIDIA GPU; in Triton's interpreter there are not."""


PAIRED = tl.constexpr(COMPILED.value and bool(target_info.cuda_capability_geq(9, 0)))
"""Whether, besides, there are minimum and maximum of pairs of sixteen bits."""
_TWO_A_THREAD = tl.constexpr(256)
"""Words of a block that gives every thread of a program at least two."""


@triton.jit
def packed(word, LANES: tl.constexpr):
    """The low eight bits of each lane as LANES bytes."""
    if LANES == 1:
        data = word.to(tl.uint8)
    elif LANES == 2 and (COMPILED and word.numel >= _TWO_A_THREAD):  # those of two words by one instruction
        data = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [word], dtype=tl.uint16, is_pure=True, pack=2
        )
    elif LANES == 2:
        data = ((word & 0xFF) | ((word >> 8) & 0xFF00)).to(tl.uint16)
    else:
        data = word
    return data


@triton.jit
def spread(data, LANES: tl.constexpr):
    """LANES bytes as the low eight bits of the lanes of a word; the inverse of `packed`."""
    word = data.to(tl.uint32)
    if LANES == 2:
        word = (word | (word << 8)) & 0x00FF00FF
    return word


@triton.jit
def larger_pair(a, b):
    """Each lane's larger number, of words of two lanes."""
    if PAIRED:
        most = tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, is_pure=True, pack=1)
    else:
        most = tl.maximum(a & 0xFFFF, b & 0xFFFF) | tl.maximum(a & 0xFFFF0000, b & 0xFFFF0000)
    return most


@triton.jit
def popcount(word):
    """How many bits are set, int32. The form that compilers turn into one instruction."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def aligned(size):
    """`size` rounded up to a section's alignment."""
    return (size + 15) // 16 * 16


@triton.jit
def pointer_to(data, SIZE: tl.constexpr):
    """A pointer to bytes as one to unsigned integers of SIZE bytes."""
    if SIZE == 8:
        result = data.to(tl.pointer_type(tl.uint64))
    elif SIZE == 4:
        result = data.to(tl.pointer_type(tl.uint32))
    elif SIZE == 2:
        result = data.to(tl.pointer_type(tl.uint16))
    else:
        result = data.to(tl.pointer_type(tl.uint8))
    return result


@triton.jit
def load(pointer, mask, PADDED: tl.constexpr):
    """What lies there; 0 where masked."""
    return tl.load(pointer, mask=mask if PADDED else None, other=0 if PADDED else None)


@triton.jit
def store(pointer, data, mask, PADDED: tl.constexpr):
    """Store data of a wider type, which fits."""
    if PADDED:
        tl.store(pointer, data.to(pointer.dtype.element_ty), mask=mask)
    else:
        tl.store(pointer, data.to(pointer.dtype.element_ty))
