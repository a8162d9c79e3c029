"""Linear layers with packed weights compute what torch's own do, and a loaded model has no others."""

import pytest
import torch
from torch import nn

from kvrail.engine.model.onednn_linear import OneDnnLinear, can_use_onednn, mean_weights, use_onednn
from tests.engine import tiny_models


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 5), (4, 96), (2, 3, 96), (68, 33)])
def test_equals_torchs_own(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(shape[-1], 40, bias=bias), torch.randn(shape)
    found = OneDnnLinear(layer)
    assert torch.equal(found.weight, layer.weight)
    wanted = nn.functional.linear(
        x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double()
    )
    torch.testing.assert_close(found(x).double(), wanted, rtol=1e-5, atol=1e-5)


def test_rows_are_batch_invariant() -> None:
    torch.manual_seed(1)
    layer, x = OneDnnLinear(nn.Linear(512, 960, bias=False)), torch.randn(264, 512)
    together = layer(x)
    for count in (4, 8, 20, 64, 128):
        for begin in (0, 100, 264 - count):
            assert torch.equal(layer(x[begin : begin + count]), together[begin : begin + count])


def test_a_model_in_float32_on_a_cpu_is_packed() -> None:
    lm = tiny_models.load("llama").model
    kinds = {type(module) for module in lm.modules()}
    assert OneDnnLinear in kinds and nn.Linear not in kinds
    assert nn.Linear in {type(module) for module in tiny_models.load("llama", dtype="bfloat16").model.modules()}


def test_other_types_are_left_alone() -> None:
    class Other(nn.Linear):
        pass

    model = nn.Sequential(Other(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    assert can_use_onednn(model) and not can_use_onednn(model.bfloat16())
    use_onednn(model.float())
    assert [type(module) for module in model] == [Other, OneDnnLinear, nn.LayerNorm]


def test_weights_of_a_layer_on_average_whether_packed_or_not() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    assert mean_weights(model) == (8 * 4 + 4 * 2) / 2
    use_onednn(model)
    assert mean_weights(model) == (8 * 4 + 4 * 2) / 2
    assert mean_weights(nn.ReLU()) == 0
