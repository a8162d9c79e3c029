"""A tile of rotated values keeps each token's error within bounds, in the stated bits, as the golden file says.

tests/fixed has what all lossy forms share: that kernels do what the reference does, and attention.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrail.engine.kv.closed.forms import page_bytes
from kvrail.engine.kv.fixed import form as fixed
from kvrail.engine.kv.fixed.form import REFUSED
from kvrail.engine.kv.rotated.form import LARGEST, ROTATED, Tile, channel_places, code_places, signs
from kvrail.values.layout import KVLayout
from tests.fixed.cases import tiles
from tests.lossless.cases import Bits, bits_of, distributions
from tests.reference.fixed_pages import widened
from tests.reference.rotated_pages import channels_of, close_tile, open_tile, scales_of

DIMS = (64, 128, 192)
GOLDEN = Path(__file__).parent / "golden.json"


def errors(values: Bits) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Of each token, in units of its channels: the norm of its error, and of what its channels' means leave."""
    dim = values.shape[1]
    data, refused = close_tile(values)
    assert not refused and len(data) == Tile(dim).bytes
    mean, unit = channels_of(data, dim)
    exact, found = (widened(each).astype(np.float64) for each in (values, open_tile(data, dim)))
    last = np.exp2(np.floor(np.log2(np.maximum(np.abs(found), 2.0**-126))) - 8)
    error = np.maximum(np.abs(found - exact) - last, 0) / unit
    return np.linalg.norm(error, axis=1), np.linalg.norm((exact - mean * unit) / unit, axis=1)


def check_bound(values: Bits) -> None:
    """No token's error is larger than what its channels' means leave of it, but for roundings of scale and Y."""
    error, norm = errors(values)
    assert (error <= norm * (1 + 2.0**-4) + np.sqrt(values.shape[1]) * 2.0**-6).all()


@pytest.mark.parametrize("dim", DIMS)
def test_error_is_within_the_bound(dim: int) -> None:
    for values in tiles((64, dim)).values():
        check_bound(values)


def test_the_bound_is_reached_by_rows_of_the_transform() -> None:
    """They are the worst: all but one rotated value is 0, for which there is no code."""
    values = bits_of(signs()[np.random.default_rng(4).permutation(64)].astype(np.float64))
    check_bound(values)
    error, norm = errors(values)
    assert (error / norm).max() > 0.9


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-30, 34), st.floats(-30, 34), st.integers(0, 3))
def test_error_with_any_width_and_any_middle(seed: int, width: float, middle: float, kind: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal((64, 64)) / 8
    drawn = (drawn, np.sign(drawn), drawn**5, np.cumsum(drawn, 1))[kind].clip(-1, 1)
    check_bound(bits_of(drawn * 2.0**width + rng.choice([-1, 0, 1]) * 2.0**middle))


@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("kind", ["normal", "even", "few are large"])
def test_error_of_usual_values_is_that_of_the_best_levels(dim: int, kind: str) -> None:
    """Of two bits and normally distributed values: Lloyd-Max has 0.118 of the variance; scales are fair, not least."""
    rng = np.random.default_rng(1)
    drawn = {
        "normal": rng.standard_normal((64, dim)),
        "even": rng.uniform(-1, 1, (64, dim)),
        "few are large": rng.standard_normal((64, dim)) ** 3,
    }[kind]
    error, norm = errors(bits_of(drawn * np.exp2(rng.integers(-3, 3, dim)) + rng.integers(-3, 4, dim)))
    assert 0.11 < (error**2).sum() / (norm**2).sum() < 0.16


def test_large_channels_cost_no_more() -> None:
    """A power of two for a channel multiplies what is opened, bit for bit, while channels are within 2^7."""
    values = widened(tiles((64, 128))["normal"]).astype(np.float64)
    factor = np.where(np.arange(128) % 16 == 5, 16.0, 1.0)
    plain, wide = (open_tile(close_tile(bits_of(each))[0], 128) for each in (values, values * factor))
    assert np.array_equal(bits_of(widened(plain).astype(np.float64) * factor), wide)


def test_means_are_fair() -> None:
    """Over many tokens errors cancel: sums are those of exact values, far within one token's error."""
    values = bits_of(np.random.default_rng(2).standard_normal((512, 64, 64)))
    found = np.stack([widened(open_tile(close_tile(tile)[0], 64)) for tile in values]).astype(np.float64)
    exact = widened(values).astype(np.float64)
    slope = (found * exact).sum() / (exact * exact).sum()
    assert abs(slope - 1) < 0.01


def test_the_transform_is_hadamards_and_leaves_no_usual_row_alike() -> None:
    matrix = signs()
    assert np.array_equal(matrix @ matrix.T, 64 * np.eye(64)) and set(matrix.ravel()) == {1, -1}
    hadamard = np.array([[1]])
    for _ in range(6):
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    assert np.array_equal(matrix * matrix[0], hadamard)
    assert (np.abs(matrix @ hadamard) == 8).all()  # rows of the transform itself become flat


def test_opened_by_the_formula() -> None:
    """Each value by itself, from its bits, as form.py has it."""
    values = bits_of(np.random.default_rng(3).standard_normal((64, 128)) * 3 + 1)
    data = close_tile(values)[0]
    found, scales = widened(open_tile(data, 128)), scales_of(data, 128)
    words = data[:2048].view(np.uint32).reshape(4, 32, 2, 2)
    exponent = sum((int(data[2048 + 128 + bit]) >> 7) << bit for bit in range(8)) - 61
    for token, channel in ((0, 0), (5, 77), (63, 127), (40, 64), (17, 3)):
        block, total = channel // 64, 0
        for j in range(64):
            lane = 4 * (token % 8) + j // 2 % 4
            word = int(words[token // 16, lane, block, token // 8 % 2])
            code = word >> 16 * (j % 2) + 4 * (j // 16) + 2 * (j // 8 % 2) & 3
            parity = bin(channel % 64 & (j ^ (channel % 64 >> 1 & 21))).count("1") % 2
            total += (2 * code - 3) * (1 - 2 * parity)
        byte = int(data[2048 + channel // 2 % 4 * 32 + channel // 16 * 4 + channel % 2 * 2 + channel // 8 % 2])
        mean = ((byte & 31) ^ 16) - 16
        exact = (total * scales[token] * 2.0**-13 + mean / 2) * 2.0 ** (exponent - (byte >> 5))
        assert torch.tensor(exact).bfloat16().item() == found[token, channel]


def test_sums_are_exact() -> None:
    """In float32, whatever the order: what is closed, and what is opened with all that stands beside it."""
    assert 64 * LARGEST < 2**24 and 64 * (128 + 3) < 2**24
    for exponent in range(-2, 14):  # of a scale, which has three bits behind its first one
        assert (192 * 2.0 ** (exponent + 1) + 15 * 2**12) / 2.0 ** (exponent - 3) < 2**24


@pytest.mark.parametrize("odd", [0x7F80, 0xFF80, 0x7FC1, 0xFFFF, REFUSED, REFUSED | 0x8000])
def test_what_is_not_finite_or_too_large_is_refused(odd: int) -> None:
    values = distributions((64, 64))["normal"]
    values[17, 5] = odd
    data, refused = close_tile(values)
    assert refused and (data[Tile(64).scales :] == 255).all()
    assert np.isnan(widened(open_tile(data, 64))).all()
    values[17, 5] = REFUSED - 1
    data, refused = close_tile(values)
    assert not refused and np.isfinite(widened(open_tile(data, 64))).all()


def test_no_tile_looks_refused() -> None:
    """The largest scale that closing finds is below the one that says so."""
    spikes = np.zeros((64, 64))
    spikes[0] = 1
    for scale in (2.0**35, 1.0, 2.0**-60):
        data, refused = close_tile(bits_of(spikes * scale))
        assert not refused and (data[Tile(64).scales :] & 127).max() < 127


def test_sizes() -> None:
    for dim, bits in ((64, 3.375), (128, 3.34375)):
        layout = KVLayout(36, 8, dim, dim, 64, "bfloat16")
        assert 16 * page_bytes(layout, ROTATED) / layout.page_bytes == bits
    for dim in range(64, 513, 64):
        assert Tile(dim).bytes % 64 == 0 and np.array_equal(np.sort(code_places(dim)), np.arange(64 * dim))
        assert np.array_equal(np.sort(channel_places(dim)), np.arange(dim))
        assert Tile(dim).mark != fixed.Tile(dim, False, 4).mark


def golden() -> dict[str, str]:
    """The digest of each distribution's closed tile."""
    return {
        f"{name}, {dim}": hashlib.sha256(close_tile(values)[0].tobytes()).hexdigest()
        for dim in (64, 128)
        for name, values in {**distributions((64, dim), 7), **tiles((64, dim), 7)}.items()
    }


def test_golden_file() -> None:
    """`python -m tests.rotated.test_form` writes it."""
    assert golden() == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(), indent=0) + "\n")
