"""Pages of fixed width against the reference, and attention problems whose full pages are closed."""

from types import ModuleType

import numpy as np
import torch

from kvrail.engine.kv.fixed.form import NO_SCALE, Tile
from kvrail.engine.kv.fixed.pages import FixedPages
from kvrail.engine.kv.fixed.reference import close_tile, open_tile
from kvrail.values.layout import KVLayout
from tests.lossless.cases import Bits, distributions, few_pages, pages_of, pools

FINITE = ("normal", "escapes", "far escapes", "zeros of both signs", "subnormal", "all alike")
"""Distributions whose tiles have this form."""


def tiles(shape: tuple[int, ...], seed: int = 0) -> dict[str, Bits]:
    """Finite distributions, and some whose rows lie far from 0."""
    rng = np.random.default_rng(seed)
    found = distributions(shape, seed)
    far = torch.from_numpy(rng.standard_normal(shape) + 1000.0 * rng.integers(-3, 4, shape[-1]))
    tiny = torch.from_numpy(rng.standard_normal(shape) * 2.0**-120)
    wide = torch.from_numpy(rng.standard_normal(shape) * 2.0 ** rng.integers(-60, 33, shape[-1]))
    more = {"channels of all sizes": wide, "far from 0": far, "tiny": tiny, "one value": torch.full(shape, -3.140625)}
    return {
        **{name: found[name] for name in FINITE},
        **{name: each.bfloat16().view(torch.int16).numpy().view(np.uint16) for name, each in more.items()},
    }


def check_kernels(
    dims: tuple[int, int], page_size: int, bits: int, device: str, kernels: ModuleType, *, few: bool = False
) -> None:
    """Close pages of all distributions with `kernels`; each tile is the reference's, opened and closed.

    few: each distribution in one head of one layer.
    """
    layers, heads = 2, 2 if few else 3
    if few:
        every = [[make((page_size, dim), 3) for make in (distributions, tiles)] for dim in dims]
        keys, values = (torch.cat([few_pages(each, layers, heads) for each in both], 1) for both in every)
    else:
        both = pools(page_size, dims, layers, heads)
        extra = [
            pages_of(np.stack([np.stack(list(tiles((page_size, heads, dim), 3).values()))] * layers)) for dim in dims
        ]
        keys, values = (torch.cat(pair, 1).to(device) for pair in zip(both, extra, strict=True))
    number = keys.shape[1]
    closed = FixedPages(KVLayout(layers, heads, *dims, page_size, "bfloat16"), number + 2, bits, device)
    closed.pages.fill_(0xFF)
    sources = torch.arange(number, device=device)
    targets = torch.randperm(number + 2, generator=torch.Generator().manual_seed(0))[:number].to(device)
    closed._kernels = lambda: kernels
    failed = closed.close(keys, values, sources, targets)
    opened = [torch.full_like(pool, 7.0) for pool in (keys, values)]
    closed.open(*opened, targets, sources)
    refused = np.zeros(number, np.int64)
    for layer, page, head, block in np.ndindex(layers, number, heads, page_size // 64):
        pair = closed.pages[layer, targets[page], head, block].cpu().numpy()
        tokens = slice(block * 64, (block + 1) * 64)
        for pool, out, tile in zip(
            (keys, values), opened, np.split(pair, [Tile(dims[0], True, bits).bytes]), strict=True
        ):
            source, found = (
                each[layer, page, tokens, head].contiguous().cpu().view(torch.int16).numpy().view(np.uint16)
                for each in (pool, out)
            )
            wanted, bad = close_tile(source, pool is keys, bits)
            refused[page] += bad
            assert np.array_equal(tile, wanted)
            if bad:
                assert ((found & 0x7FFF) > 0x7F80).all()  # NaN
            else:
                assert np.array_equal(found, open_tile(tile, source.shape[1], pool is keys, bits))
    assert failed.tolist() == refused.tolist() and (refused > 0).any() and (refused == 0).sum() >= (3 if few else 10)
    assert NO_SCALE & 0x7FFF > 0x7F80
