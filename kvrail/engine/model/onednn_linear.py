"""Linear layers on a CPU that keep their weights in the layout of the product.

torch's own product of a few rows copies the whole weight into another layout at each call, which takes several times
as long as the arithmetic. oneDNN takes a weight in that layout: steps of one token are faster, and prompts too. It is
also batch-invariant, which decision 0008 builds on.
"""

import torch

from kvrail.engine.model.linear import PLAIN, linear_layers


class OneDnnLinear(torch.nn.Module):
    """A linear layer in float32 that keeps its weight in oneDNN's layout and no other."""

    method = PLAIN

    def __init__(self, layer: torch.nn.Linear) -> None:
        """Take over the parameters of `layer`; they are freed with it unless something else holds them."""
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.bias = layer.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())

    @property
    def weight(self) -> torch.Tensor:
        """A copy, [out_features, in_features]."""
        dense: torch.Tensor = self._packed.to_dense()
        return dense

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def can_use_onednn(model: torch.nn.Module) -> bool:
    """Whether a model computes in float32 on a CPU for which this build of torch has oneDNN."""
    first = next(model.parameters())
    return first.device.type == "cpu" and first.dtype == torch.float32 and torch._C._has_mkldnn


def use_onednn(model: torch.nn.Module) -> None:
    """Replace all linear layers of `model`. Subclasses stay: they may compute something else."""
    for parent, name, layer in linear_layers(model):
        if isinstance(layer, torch.nn.Linear):
            setattr(parent, name, OneDnnLinear(layer))


def mean_weights(model: torch.nn.Module) -> float:
    """Weights of a linear layer of `model`, on average; 0 where it has none."""
    sizes = [int(layer.in_features) * int(layer.out_features) for _, _, layer in linear_layers(model)]  # type: ignore[arg-type]
    return sum(sizes) / max(1, len(sizes))
