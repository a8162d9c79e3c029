"""Pages of fixed width against the reference, and attention problems whose full pages are closed."""

from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from kvrail.engine.kv.closed.pages import LossyPages
from kvrail.engine.kv.fixed.form import REFUSED, Tile
from kvrail.engine.kv.kvcomp.form import CODED
from kvrail.engine.kv.rotated.form import KEY_BITS, ROTATED
from kvrail.values.layout import KVLayout
from tests.lossless.cases import Bits, distributions, few_pages, pages_of, pools
from tests.reference import rotated_pages as rotated
from tests.reference.fixed_pages import close_tile, open_tile
from tests.reference.kvcomp_pages import close_pair, open_pair

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


def close(keys: Bits, values: Bits, bits: int) -> tuple[npt.NDArray[np.uint8], int]:
    """A pair of tiles, bits of bfloat16 [64, dim], closed by the reference, and how many of both were refused."""
    if bits == CODED:
        return close_pair(keys, values)
    key, odd_key = close_tile(keys, True, KEY_BITS if bits == ROTATED else bits)
    value, odd_value = rotated.close_tile(values) if bits == ROTATED else close_tile(values, False, bits)
    return np.concatenate([key, value]), odd_key + odd_value


def opened(data: npt.NDArray[np.uint8], dims: tuple[int, int], bits: int) -> tuple[Bits, Bits]:
    """The reverse."""
    if bits == CODED:
        return open_pair(data, *dims)
    of_keys = KEY_BITS if bits == ROTATED else bits
    key, value = np.split(data, [Tile(dims[0], True, of_keys).bytes])
    found = rotated.open_tile(value, dims[1]) if bits == ROTATED else open_tile(value, dims[1], False, bits)
    return open_tile(key, dims[0], True, of_keys), found


def check_kernels(
    dims: tuple[int, int], page_size: int, bits: int, device: str, kernels: ModuleType, *, few: bool = False
) -> None:
    """Close pages of all distributions with `kernels`; each tile is the reference's, opened and closed.

    few: each distribution in one head of one layer.
    """
    layers, heads = 2, 2 if few else 3
    if few:
        every = ({**tiles((page_size, dim), 3), **distributions((page_size, dim), 3)} for dim in dims)
        keys, values = (few_pages(each, layers, heads) for each in every)
    else:
        both = pools(page_size, dims, layers, heads)
        extra = [
            pages_of(np.stack([np.stack(list(tiles((page_size, heads, dim), 3).values()))] * layers)) for dim in dims
        ]
        keys, values = (torch.cat(pair, 1).to(device) for pair in zip(both, extra, strict=True))
    refused = check_pools(keys, values, bits, kernels)
    assert (refused > 0).any() and (refused == 0).sum() >= (2 if few else 10)


def check_pools(keys: torch.Tensor, values: torch.Tensor, bits: int, kernels: ModuleType) -> npt.NDArray[np.int64]:
    """Close all plain pages with `kernels`, compare each tile with the reference's, opened and closed.

    keys, values: bfloat16 [layers, pages, page_size, heads, dim]. Returns how many tiles of each page were refused.
    """
    layers, number, page_size, heads = keys.shape[:4]
    dims, device = (keys.shape[4], values.shape[4]), keys.device
    closed = LossyPages(KVLayout(layers, heads, *dims, page_size, "bfloat16"), number + 2, bits, device)
    closed.pages.fill_(0xFF)
    sources = torch.arange(number, device=device)
    targets = torch.randperm(number + 2, generator=torch.Generator().manual_seed(0))[:number].to(device)
    closed._kernels = lambda: kernels
    failed = closed.close(keys, values, sources, targets)
    out = [torch.full_like(pool, 7.0) for pool in (keys, values)]
    closed.open(*out, targets, sources)
    refused = np.zeros(number, np.int64)
    for layer, page, head, block in np.ndindex(layers, number, heads, page_size // 64):
        pair = closed.pages[layer, targets[page], head, block].cpu().numpy()
        tokens = slice(block * 64, (block + 1) * 64)
        *plain, found_keys, found_values = (
            each[layer, page, tokens, head].contiguous().cpu().view(torch.int16).numpy().view(np.uint16)
            for each in (keys, values, *out)
        )
        wanted, bad = close(*plain, bits)
        refused[page] += bad
        assert np.array_equal(pair, wanted)
        for source, found, values_of in zip(plain, (found_keys, found_values), opened(pair, dims, bits), strict=True):
            if ((source & 0x7FFF) >= REFUSED).any():
                assert ((found & 0x7FFF) > 0x7F80).all()  # NaN
            else:
                assert np.array_equal(found, values_of)
    assert failed.tolist() == refused.tolist()
    return refused
