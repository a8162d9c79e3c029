"""Blocks for codec tests: random bits, so that NaNs with payloads, infinities and subnormals are among them."""

from dataclasses import replace

import torch

from kvrail.codec.base import Block, BlockSpec, PagedBlock
from kvrail.codec.core.floats import FLOATS

SHAPES = [  # layers, pages, page_size, kv_heads, key_dim, value_dim
    (1, 1, 1, 1, 1, 1),
    (1, 1, 64, 8, 128, 128),
    (2, 3, 16, 2, 64, 64),
    (3, 1, 7, 3, 5, 9),
    (1, 5, 63, 1, 33, 31),
    (2, 2, 500, 1, 3, 2),
]


def spec_of(shape, dtype):
    return BlockSpec(dtype, *shape, scaled=FLOATS[dtype].item_bytes == 1)


def _random(shape, dtype, generator, device):
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return bits.to(device).view(dtype)


def random_block(spec, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    lead = (spec.num_layers, spec.num_pages, spec.page_size, spec.num_kv_heads)
    dtype = getattr(torch, spec.dtype)
    keys = _random((*lead, spec.key_dim), dtype, generator, device)
    values = _random((*lead, spec.value_dim), dtype, generator, device)
    if not spec.scaled:
        return Block(keys, values)
    scales = [_random(lead, torch.float32, generator, device) for _ in range(2)]
    return Block(keys, values, *scales)


def scattered(spec, seed=0, device="cpu"):
    """Pages of `spec` in a larger pool of random bits: scattered page ids, and layers before and after."""
    pool_pages = 2 * spec.num_pages + 3
    pool = random_block(replace(spec, num_layers=spec.num_layers + 2, num_pages=pool_pages), seed, device)
    order = torch.randperm(pool_pages, generator=torch.Generator().manual_seed(seed))
    return PagedBlock(pool, range(1, 1 + spec.num_layers), order[: spec.num_pages].tolist())


def copy_of(pages):
    """The same pages of a copy of the pool."""
    return replace(pages, pools=Block(*(tensor.clone() for tensor in pages.pools.tensors())))


def bits_of(block):
    """All bits of a block: the only equality that NaNs allow."""
    return b"".join(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes() for tensor in block.tensors())


def decode_stages(codec, payloads, out):
    """Decode every stage in its turn."""
    for stage in range(len(payloads)):
        codec.decode(stage, payloads[: stage + 1], out)
