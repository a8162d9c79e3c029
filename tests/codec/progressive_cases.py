"""What the progressive codec's backends are tested with: the reference's payloads, and the formula of a first stage."""

import dataclasses

import numpy as np
import torch
from kv_blocks import random_block, scattered
from splitzip_cases import int_type, kv_block

from kvrail.codec.base import Block, BlockSpec
from kvrail.codec.splitzip.progressive import reference
from kvrail.codec.splitzip.progressive.format import Cut
from kvrail.codec.splitzip.progressive.payload import parse_rest
from kvrail.codec.splitzip.progressive.plan import anchor_plans
from kvrail.codec.splitzip.tiles.format import FORMATS


def kv_pages(spec, seed=0, outliers=0.01):
    """Scattered pages of a pool of real-looking KV, with layers before and after."""
    layout = scattered(spec, seed)
    return dataclasses.replace(layout, pools=kv_block(layout.pools.spec, seed, outliers))


def plans_of(spec, cut=None, chunk=4096):
    return anchor_plans(spec, cut or Cut(), chunk)


def raw_of(second, plans):
    """Whether keys and values travel raw, by a second stage."""
    return tuple(part.raw for part in parse_rest(np.frombuffer(second, dtype=np.uint8), plans).parts)


def matrices(pool):
    """A pool's elements as bits, [layers, pages, rows, columns]; a view."""
    return pool.view(torch.uint8 if pool.element_size() == 1 else torch.uint16).flatten(3).numpy()


def reference_payloads(pages, plans):
    """The two payloads that README.md asks for, value by value."""
    return tuple(bytes(payload) for payload in reference.encode(pages, plans).stages())


def middles(block, plans, raw=(False, False)):
    """What a first stage gives: kept bits, then 1, then zeros, an escape at the lower end of its channel's window.

    In the lower halves of a channel's two topmost octaves one bit more is kept. Tensors that travel raw, and scales,
    are as they are.
    """
    tensors = []
    for tensor, plan, whole in zip((block.keys, block.values), plans, raw, strict=True):
        form, low = plan.format, plan.format.mantissa_bits - plan.kept_bits
        kept = tensor.clone()
        if not whole and kept.numel():
            bits = kept.view(int_type(kept))
            exponents = exponents_of(tensor, plan)
            tops = channel_tops(exponents, plan)
            if low:
                half = 1 << form.mantissa_bits - 1
                open_bits = low - ((tops - exponents < 2) & (bits & half == 0)).int()
                bits[:] = (bits & -1 << open_bits | 1 << open_bits - 1).to(bits.dtype)
            lowest = (tops - (6 if low else 7)).clamp(min=0)
            bits += (torch.maximum(exponents, lowest) - exponents << form.mantissa_bits).to(bits.dtype)
        tensors.append(kept)
    return Block(*tensors, block.key_scales, block.value_scales)


def exponents_of(tensor, plan):
    """The exponents of a tensor's elements, int32, as they are stored."""
    return tensor.view(int_type(tensor)).int() >> plan.format.mantissa_bits & plan.format.exponents - 1


def channel_tops(exponents, plan):
    """Of each value the exponent from which its channel's window goes down; exponents: [layers, pages, tokens, ...].

    That is the channel's largest in the page, or 15 below the largest of the channels that share its tile.
    """
    largest = exponents.flatten(3).amax(2, keepdim=True)
    tiles = [part.amax(3, keepdim=True).expand_as(part) for part in largest.split(plan.tile_width, 3)]
    tops = torch.maximum(largest, torch.cat(tiles, 3) - 15)
    return tops.expand(*exponents.shape[:3], -1).reshape(exponents.shape)


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
