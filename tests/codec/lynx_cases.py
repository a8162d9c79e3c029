"""What Lynx's backends are tested with: pages of several kinds, and the reference's payloads and pages."""

from dataclasses import replace

import numpy as np
import torch
from kv_blocks import random_block, scattered

from kvrail.codec.base import Block
from kvrail.codec.papers.lynx.payload import (
    plans_of,
)
from kvrail.codec.papers.lynx.plan import Coding
from tests.reference import lynx as reference

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
    return [
        bytes(payload) for payload in reference.encode(pages, Coding(plans_of(pages.spec, code), num_stages)).stages()
    ]


def reference_decode(payloads, layouts, out):
    """Write the last of the stages into `out`; layouts: of all payloads."""
    sources, stage = [np.frombuffer(each, dtype=np.uint8) for each in payloads], layouts[-1].parts[0].stage
    coding = Coding(tuple(part.plan for part in layouts[-1].parts), stage + 1)
    reference.decode(stage, sources, layouts, coding, out)
