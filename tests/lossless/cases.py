"""Tiles of odd distributions, and attention problems whose full pages are closed."""

import copy
import random
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kvrail.engine.kv.lossless.form import SPECIAL
from kvrail.engine.kv.lossless.pages import ClosedLayer, ClosedPages
from kvrail.values.layout import KVLayout
from tests.engine.attention_cases import Case, poison

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


def close_case(case: Case, pages: int | None = None, seed: int = 0) -> tuple[Case, ClosedLayer, torch.Tensor]:
    """The same problem with full pages before the new tokens closed: (case, closed pages, closed tokens a sequence).

    pages: how many of each sequence at most; None: a random number. Closed pages' plain copies hold NaN, and so does
    what is closed and belongs to no sequence.
    """
    rng = random.Random(seed)
    device, plain = case.query.device, case.pages
    page_size = plain.keys.shape[1]
    full = [(total - new) // page_size for new, total in case.plan]
    taken = [rng.randint(0, most) if pages is None else min(most, pages) for most in full]
    shape = (1, *plain.keys.shape[2:], plain.values.shape[3], page_size)
    layout = KVLayout(*shape, str(plain.keys.dtype).removeprefix("torch."))
    count = sum(taken) + 3
    closed = ClosedPages(layout, count, 16 * count, device)
    closed.pages.fill_(0xFF)
    targets = list(range(count))
    rng.shuffle(targets)
    tables, sources = case.page_tables.clone(), []
    for row, number in enumerate(taken):
        sources += case.page_tables[row, :number].tolist()
        tables[row, :number] = torch.tensor(targets[len(sources) - number : len(sources)])
    closed.pages[:, targets] = 0
    moved = (torch.tensor(ids, dtype=torch.int64, device=device) for ids in (sources, targets[: len(sources)]))
    before = copy.deepcopy(plain)
    failed = closed.close(plain.keys[None], plain.values[None], *moved)
    assert failed.item() == 0
    poison(plain)
    used = {page for row in case.page_tables.tolist() for page in row} - set(sources)
    for page in used:
        plain.keys[page], plain.values[page] = before.keys[page], before.values[page]
    tokens = torch.tensor([number * page_size for number in taken], device=device)
    return replace(case, page_tables=tables), closed.layer(0), tokens
