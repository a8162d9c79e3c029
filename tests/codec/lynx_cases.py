"""What Lynx's backends are tested with: pages of several kinds, and the reference's payloads and pages."""

from dataclasses import replace

import numpy as np
import torch
from kv_blocks import random_block, scattered

from kvrail.codec.base import Block
from kvrail.codec.core.sections import aligned
from kvrail.codec.lynx import reference
from kvrail.codec.lynx.payload import (
    ANCHOR,
    EXACT,
    HEADER_BYTES,
    RESIDUAL,
    Layout,
    Part,
    escapes_of,
    plans_of,
    travels_raw,
)

INT_TYPES = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def kv_block(spec, seed=0, noise=0.0, offset=1.0):
    """Normal values times a scale a channel, about an offset a channel; a fraction `noise` has any bits."""
    generator = torch.Generator().manual_seed(seed)

    def kv(shaped):
        scales = torch.exp(torch.randn(shaped.shape[-2:], generator=generator))
        middles = offset * torch.randn(shaped.shape[-2:], generator=generator) * scales
        smooth = (torch.randn(shaped.shape, generator=generator) * scales + middles).to(shaped.dtype)
        bits = INT_TYPES[shaped.dtype]
        chosen = torch.rand(shaped.shape, generator=generator) < noise
        return torch.where(chosen, shaped.view(bits), smooth.view(bits)).view(shaped.dtype)

    drawn = random_block(spec, seed)
    return Block(kv(drawn.keys), kv(drawn.values))


def kv_pages(spec, seed=0, noise=0.0, offset=1.0):
    """Scattered pages of a pool of real-looking KV, with layers before and after."""
    layout = scattered(spec, seed)
    return replace(layout, pools=kv_block(layout.pools.spec, seed, noise, offset))


def matrices(pool):
    """A pool's elements as unsigned bits, [layers, pages, rows, columns]; a view."""
    return pool.view(torch.uint32 if pool.element_size() == 4 else torch.uint16).flatten(3).numpy()


def reference_payloads(pages, code, num_stages):
    """The payloads that README.md asks for, page by page."""
    plans, ids = plans_of(pages.spec, code), np.array(pages.page_ids, dtype=np.int64)
    parts, bodies = [[], [], []], [[], [], []]
    tails = []
    for pool, plan in zip(map(matrices, pages.layer_pools()), plans, strict=True):
        dense = [np.full(size, 0xAB, dtype=np.uint8) for size in plan.fixed_bytes]
        elements = pool[:, ids].tobytes()
        part, tail = Part(plan, EXACT), [b"", b"", b""]
        if plan.raw:
            dense[ANCHOR] = np.frombuffer(elements, dtype=np.uint8)
        else:
            reference.encode_tensor(pool, ids, plan, dense[ANCHOR], dense[RESIDUAL])
            if num_stages > EXACT:
                part, dense[EXACT], tail = _exact(pool, ids, plan, dense, elements)
        for stage, each in enumerate((Part(plan, ANCHOR), Part(plan, RESIDUAL), part)):
            parts[stage].append(each)
            bodies[stage].append(bytes(dense[stage]))
        tails += tail
    payloads = []
    for stage in range(num_stages):
        header = Layout(stage, tuple(parts[stage]), code.id).header()
        pieces = (header, *bodies[stage], *(tails if stage == EXACT else ()))
        payloads.append(b"".join(piece.ljust(aligned(len(piece)), b"\0") for piece in pieces))
    return payloads


def _exact(pool, ids, plan, dense, elements):
    """EXACT's part, its fixed sections and what follows them."""
    refined = np.zeros((plan.num_layers, plan.num_pages, plan.rows, plan.columns), dtype=pool.dtype)
    reference.decode_tensor(dense[ANCHOR], dense[RESIDUAL], np.arange(plan.num_pages), plan, refined)
    stream, positions, escaped = reference.encode_exact(pool, ids, refined, dense[RESIDUAL], plan, dense[EXACT])
    if travels_raw(plan, stream.size // 4, positions.size):
        return Part(plan, EXACT, raw=True), np.frombuffer(elements, dtype=np.uint8), [b"", b"", b""]
    part = Part(plan, EXACT, words=stream.size // 4, escapes=positions.size)
    return part, dense[EXACT], [stream.tobytes(), positions.tobytes(), escaped.tobytes()]


def reference_decode(payloads, layouts, out):
    """Write the last of the stages into `out`; layouts: of all payloads."""
    ids, sources = np.array(out.page_ids, dtype=np.int64), [np.frombuffer(each, dtype=np.uint8) for each in payloads]
    assert HEADER_BYTES % 16 == 0
    source, layout = sources[-1], layouts[-1]
    starts = zip(range(2), layout.parts, layout.offsets, layout.streams, map(matrices, out.layer_pools()), strict=True)
    for tensor, part, start, stream, pool in starts:
        plan, dense = part.plan, source[start : start + part.fixed_bytes]
        if part.raw or (plan.raw and layout.stage == ANCHOR):
            shape = (plan.num_layers, plan.num_pages, plan.rows, plan.columns)
            pool[:, ids] = dense[: plan.raw_bytes].view(pool.dtype).reshape(shape)
        elif not plan.raw and layout.stage == EXACT:
            assert escapes_of(source[stream:], part)[0].size == part.escapes
            reference.decode_exact(dense, source[stream:], part, ids, pool)
        elif not plan.raw:
            anchors = sources[ANCHOR][layouts[ANCHOR].offsets[tensor] :]
            reference.decode_tensor(anchors, dense if layout.stage == RESIDUAL else None, ids, plan, pool)
