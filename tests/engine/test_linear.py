"""Linear layers and their methods: which module has which, and that joining changes no value."""

import torch
from torch import nn

from kvrail.engine.model.linear import PLAIN, JointLinear, linear_layers, method_of
from kvrail.engine.model.onednn_linear import OneDnnLinear


class Other(nn.Linear):
    """May compute something else."""


def test_each_linear_layer_has_a_method_and_nothing_else_has() -> None:
    joint = JointLinear(nn.Parameter(torch.zeros(4, 8)), None, 1, 3)
    model = nn.Sequential(nn.Linear(8, 4), Other(4, 4), joint, nn.Sequential(OneDnnLinear(nn.Linear(8, 2))), nn.ReLU())
    assert [name for _, name, _ in linear_layers(model)] == ["0", "2", "0"]
    assert all(method_of(layer) is PLAIN for _, _, layer in linear_layers(model))
    assert [(layer.in_features, layer.out_features) for _, _, layer in linear_layers(model)] == [(8, 4), (8, 2), (8, 2)]
    assert method_of(Other(4, 4)) is None and method_of(nn.Embedding(4, 4)) is None


def test_plain_layers_are_joined_once_and_keep_their_values() -> None:
    layers, x = [nn.Linear(8, 4), nn.Linear(8, 6)], torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    joined = PLAIN.join(layers)
    for layer, found in zip(layers, joined, strict=True):
        torch.testing.assert_close(found(x), layer(x))
    assert len({id(layer.weight) for layer in joined}) == 1
    assert PLAIN.join(joined) == []
    assert PLAIN.join([nn.Linear(8, 4), nn.Linear(8, 4, bias=False)]) == []


def test_a_placed_weight_multiplies_as_its_layer_did() -> None:
    layer, x = nn.Linear(8, 6), torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    assert PLAIN.accepts(None, layer.weight) == ""
    held = PLAIN.place(PLAIN.load(layer.weight.detach()), torch.device("cpu"))
    assert torch.equal(PLAIN.apply(held, layer.bias, 0, 6)(x), layer(x))
    assert torch.equal(PLAIN.apply(held, layer.bias, 2, 5)(x), layer(x)[:, 2:5])
