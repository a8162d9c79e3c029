"""A page of int8 or int4 keeps each value within half a step, in the stated bits, and lies as the golden file says."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrail.engine.kv.closed import cpu
from kvrail.engine.kv.closed.forms import CODE_BITS, page_bytes, unsupported
from kvrail.engine.kv.closed.pages import LossyPages
from kvrail.engine.kv.fixed.form import NO_SCALE, REFUSED, WIDTHS, Tile, code_places
from kvrail.engine.kv.kvcomp.form import CODED
from kvrail.errors import ConfigError
from kvrail.values.layout import KVLayout
from tests.fixed.cases import check_kernels, tiles
from tests.lossless.cases import SHAPES, Bits, bits_of, distributions
from tests.reference.fixed_pages import close_tile, open_tile, rounded, steps_of, widened

DIMS = (64, 128, 192)
GOLDEN = Path(__file__).parent / "golden.json"


def check_bound(values: Bits, keys: bool, bits: int) -> None:
    """Each value by itself: half a scale of its row, half a unit of the last place of what came back, and 2^-16."""
    dim = values.shape[1]
    data, refused = close_tile(values, keys, bits)
    assert not refused
    tile = Tile(dim, keys, bits)
    assert len(data) == tile.bytes
    step, _ = steps_of(data, tile)
    found = widened(open_tile(data, dim, keys, bits)).astype(np.float64)
    exact = widened(values).astype(np.float64)
    last = np.exp2(np.floor(np.log2(np.maximum(np.abs(found), 2.0**-126))) - 8)
    bound = (step if keys else step[:, None]) / 2 * (1 + 2.0**-16) + last
    assert (np.abs(found - exact) <= bound).all()
    span = exact.max(0 if keys else 1) - exact.min(0 if keys else 1)
    assert (step <= np.maximum(span / ((1 << bits) - 1) * 1.01, 2.0**-70)).all()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("dim", DIMS)
def test_error_is_half_a_step_at_most(dim: int, keys: bool, bits: int) -> None:
    for values in tiles((64, dim)).values():
        check_bound(values, keys, bits)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.floats(-60, 34), st.floats(-60, 34), st.booleans(), st.sampled_from(WIDTHS)
)  # fmt: skip
def test_error_with_any_width_and_any_middle(seed: int, width: float, middle: float, keys: bool, bits: int) -> None:
    rng = np.random.default_rng(seed)
    check_bound(bits_of(rng.uniform(-1, 1, (64, 64)) * 2.0**width + rng.choice([-1, 0, 1]) * 2.0**middle), keys, bits)


@pytest.mark.parametrize("odd", [0x7F80, 0xFF80, 0x7FC1, 0xFFFF, REFUSED, REFUSED | 0x8000])
@pytest.mark.parametrize("bits", WIDTHS)
def test_what_is_not_finite_or_too_large_is_refused(bits: int, odd: int) -> None:
    values = distributions((64, 64))["normal"]
    values[17, 5] = odd
    for keys in (True, False):
        data, refused = close_tile(values, keys, bits)
        tile = Tile(64, keys, bits)
        assert refused and (data[tile.steps :].view(np.uint16).reshape(-1, 2, 4)[:, 0] == NO_SCALE).all()
        assert np.isnan(widened(open_tile(data, 64, keys, bits))).all()
    values[17, 5] = REFUSED - 1
    assert not close_tile(values, True, bits)[1]


def test_rounding_is_torchs() -> None:
    rng = np.random.default_rng(0)
    some = rng.integers(0x00800000, 0x7F000000, 4000).astype(np.uint32).view(np.float32)  # exact in float64
    ties = (rng.integers(0x0100, 0x7F00, 4000) << 16 | 0x8000).astype(np.uint32).view(np.float32)
    for values in (some, -some, ties):
        wanted = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(rounded(values.astype(np.float64)), wanted)


def test_sizes() -> None:
    for dim in DIMS:
        for keys in (True, False):
            for bits in WIDTHS:
                tile = Tile(dim, keys, bits)
                assert tile.bytes % 64 == 0
                assert np.array_equal(np.sort(code_places(tile)), np.arange(64 * dim))
    for dim, four, eight in ((64, 4.5, 8.5), (128, 4.375, 8.375)):
        layout = KVLayout(36, 8, dim, dim, 64, "bfloat16")
        assert [16 * page_bytes(layout, bits) / layout.page_bytes for bits in WIDTHS] == [four, eight]


def golden() -> dict[str, str]:
    """The digest of each distribution's closed tile."""
    return {
        f"{name}, {'keys' if keys else 'values'}, {dim}, int{bits}": hashlib.sha256(
            close_tile(values, keys, bits)[0].tobytes()
        ).hexdigest()
        for dim in (64, 128)
        for name, values in {**distributions((64, dim), 7), **tiles((64, dim), 7)}.items()
        for keys in (True, False)
        for bits in WIDTHS
    }


def test_golden_file() -> None:
    """`python -m tests.fixed.test_form` writes it."""
    assert golden() == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("bits", CODE_BITS.values(), ids=CODE_BITS)
@pytest.mark.parametrize(("dims", "page_size"), SHAPES)
def test_kernels_do_what_the_reference_does(dims: tuple[int, int], page_size: int, bits: int) -> None:
    check_kernels(dims, page_size, bits, "cpu", cpu, few=bits == CODED)  # whose reference reads bit after bit


@pytest.mark.parametrize("form", CODE_BITS)
def test_what_has_no_form_is_refused(form: str) -> None:
    for layout in (
        KVLayout(1, 1, 96, 96, 64, "bfloat16"),
        KVLayout(1, 1, 128, 128, 64, "float16"),
        KVLayout(1, 1, 128, 128, 16, "bfloat16"),
    ):
        assert unsupported(layout, CODE_BITS[form])
        with pytest.raises(ConfigError, match=form):
            LossyPages(layout, 1, CODE_BITS[form], "cpu")


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(), indent=0) + "\n")
