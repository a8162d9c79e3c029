"""The one order in which attention adds up a query's keys, shared by the kernels that compute it (`order_kernel`).

A token's result must not depend on the rest of the batch, nor on how many of its sequence's tokens come at once. So
every kernel takes the same steps for a query, bit for bit:

    keys in blocks of `block_of` tokens from the sequence's beginning, one softmax running over a part
    parts end at fixed places: 256 tokens each up to 8,192, from there a sixteenth of the power of two before them
    parts are folded from the first to the last

Any program may compute a part, since each part begins empty. Blocks that a query does not see, before its window or
behind itself, change no bit of its result. Sums of weights are products with ones: a tensor core adds in the order of
keys whatever its instruction's shape, where Triton's own sum would follow the layout of registers. Kernels in this
order are launched without fused multiply-adds, which the compiler would use in some places and not in others.
"""

from dataclasses import dataclass

import torch
import triton

from kvrail.engine.attention.options import ScoreOptions
from kvrail.values.layout import KVLayout

FIRST = 8
"""Binary logarithm of the tokens of the first parts."""
PARTS = 4
"""Binary logarithm of the parts from one power of two to the next."""
_JOIN_ELEMENTS = 4096
"""Elements of parts that a joining program holds at once."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """A head's widths and the sizes of its elements in bytes: they decide which instructions compute it."""

    key_dim: int
    value_dim: int
    compute_bytes: int
    page_bytes: int

    @property
    def dim(self) -> int:
        """The larger width, as kernels pad it."""
        return padded(max(self.key_dim, self.value_dim))


def head_shape(layout: KVLayout, dtype: torch.dtype) -> HeadShape:
    """The shape for a model that computes in `dtype` over pages of `layout`."""
    page_bytes = getattr(torch, layout.dtype).itemsize
    return HeadShape(layout.key_dim, layout.value_dim, dtype.itemsize, page_bytes)


def block_of(shape: HeadShape) -> int:
    """Tokens that a loop iteration takes; a divisor of every part."""
    if max(shape.compute_bytes, shape.page_bytes) <= 2:
        return 64 if shape.dim <= 128 else 32
    return 32 if shape.dim <= 256 else 16


def padded(dim: int) -> int:
    """A size that tl.dot takes."""
    return max(16, int(triton.next_power_of_2(dim)))


def parts_of(tokens: int) -> int:
    """Parts of a sequence of `tokens` tokens, at least one: `part_of` its last token, plus one."""
    last = max(tokens - 1, 0)
    octave = max(last.bit_length() - 1, FIRST + PARTS)
    return (last >> (octave - PARTS)) + ((octave - FIRST - PARTS) << PARTS) + 1


def severed(shape: HeadShape) -> bool:
    """Whether keys and values are widened to 16 bits once they are loaded: see `pair_kernel` and `apart`."""
    return shape.compute_bytes == 2 > shape.page_bytes


def joined_at_once(group: int, value_dim: int) -> int:
    """Parts of a KV head's query heads that a joining program holds at once."""
    elements = int(triton.next_power_of_2(group)) * padded(value_dim)
    return max(1, min(8, _JOIN_ELEMENTS // elements))


def score_constants(options: ScoreOptions) -> dict[str, int]:
    """Kernels' constants of `options`."""
    return {"WINDOW": options.window, "SOFTCAP": options.softcap != 0, "SINKS": options.sinks is not None}
