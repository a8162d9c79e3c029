"""What the backends of `splitzip-progressive-ans` are tested with: the formula of a first stage, and pages."""

import dataclasses
import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from kv_blocks import random_block, scattered
from splitzip_cases import int_type, kv_block

from kvrail.codec.base import Block, BlockSpec
from kvrail.codec.core.floats import FLOATS
from kvrail.codec.core.sections import HEADER_BYTES
from kvrail.codec.splitzip.tiles.format import FORMATS

LENGTHS = struct.Struct("<5Q")
KEPT = [(3, 1), (1, 6), (2, 2)]


def kv_pages(spec, seed=0, outliers=0.01):
    """Scattered pages of a pool of real-looking KV, with layers before and after."""
    layout = scattered(spec, seed)
    return dataclasses.replace(layout, pools=kv_block(layout.pools.spec, seed, outliers))


def every_pattern(dtype):
    """A block with all patterns, in the order of their exponents, so that no tensor travels raw."""
    form = FORMATS[dtype]
    patterns = torch.arange(1 << 8 * form.item_bytes)
    spec = BlockSpec(dtype, 1, patterns.numel() // 32, 32, 1, 64, 64, scaled=form.item_bytes == 1)
    block = random_block(spec)
    order = torch.argsort(patterns >> form.mantissa_bits & form.exponents - 1, stable=True)
    for tensor in (block.keys, block.values):
        bits = tensor.view(int_type(tensor)).view(-1)
        bits[:] = order.repeat_interleave(bits.numel() // patterns.numel()).to(bits.dtype)
    return block


def pages_with_escapes(spec, seed=0):
    """Scattered pages of normal values in channels of unequal scale; some are zero, some far below the others."""
    pages = kv_pages(spec, seed, outliers=0)
    for tensor in (pages.pools.keys, pages.pools.values):
        flat = tensor.view(-1)
        flat.view(int_type(tensor))[:: 97 + seed] = 0
        small = flat[5 :: 89 + seed].float() * (2.0**-12 if tensor.element_size() == 2 else 2.0**-6)
        flat[5 :: 89 + seed] = small.to(tensor.dtype)
    return pages


def coarse(block, kept, second):
    """What a first stage gives: its kept mantissa bits, then 1, then zeros; second: the payload, whose flags say what
    travels raw. That, and what has eight bits, is as it is.
    """
    tensors = []
    for number, (tensor, bits) in enumerate(zip((block.keys, block.values), kept, strict=True)):
        form, given = FLOATS[block.spec.dtype], tensor.clone()
        if form.item_bytes == 2 and not second[0] >> number & 1 and given.numel():
            low, view = form.mantissa_bits - bits, given.view(int_type(given))
            view[:] = view & -1 << low | 1 << low - 1
        tensors.append(given)
    return Block(*tensors, block.key_scales, block.value_scales)


@dataclass
class Pieces:
    """A first stage taken apart."""

    header: bytes
    parts: list[bytes]

    def joined(self):
        """The payload of these pieces, lengths fitting."""
        return self.header + LENGTHS.pack(*map(len, self.parts)) + b"".join(self.parts)


def pieces_of(payload):
    """The pieces of a first stage, as they travel."""
    ends = list(accumulate(LENGTHS.unpack_from(payload, HEADER_BYTES), initial=HEADER_BYTES + LENGTHS.size))
    return Pieces(payload[:HEADER_BYTES], [payload[begin:end] for begin, end in pairwise(ends)])
