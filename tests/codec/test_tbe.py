"""TCA-TBE weights on a CPU: compressor and decompressor have the reference's bits, damage is refused by name."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrail.codec.base import CodecError
from kvrail.codec.fused.weight import refusal
from kvrail.codec.papers.tbe import cpu_kernels
from kvrail.codec.papers.tbe.cpu import check, compress, decompress
from kvrail.codec.papers.tbe.format import TbeWeight
from kvrail.config.settings import DEMO_MODEL
from tests.codec.test_compact import bits, normal, of_bits
from tests.reference import tbe as reference


def comes_back(weight):
    held, wanted = compress(weight), reference.compress(weight)
    for name, part in wanted.parts.items():
        assert torch.equal(held.parts[name], part), name
    assert torch.equal(bits(decompress(held)), bits(weight))
    assert torch.equal(bits(reference.decompress(held)), bits(weight))
    return held


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (16, 128), (130, 70), (1, 1), (0, 5), (3, 0), (7, 200)])
def test_a_weight_of_any_shape_comes_back(rows, columns):
    comes_back(normal(rows, columns))


def test_every_pattern_of_sixteen_bits_comes_back():
    comes_back(of_bits(range(-(1 << 15), 1 << 15), 512))


def test_the_kernels_are_kept_for_the_next_process():
    kernels = [
        each for each in vars(cpu_kernels).values() if hasattr(each, "py_func") and each.targetoptions.get("nogil")
    ]
    assert len(kernels) == 5 and all(each.stats.cache_path for each in kernels)


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), float("nan"), 1e-40, 1.0, 3e38])
def test_a_weight_of_one_value_comes_back(value):
    comes_back(torch.full((64, 64), value, dtype=torch.bfloat16))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_whatever_lies_in_a_weight_comes_back(data):
    weight = normal(24, 72)
    for _ in range(data.draw(st.integers(1, 40))):
        row, column = data.draw(st.integers(0, 23)), data.draw(st.integers(0, 71))
        bits(weight)[row, column] = data.draw(st.integers(-(1 << 15), (1 << 15) - 1))
    comes_back(weight)


@pytest.mark.parametrize("scale", [0.02, 0.025, 0.03, 0.036])
def test_normally_distributed_weights_take_less_than_72_percent(scale):
    weight = normal(512, 1024, scale)
    held = compress(weight)
    assert held.nbytes < 0.72 * weight.nbytes
    # By the normal distribution 2.1 to 3.1 % lie outside of the best seven exponents, by where the deviation lies.
    assert 0.020 < (held.full_values.numel() - 8) / weight.numel() < 0.035


def test_the_demo_models_weights_take_less_than_72_percent():
    from safetensors.torch import load_file

    tensors = load_file(f"{DEMO_MODEL}/model.safetensors")
    weights = [tensor for name, tensor in tensors.items() if tensor.dim() == 2 and "layers.0." in name]
    held = [compress(weight) for weight in weights]
    assert len(weights) == 7
    assert sum(each.nbytes for each in held) < 0.72 * sum(weight.nbytes for weight in weights)
    assert all(torch.equal(bits(decompress(h)), bits(w)) for h, w in zip(held, weights, strict=True))


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (torch.zeros(16, 64), r"float32 \[16, 64\]"),
        (torch.zeros(16, 64, 1, dtype=torch.bfloat16), r"bfloat16 \[16, 64, 1\]"),
    ],
)
def test_other_weights_are_refused(weight, why):
    with pytest.raises(CodecError, match=f"takes weights of bfloat16 .rows, columns., not {why}"):
        compress(weight)
    assert refusal(weight)


def test_shapes_that_no_product_takes_are_refused():
    assert "no multiple of [16, 64]" in refusal(normal(24, 64))
    assert "no multiple of [16, 64]" in refusal(normal(16, 96))
    assert not refusal(normal(48, 64))


def damaged(held, **parts):
    return TbeWeight(held.rows, held.columns, **(held.parts | parts))


def changed(part, index, by):
    copy = part.clone()
    copy[index] ^= by
    return copy


DAMAGES = {
    "a bit of a bitmap": lambda h: {"bitmaps": changed(h.bitmaps, (1, 0, slice(None), 3), -1)},
    "where a block's values begin": lambda h: {"offsets": changed(h.offsets, (2, 0), 1)},
    "where a block's full values begin": lambda h: {"offsets": changed(h.offsets, (2, 1), 1 << 30)},
    "what a strip has": lambda h: {"offsets": changed(h.offsets, (2, 2), 1 << 16)},
    "a buffer cut off": lambda h: {"sign_mantissas": h.sign_mantissas[:-16]},
    "a buffer too long": lambda h: {"full_values": torch.cat([h.full_values, h.full_values])},
    "a base too high": lambda h: {"base": torch.tensor([249], dtype=torch.int32)},
    "a negative base": lambda h: {"base": torch.tensor([-1], dtype=torch.int32)},
    "a bitmap missing": lambda h: {"bitmaps": h.bitmaps[:, :, :2].contiguous()},
    "another type": lambda h: {"sign_mantissas": h.sign_mantissas.view(torch.int8)},
    "offsets missing": lambda h: {"offsets": h.offsets[:-1]},
}
NAMED = {
    "a bit of a bitmap": "offsets of BlockTile 1 are",
    "where a block's values begin": "offsets of BlockTile 2 are",
    "where a block's full values begin": "offsets of BlockTile 2 are",
    "what a strip has": "offsets of BlockTile 2 are",
    "a buffer cut off": "sign_mantissas has .* values, but the bitmaps say",
    "a buffer too long": "full_values has .* values, but the bitmaps say",
    "a base too high": "base is 249; it can be 0 to 248",
    "a negative base": "base is -1",
    "a bitmap missing": r"bitmaps is int64 \[4, 4, 2, 16\]; a weight of \[100, 128\] has int64 \[4, 4, 3, 16\]",
    "another type": r"sign_mantissas is int8 .* has uint8 \[n\]",
    "offsets missing": r"offsets is int32 \[3, 4\]",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_name(damage):
    held = compress(normal(100, 128))
    check(held)
    broken = damaged(held, **DAMAGES[damage](held))
    with pytest.raises(CodecError, match=NAMED[damage]):
        decompress(broken)
    with pytest.raises(CodecError, match=NAMED[damage]):
        check(broken)


def test_a_shape_that_the_parts_do_not_have_is_refused():
    held = compress(normal(100, 128))
    with pytest.raises(CodecError, match=r"a weight of \[300, 128\] has"):
        decompress(TbeWeight(300, 128, **held.parts))
    with pytest.raises(CodecError, match="cannot have the shape"):
        decompress(TbeWeight(-1, 128, **held.parts))
