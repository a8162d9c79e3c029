"""Tiles of odd distributions, and attention problems whose full pages are closed."""

import copy
import random
from dataclasses import replace
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from kvrail.engine.kv.closed.pages import LosslessPages, LossyPages
from kvrail.engine.kv.formats import LayerPages
from kvrail.engine.kv.lossless.form import SPECIAL, TOKENS, Tile
from kvrail.values.layout import KVLayout
from tests.engine.attention_cases import Case, poison
from tests.reference.lossless_pages import close_tile

Bits = npt.NDArray[np.uint16]


def bits_of(values: npt.NDArray[np.floating]) -> Bits:
    """Of values rounded to bfloat16."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, np.float32)).bfloat16()
    return tensor.view(torch.int16).numpy().view(np.uint16)


def distributions(shape: tuple[int, ...], seed: int = 0) -> dict[str, Bits]:
    """Bits of bfloat16 in arrays of `shape`, whose last axis is the channels."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(shape)
    bits = bits_of(normal)

    def some(share: float, odd: npt.NDArray[np.integer]) -> Bits:
        return np.where(rng.random(shape) < share, odd, bits).astype(np.uint16)

    return {
        "normal": bits,
        "outlier channels": bits_of(normal * 2.0 ** rng.integers(-100, 100, shape[-1])),
        "escapes": bits_of(normal * np.where(rng.random(shape) < 3e-4, 2.0**-40, 1.0)),
        "far escapes": bits_of(normal * np.where(rng.random(shape) < 3e-4, 2.0**30, 1.0)),
        "infinities": some(3e-4, rng.choice(np.array([0x7F80, 0xFF80]), shape)),
        "payloads of NaN": some(3e-4, rng.integers(0x7F81, 0x8000, shape) | rng.integers(0, 2, shape) << 15),
        "zeros of both signs": some(3e-4, rng.integers(0, 2, shape) << 15),
        "subnormal": (rng.integers(0, 128, shape) | rng.integers(0, 2, shape) << 15).astype(np.uint16),
        "all alike": np.full(shape, 0x3FC0, np.uint16),
        "all NaN": np.full(shape, SPECIAL << 8 | 0xFF, np.uint16),
        "random": rng.integers(0, 65536, shape).astype(np.uint16),
        "rising": (np.arange(np.prod(shape)) * 8 % 65536).reshape(shape).astype(np.uint16),
    }


def pages_of(bits: Bits) -> torch.Tensor:
    """Bits as bfloat16."""
    return torch.from_numpy(bits.copy().view(np.int16)).view(torch.bfloat16)


def close_case(
    case: Case, pages: int | None = None, seed: int = 0, code_bits: int = 0, opened: LayerPages | None = None
) -> tuple[Case, torch.Tensor]:
    """The same problem with full pages before the new tokens closed: (case, closed tokens a sequence).

    pages: how many of each sequence at most; None: a random number. code_bits: 0: lossless pages; otherwise pages of
    that lossy form, which are opened into `opened`, and the first of each sequence stays open. Closed pages' plain
    copies hold NaN, and so does what is closed and belongs to no sequence.
    """
    rng = random.Random(seed)
    device, plain = case.query.device, case.pages
    page_size = plain.keys.shape[1]
    lead = 1 if code_bits else 0
    full = [max(0, (total - new) // page_size - lead) for new, total in case.plan]
    taken = [rng.randint(0, most) if pages is None else min(most, pages) for most in full]
    shape = (1, *plain.keys.shape[2:], plain.values.shape[3], page_size)
    layout = KVLayout(*shape, str(plain.keys.dtype).removeprefix("torch."))
    count = sum(taken) + 3
    closed = (
        LossyPages(layout, count, code_bits, device) if code_bits else LosslessPages(layout, count, 16 * count, device)
    )
    closed.pages.fill_(0xFF)
    targets = list(range(count))
    rng.shuffle(targets)
    tables, sources = case.page_tables.clone(), []
    for row, number in enumerate(taken):
        sources += case.page_tables[row, lead : lead + number].tolist()
        tables[row, lead : lead + number] = torch.tensor(targets[len(sources) - number : len(sources)])
    moved = [torch.tensor(ids, dtype=torch.int64, device=device) for ids in (sources, targets[: len(sources)])]
    before = copy.deepcopy(plain)
    failed = closed.close(plain.keys[None], plain.values[None], *moved)
    assert not failed.any()
    if opened is not None:
        closed.open(opened.keys[None], opened.values[None], *moved[::-1])
    poison(plain)
    used = {page for row in case.page_tables.tolist() for page in row} - set(sources)
    for page in used:
        plain.keys[page], plain.values[page] = before.keys[page], before.values[page]
    tokens = torch.tensor([(lead + number) * page_size if number else 0 for number in taken], device=device)
    return replace(case, page_tables=tables, pages=replace(plain, closed=closed.layer(0))), tokens


SHAPES = [((64, 64), 64), ((128, 128), 128), ((192, 128), 64)]
"""Widths of keys and of values, and tokens of a page."""


def pools(page_size: int, dims: tuple[int, int], layers: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain pages [layers, pages, page_size, heads, dim] of keys and values, a page of each distribution."""
    found = []
    for seed, dim in enumerate(dims):
        pages = np.stack(list(distributions((page_size, heads, dim), seed).values()))
        found.append(pages_of(np.stack([pages] * layers)))
    return found[0], found[1]


def few_pages(each: dict[str, Bits], layers: int, heads: int) -> torch.Tensor:
    """Plain pages [layers, pages, page_size, heads, dim], a head of one layer of each distribution [page_size, dim].

    Where these fill no whole number of pages, the first ones come again.
    """
    found = list(each.values())
    found += found[: -len(found) % (layers * heads)]
    bits = np.stack(found).reshape(-1, layers, heads, *found[0].shape)
    return pages_of(bits.transpose(1, 0, 3, 2, 4))


def check_kernels(
    dims: tuple[int, int], page_size: int, device: str, kernels: ModuleType, *, few: bool = False
) -> None:
    """Close pages of all distributions with `kernels`, compare each tile with the reference's, and open them.

    few: each distribution in one head of one layer.
    """
    layers, heads = 2, 2 if few else 3
    if few:
        each = [distributions((page_size, dim), seed) for seed, dim in enumerate(dims)]
        keys, values = (few_pages(tiles, layers, heads) for tiles in each)
    else:
        keys, values = (pool.to(device) for pool in pools(page_size, dims, layers, heads))
    number = keys.shape[1]
    closed = LosslessPages(KVLayout(layers, heads, *dims, page_size, "bfloat16"), number + 2, 1000, device)
    closed.pages.fill_(0xFF)
    sources = torch.arange(number, device=device)
    targets = torch.randperm(number + 2, generator=torch.Generator().manual_seed(0))[:number].to(device)
    closed._kernels = lambda: kernels
    assert closed.close(keys, values, sources, targets).sum() == 0
    units = set()
    for layer, page, head, block in np.ndindex(layers, number, heads, page_size // TOKENS):
        pair = closed.pages[layer, targets[page], head, block].cpu().numpy()
        tokens = slice(block * TOKENS, (block + 1) * TOKENS)
        for pool, tile in zip((keys, values), np.split(pair, [Tile(dims[0]).bytes]), strict=True):
            bits = pool[layer, page, tokens, head].contiguous().cpu().view(torch.int16).numpy().view(np.uint16)
            unit = int(tile[-4:].view(np.uint32)[0])
            wanted, spare = close_tile(bits, pool is keys, unit)
            assert np.array_equal(tile, wanted)
            if spare is not None:
                units.add(unit)
                assert np.array_equal(closed.shared[unit, : len(spare)].cpu().numpy(), spare)
    assert len(units) == 1000 - closed.free[0] > 0
    opened = [torch.full_like(pool, float("nan")) for pool in (keys, values)]
    closed.open(*opened, targets, sources)
    for ours, theirs in zip(opened, (keys, values), strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    closed.give_back(targets)
    assert closed.free[0] == 1000 and sorted(closed.free[1:-1].tolist()) == list(range(1000))
