"""What the progressive codec's backends are tested with: the reference's payloads, and the formula of a first stage."""

import dataclasses

import numpy as np
import torch
from kv_blocks import random_block, scattered
from splitzip_cases import int_type, kv_block

from codec.base import Block, BlockSpec
from codec.progressive import reference
from codec.progressive.payload import RestPayload, anchor_payload
from codec.progressive.plan import Cut, anchor_plans
from codec.splitzip.formats import FORMATS, WindowCode
from codec.splitzip.payload import Part, scale_bytes_of, travels_raw
from codec.splitzip.plan import aligned


def kv_pages(spec, seed=0, outliers=0.01):
    """Scattered pages of a pool of real-looking KV, with layers before and after."""
    layout = scattered(spec, seed)
    return dataclasses.replace(layout, pools=kv_block(layout.pools.spec, seed, outliers))


def plans_of(spec, cut=None, chunk=4096):
    return anchor_plans(spec, WindowCode(3, True, chunk), cut or Cut())


def matrices(pool):
    """A pool's elements as bits, [layers, pages, rows, columns]; a view."""
    if pool.dtype == torch.float32:
        return pool.numpy()
    return pool.view(torch.uint8 if pool.element_size() == 1 else torch.uint16).flatten(3).numpy()


def reference_payloads(pages, plans):
    """The two payloads that README.md asks for, value by value."""
    page_ids = np.array(pages.page_ids, dtype=np.int64)
    pools = [matrices(pool) for pool in pages.layer_pools()]
    parts, dense_parts, rests, escapes = [], [], [], []
    for pool, plan in zip(pools, plans, strict=False):
        raw = True
        if plan.fits and plan.values:
            dense = np.full(plan.fixed_bytes, 0xAB, dtype=np.uint8)
            rest = np.full(plan.rest.fixed_bytes, 0xAB, dtype=np.uint8)
            records, extensions = reference.encode_tensor(pool, page_ids, plan, dense, rest)
            raw = travels_raw(plan, records.size, extensions.size)
        if raw:
            parts.append(Part(plan, True, 0, 0))
            dense_parts.append(pool[:, page_ids].tobytes())
        else:
            parts.append(Part(plan, False, records.size, extensions.size))
            dense_parts.append(dense.tobytes())
            rests.append(rest.tobytes())
            escapes += [records.tobytes(), extensions.tobytes()]
    scales = b"".join(pool[:, page_ids].tobytes() for pool in pools[2:])
    header = anchor_payload(plans, parts, scale_bytes_of(pages.spec)).header()
    pieces = (header, *dense_parts, scales, *escapes)
    first = b"".join(piece.ljust(aligned(len(piece)), b"\0") for piece in pieces)
    return first, RestPayload(plans, (parts[0].raw, parts[1].raw)).header() + b"".join(rests)


def middles(block, plans, raw=(False, False)):
    """What a first stage gives: kept bits, then 1, then zeros; tensors that travel raw, and scales, as they are."""
    tensors = []
    for tensor, plan, whole in zip((block.keys, block.values), plans, raw, strict=True):
        low = plan.format.mantissa_bits - plan.kept_bits
        kept = tensor.clone()
        if low and not whole:
            bits = kept.view(int_type(kept))
            bits &= -1 << low
            bits |= 1 << low - 1
        tensors.append(kept)
    return Block(*tensors, block.key_scales, block.value_scales)


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
