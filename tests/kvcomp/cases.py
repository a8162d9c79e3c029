"""Tiles on both sides of what decides the codes of a pair."""

from types import ModuleType

import numpy as np

from kvrail.engine.kv.kvcomp.form import CODED, Pair
from tests.fixed.cases import check_pools
from tests.lossless.cases import Bits, bits_of, pages_of
from tests.reference.kvcomp_pages import close_pair, code_of


def mixed(dim: int, share: float, seed: int) -> Bits:
    """Bits of bfloat16 [64, dim], normally distributed but for a share that is evenly distributed.

    The more are, the longer their codes.
    """
    rng = np.random.default_rng(seed)
    even = rng.uniform(-2.2, 2.2, (64, dim))
    return bits_of(np.where(rng.random((64, dim)) < share, even, rng.standard_normal((64, dim))))


def check_both_sides(kernels: ModuleType, device: str, tiles: int) -> None:
    """Kernels choose the codes that the reference chooses, for pairs of which few have units to spare, or lack some."""
    dims = (64, 64)
    shares = np.linspace(0.15, 0.85, tiles)
    every = [
        [mixed(dim, share, 2 * number + kind) for number, share in enumerate(shares)] for kind, dim in enumerate(dims)
    ]
    found = []
    for keys, values in zip(*every, strict=True):
        data, _ = close_pair(keys, values)
        found.append(
            [code_of(data, Pair(*dims).parts[0]), code_of(data[Pair(*dims).parts[0].bytes :], Pair(*dims).parts[1])]
        )
    assert [0, 0] in found and [1, 0] in found and [1, 1] in found
    pools = [
        pages_of(np.stack(each)).view(1, tiles // 2, 2, 64, dim).transpose(2, 3)
        for each, dim in zip(every, dims, strict=True)
    ]
    refused = check_pools(*(pool.contiguous().to(device) for pool in pools), CODED, kernels)
    assert not refused.any()
