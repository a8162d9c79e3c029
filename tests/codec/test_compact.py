"""Compact weights, value by value: every weight comes back with all its bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrail.codec.compact.format import CompactWeight
from kvrail.codec.compact.torch_ops import compress
from tests.reference.compact import unpack


def bits(weight):
    return weight.view(torch.int16)


def normal(rows, columns, scale=0.02, seed=0):
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale).to(torch.bfloat16)


def of_bits(values, columns):
    return torch.tensor(values, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, columns)


def comes_back(weight):
    compact = compress(weight)
    assert torch.equal(bits(unpack(compact)), bits(weight))
    return compact


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (48, 64), (16, 192), (64, 320)])
def test_a_weight_comes_back(rows, columns):
    comes_back(normal(rows, columns))


def test_every_pattern_of_sixteen_bits_comes_back():
    comes_back(of_bits(range(-(1 << 15), 1 << 15), 512))


def test_rows_of_very_different_sizes_come_back():
    sizes = torch.logspace(-37, 37, 32)[:, None]
    comes_back((normal(32, 128, 1.0).float() * sizes).to(torch.bfloat16))


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), float("nan"), 1e-40, 1.0])
def test_a_weight_of_one_value_comes_back(value):
    comes_back(torch.full((16, 64), value, dtype=torch.bfloat16))


@settings(max_examples=25)
@given(st.data())
def test_whatever_lies_in_a_row_comes_back(data):
    weight = normal(16, 64)
    for _ in range(data.draw(st.integers(1, 40))):
        row, column = data.draw(st.integers(0, 15)), data.draw(st.integers(0, 63))
        bits(weight)[row, column] = data.draw(st.integers(-(1 << 15), (1 << 15) - 1))
    comes_back(weight)


def test_normally_distributed_weights_take_less_than_72_percent():
    weight = normal(512, 1024)
    compact = compress(weight)
    assert compact.nbytes < 0.72 * weight.nbytes
    records = int((compact.counts & 0xFFFF).sum()) / weight.numel()
    assert 0.008 < records < 0.017  # by the normal distribution: 1.2 % of the best window's exponents, 1.7 % at worst


def test_scales_shift_by_the_rows_exponents():
    compact = compress(torch.full((16, 64), 2.0**-40, dtype=torch.bfloat16))
    assert set(compact.scales.tolist()) == {2.0 ** int(compact.shifts[0])}
    assert 120 <= 127 - 40 - int(compact.shifts[0]) <= 127


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (torch.zeros(16, 64), r"float32 \[16, 64\], not bfloat16"),
        (torch.zeros(16, 64, 1, dtype=torch.bfloat16), r"bfloat16 \[16, 64, 1\], not bfloat16 \[rows, columns\]"),
        (torch.zeros(24, 64, dtype=torch.bfloat16), r"shape \[24, 64\] is no multiple of \[16, 64\]"),
        (torch.zeros(16, 96, dtype=torch.bfloat16), r"shape \[16, 96\] is no multiple of \[16, 64\]"),
        (torch.zeros(0, 64, dtype=torch.bfloat16), r"shape \[0, 64\] is no multiple"),
    ],
)
def test_other_weights_are_refused(weight, why):
    with pytest.raises(ValueError, match=why):
        compress(weight)


def test_a_damaged_record_is_seen_by_these_tests():
    weight = normal(16, 64)
    compact = compress(weight)
    blocks = compact.blocks.clone()
    blocks[1408] ^= 1
    changed = CompactWeight(16, 64, blocks, compact.index, compact.counts, compact.shifts, compact.scales)
    assert not torch.equal(bits(unpack(changed)), bits(weight))
