"""A pair in KVComp's form keeps values within the wire codec's bound, always fits, and lies as the golden file says.

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

from kvrail.codec.base import Block
from kvrail.codec.core.plans import shaped
from kvrail.codec.papers.kvcomp.codebook import is_code, lengths_of
from kvrail.codec.papers.kvcomp.format import CHANNEL_CODE
from kvrail.codec.papers.kvcomp.plan import TensorPlan
from kvrail.codec.papers.kvcomp.torch_ops import dequantise, quantise
from kvrail.engine.kv.closed.forms import page_bytes
from kvrail.engine.kv.fixed.form import LEAST_SCALE, NO_SCALE, REFUSED
from kvrail.engine.kv.kvcomp.form import CODED, KEYS, MAX_BITS, VALUES, Pair, lengths, reading_tables, writing_tables
from kvrail.values.layout import KVLayout
from tests.fixed.cases import tiles
from tests.lossless.cases import Bits, bits_of, distributions
from tests.reference.fixed_pages import widened
from tests.reference.kvcomp_pages import close_pair, code_of, open_pair, steps_of

DIMS = ((64, 64), (128, 128), (192, 128), (64, 128))
GOLDEN = Path(__file__).parent / "golden.json"


def parts_of(data: npt.NDArray[np.uint8], dims: tuple[int, int]) -> list[tuple[npt.NDArray[np.uint8], int]]:
    """Of keys, then of values: what begins with the part, and the code that it names."""
    keys, values = Pair(*dims).parts
    return [(data, code_of(data, keys)), (data[keys.bytes :], code_of(data[keys.bytes :], values))]


def check_bound(keys: Bits, values: Bits) -> list[int]:
    """Each value by itself, as the wire codec's README has it; the codes that the tiles name."""
    dims = keys.shape[1], values.shape[1]
    data, refused = close_pair(keys, values)
    assert not refused and len(data) == Pair(*dims).bytes
    codes = [code for _, code in parts_of(data, dims)]
    for source, found, code, axis in zip(
        (keys, values), open_pair(data, *dims), (KEYS[codes[0]], VALUES[codes[1]]), (0, 1), strict=True
    ):
        exact, opened = (widened(each).astype(np.float64) for each in (source, found))
        span = exact.max(axis, keepdims=True) - exact.min(axis, keepdims=True)
        bound = np.maximum(code.scale * span, LEAST_SCALE) / 2 + np.maximum(np.abs(opened), 2.0**-126) * 2.0**-8
        assert (np.abs(opened - exact) <= bound).all()
    return codes


@pytest.mark.parametrize("dims", DIMS)
def test_error_is_within_the_bound(dims: tuple[int, int]) -> None:
    every = [tiles((64, dim), seed) for seed, dim in enumerate(dims)]
    named = {name: check_bound(every[0][name], every[1][name]) for name in every[0]}
    assert named["normal"] == [0, 0] and named["far from 0"] == [1, 1]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-60, 34), st.floats(-60, 34), st.booleans())
def test_error_with_any_width_and_any_middle(seed: int, width: float, middle: float, even: bool) -> None:
    rng = np.random.default_rng(seed)
    drawn = (rng.uniform(-1, 1, (64, 64)) if even else rng.standard_normal((64, 64)) / 8 for _ in range(2))
    check_bound(*(bits_of(each * 2.0**width + rng.choice([-1, 0, 1]) * 2.0**middle) for each in drawn))


@pytest.mark.parametrize("name", ["normal", "escapes", "far escapes", "zeros of both signs"])
def test_scales_and_values_are_the_wire_codecs(name: str) -> None:
    """Its scale of keys is a channel of a page, as here; that of values a token, if there is one head."""
    dims = (64, 128)
    tile = [distributions((64, dim), 5)[name] for dim in dims]
    data, _ = close_pair(*tile)
    opened = open_pair(data, *dims)
    for number, (source, (part, code)) in enumerate(zip(tile, parts_of(data, dims), strict=True)):
        assert code == 0
        wire = (CHANNEL_CODE.keys, CHANNEL_CODE.values)[number]
        tensor = torch.from_numpy(source.view(np.int16)).view(torch.bfloat16)[None, None, :, None, :]
        plan = shaped(TensorPlan, Block(tensor, tensor).spec, (wire, wire))[0]
        found = quantise(tensor, plan)
        assert not found.escapes.any()
        scales, _ = steps_of(part, Pair(*dims).parts[number])
        assert scales.tolist() == found.scales.double().flatten().tolist()
        theirs = dequantise(found.minima, found.scales, found.symbols, plan)[0, 0, :, 0].double().numpy()
        ours = widened(opened[number]).astype(np.float64)
        step = scales if number == 0 else scales[:, None]
        assert (np.abs(ours - theirs) <= np.abs(theirs) * 2.0**-7 + step * 2.0**-16).all()  # an offset may count as 0
        assert (ours == theirs).mean() > 0.98


@pytest.mark.parametrize("odd", [0x7F80, 0xFF80, 0x7FC1, 0xFFFF, REFUSED, REFUSED | 0x8000])
def test_what_is_not_finite_or_too_large_is_refused(odd: int) -> None:
    for which in (0, 1):
        pair = [distributions((64, 64), seed)["normal"] for seed in (1, 2)]
        pair[which][17, 5] = odd
        data, refused = close_pair(*pair)
        assert refused == 1
        for number, ((part, _), tile) in enumerate(zip(parts_of(data, (64, 64)), open_pair(data, 64, 64), strict=True)):
            steps = part[: Pair(64, 64).parts[number].lanes].view(np.uint16).reshape(-1, 2, 4)
            assert (steps[:, 0] == NO_SCALE).all() == (number == which)
            assert np.isnan(widened(tile)).all() == (number == which)
        pair[which][17, 5] = REFUSED - 1
        assert close_pair(*pair)[1] == 0


def test_codes_are_the_best_for_normally_distributed_values() -> None:
    """Of rows of 64 keys, and of 64 and 128 values: a mean length is as short as package-merge finds it."""
    for dim, keys, code in ((64, True, KEYS[0]), (64, False, VALUES[0]), (128, False, VALUES[0])):
        rows = np.random.default_rng(dim).standard_normal((50_000, 64 if keys else dim))
        low, high = rows.min(1, keepdims=True), rows.max(1, keepdims=True)
        counts = np.bincount(np.rint((rows - low) / ((high - low) * code.scale * (1 - 2.0**-8))).astype(int).ravel())
        counts = counts + counts[::-1]
        ours = np.array(lengths(keys)[0])
        assert len(counts) == len(ours) == code.symbols and is_code(ours.tolist()) and ours.max() <= MAX_BITS
        best = np.array(lengths_of(counts.tolist(), MAX_BITS))
        assert (counts * ours).sum() <= (counts * best).sum() * 1.001


def test_reading_tables_undo_writing_tables() -> None:
    read, written = reading_tables(), writing_tables()
    assert (read[..., 0] > 0).all()  # every code is complete
    for kind, number, symbol in np.ndindex(2, 2, 32):
        code, bits = int(written[kind, number, symbol]) & 255, int(written[kind, number, symbol]) >> 8
        for rest in range(1 << MAX_BITS - bits if bits else 0):
            assert read[kind, number, code | rest << bits].tolist() == [bits, symbol]


def test_every_pair_fits() -> None:
    """Also symbols that no code is made for: then keys are coarse, and never otherwise."""
    rng = np.random.default_rng(3)
    for dims in DIMS:
        even = [bits_of(rng.uniform(-1, 1, (64, dim))) for dim in dims]
        normal = [bits_of(rng.standard_normal((64, dim))) for dim in dims]
        assert check_bound(*even) == [1, 1]
        assert check_bound(*normal) == [0, 0]
        assert check_bound(normal[0], even[1])[1] == 1 and check_bound(even[0], normal[1])[1] == 0
    for key_dim in range(64, 513, 64):
        for value_dim in range(64, 513, 64):
            pair = Pair(key_dim, value_dim)
            assert 4 * pair.room >= 64 * (4 * key_dim + 3 * value_dim) and pair.bytes % 64 == 0
            assert 2 * pair.bytes < 1 << 16  # units can be counted


def test_streams_of_very_unlike_lengths_take_the_even_code() -> None:
    """Few values lie at one end, in few streams, and the rest in the middle: short, if their lengths could be said."""
    values = np.zeros((64, 64))
    values[:, 0], values[:, 1] = -1, 1
    values += np.random.default_rng(0).standard_normal((64, 64)) / 40
    keys = distributions((64, 64))["normal"]
    codes = check_bound(keys, bits_of(values))
    assert codes[1] == 0  # one channel of a lane's two
    values[:, 32], values[:, 33] = -1, 1
    assert check_bound(keys, bits_of(values))[1] == 1


def test_sizes() -> None:
    for dim, bits in ((64, 4.25), (128, 3.96875)):
        layout = KVLayout(36, 8, dim, dim, 64, "bfloat16")
        assert 16 * page_bytes(layout, CODED) / layout.page_bytes == bits


def golden() -> dict[str, str]:
    """The digest of each distribution's closed pair."""
    found = {}
    for dims in ((64, 64), (128, 64)):
        keys, values = ({**distributions((64, dim), 7), **tiles((64, dim), 7)} for dim in dims)
        for name in keys:
            data, _ = close_pair(keys[name], values[name])
            found[f"{name}, {dims[0]}, {dims[1]}"] = hashlib.sha256(data.tobytes()).hexdigest()
    return found


def test_golden_file() -> None:
    """`python -m tests.kvcomp.test_form` writes it."""
    assert golden() == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(), indent=0) + "\n")
