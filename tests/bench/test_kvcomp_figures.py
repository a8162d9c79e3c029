"""Sizes and ratios of benchmarks/kvcomp_figures.py, against payloads and bits that are counted."""

import math

import numpy as np
import pytest
import torch

from benchmarks.kvcomp_figures import Coded, Kivi, at_same_kl, ratio, width_for
from kvrail.codec.base import Block, PagedBlock
from kvrail.codec.core.sections import HEADER_BYTES
from kvrail.codec.papers.kvcomp.format import Granularity, KVCompCode, TensorCode
from kvrail.tools.quality.measure import Figures
from tests.reference import kvcomp as reference

LAYERS, PAGES, HEADS, DIM = 2, 3, 2, 32


def pages():
    generator = torch.Generator().manual_seed(0)
    scales = torch.randn(2, HEADS, DIM, generator=generator).exp()
    drawn = torch.randn(2, LAYERS, PAGES, 64, HEADS, DIM, generator=generator)
    return PagedBlock.whole(Block(*((each * by + by).bfloat16() for each, by in zip(drawn, scales, strict=True))))


@pytest.mark.parametrize("granularity", [Granularity.BLOCK, Granularity.CHANNEL])
@pytest.mark.parametrize(("keys", "values"), [(0.05, 0.15), (0.25, 0.4)])
def test_sizes_of_both_operands_are_all_bytes_of_a_payload(granularity, keys, values):
    code = KVCompCode(TensorCode(granularity, keys), TensorCode(Granularity.TOKEN, values))
    paged = pages()
    payload = reference.encode(paged.pools, code)
    bits = sum(Coded(name, getattr(code, name)).bits(paged) for name in ("keys", "values"))
    assert HEADER_BYTES + bits * paged.pools.keys.numel() / 8 == len(payload)


@pytest.mark.parametrize("operand", ["keys", "values"])
def test_the_other_operand_stays(operand):
    paged, exact = pages(), pages().pools
    other = "values" if operand == "keys" else "keys"
    for form in (Coded(operand, TensorCode(Granularity.TOKEN, 0.1)), Kivi(operand, 2)):
        form.pass_through(paged)
        assert torch.equal(getattr(paged.pools, other), getattr(exact, other))
        assert not torch.equal(getattr(paged.pools, operand), getattr(exact, operand))


def test_a_fixed_width_holds_the_symbols_of_a_range():
    for scale in (0.03, 0.05, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4):
        symbols = np.unique(np.rint(np.linspace(0, 1, 10001) / scale)).size
        assert 2 ** (width_for(scale) - 1) < symbols <= 2 ** width_for(scale)
    assert width_for(0.12) == 4
    token = Coded("values", TensorCode(Granularity.TOKEN, 0.12)).fixed_bits(pages())
    assert token == 4 + 32 / (HEADS * DIM)  # minimum and scale of 16 bits for all heads of a token


@pytest.mark.parametrize(("operand", "axis"), [("keys", 0), ("values", 2)])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_kivis_groups_have_their_symbols_and_their_size(operand, axis, width):
    paged = pages()
    exact = getattr(paged.pools, operand).clone()
    bits = Kivi(operand, width).pass_through(paged)
    found, counted = getattr(paged.pools, operand), 0
    for layer, page in np.ndindex(LAYERS, PAGES):
        groups = (np.moveaxis(each[layer, page].float().numpy(), axis, -1).reshape(-1, 32) for each in (exact, found))
        for before, after in zip(*groups, strict=True):
            low, step = before.min(), (before.max() - before.min()) / (2**width - 1)
            symbols = np.rint((after - low) / step)
            packed = np.packbits((symbols.astype(np.uint8)[:, None] >> np.arange(width)) & 1)
            counted += packed.nbytes + np.float16(low).nbytes + np.float16(step).nbytes
            assert symbols.min() >= 0 and symbols.max() <= 2**width - 1
            # Half a step, and roundings: of the step and minimum to float16, of the value to bfloat16.
            assert np.abs(after - before).max() <= step / 2 + 2**-7 * np.abs(before).max()
    assert bits * exact.numel() == 8 * counted


def test_a_ratio_at_the_same_kl_lies_on_the_sweeps_line():
    rows = [Figures("", bits, 0, 0, 0, kl) for bits, kl in ((4.0, 1e-3), (3.0, 1e-2), (2.0, 1e-1))]
    assert at_same_kl(rows, 1e-2) == ratio(3.0) == 16 / 3
    assert at_same_kl(rows, math.sqrt(1e-3 * 1e-2)) == pytest.approx(16 / 3.5)
    assert math.isnan(at_same_kl(rows, 1e-4)) and math.isnan(at_same_kl(rows, 1.0))
