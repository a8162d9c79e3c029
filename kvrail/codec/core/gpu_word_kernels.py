"""Triton: words of several values, which kernels handle at once.

A **word** is 32 bits of LANES neighbouring values, each in a lane of 32 / LANES bits: two of sixteen bits, four of
eight, or, where the geometry is odd, a single one. Each instruction on words works for all lanes, because no
intermediate result leaves its lane.

A **quad** is 64 bits, two words of two values of sixteen bits each, that are loaded and stored as one. What of its
values fits eight bits is one word of four lanes: half as much to be shifted and masked.
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
"""Words of a block of which every thread of a program has two at least."""


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
def spread_at_once(data, LANES: tl.constexpr):
    """As `spread`, by one instruction a word where there is one: for kernels that logic holds up, not memory."""
    if LANES == 2 and (COMPILED and data.numel >= _TWO_A_THREAD):  # two neighbours are loaded as one register
        word = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;",
            "=r,=r,r", [data], dtype=tl.uint32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        word = spread(data, LANES)
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
def smaller_pair(a, b):
    """Each lane's smaller number, of words of two lanes."""
    if PAIRED:
        least = tl.inline_asm_elementwise("min.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, is_pure=True, pack=1)
    else:
        least = tl.minimum(a & 0xFFFF, b & 0xFFFF) | tl.minimum(a & 0xFFFF0000, b & 0xFFFF0000)
    return least


@triton.jit
def clamped(word, LEAST: tl.constexpr, MOST: tl.constexpr, LANES: tl.constexpr):
    """Lanes, of one or two to a word, held between two numbers."""
    if LANES == 1:
        word = tl.minimum(tl.maximum(word, LEAST), MOST)
    else:
        word = smaller_pair(larger_pair(word, LEAST << 16 | LEAST), MOST << 16 | MOST)
    return word


@triton.jit
def risen(word, START: tl.constexpr, HEIGHT: tl.constexpr, zero):
    """How far each lane, of two to a word, is above START: at least 0, at most HEIGHT; no lane 2^15 or more above.

    zero: one that compilers do not know, so that they keep START in a register and do not make it anew each time.
    """
    if PAIRED:  # one instruction
        above = tl.inline_asm_elementwise(
            "{ .reg .b32 t; add.s16x2 t, $1, $2; min.relu.s16x2 $0, t, $3; }", "=r,r,r,r",
            [word, zero + ((-START) & 0xFFFF) * 0x10001, HEIGHT * 0x10001], tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        above = clamped(word, START, START + HEIGHT, 2) - replicated(START, 2)
    return above


@triton.jit
def low_bytes(first, second):
    """The low bytes of a quad's values, given its two words, as the lanes of one word."""
    if COMPILED:
        word = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [first, second], tl.uint32, is_pure=True, pack=1
        )
    else:
        first = (first & 0xFF) | ((first >> 8) & 0xFF00)
        second = (second & 0xFF) | ((second >> 8) & 0xFF00)
        word = first | (second << 16)
    return word


@triton.jit
def high_bytes(first, second):
    """As low_bytes, the high ones."""
    if COMPILED:
        word = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7531;", "=r,r,r", [first, second], tl.uint32, is_pure=True, pack=1
        )
    else:
        word = low_bytes(first >> 8, second >> 8)
    return word


@triton.jit
def high_bits(first, second):
    """As high_bytes, the highest bit of a value eight times."""
    if COMPILED:
        word = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0xfdb9;", "=r,r,r", [first, second], tl.uint32, is_pure=True, pack=1
        )
    else:
        word = ((high_bytes(first, second) >> 7) & 0x01010101) * 0xFF
    return word


@triton.jit
def half_of_quad(low, high, PART: tl.constexpr):
    """The first (PART 0) or the second word of a quad, given the low and the high bytes of its values."""
    if COMPILED:
        word = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7362;" if PART else "prmt.b32 $0, $1, $2, 0x5140;",
            "=r,r,r", [low, high], tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = low >> (16 * PART), high >> (16 * PART)
        word = (low & 0xFF) | ((low & 0xFF00) << 8) | ((high & 0xFF) << 8) | ((high & 0xFF00) << 16)
    return word


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
