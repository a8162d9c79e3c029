"""How a linear layer keeps its weight and multiplies by it: the contract, and torch's own way."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.nn.functional import linear

from kvrail.engine.batch.inputs import CUDA_ROWS


class LinearMethod(Protocol):
    """A form of weights, and the product with them.

    A layer of a method has `in_features`, `out_features` and, unless it is torch's own, `method`. Several layers may
    share one weight: each is a range of its rows.
    """

    @property
    def name(self) -> str:
        """What --weights calls it."""
        ...

    @property
    def invariant_rows(self) -> int:
        """Rows of a step on CUDA from which on a row gets the plain product's bits, whatever the other rows are."""
        ...

    def accepts(self, config: Any, weight: torch.Tensor) -> str:
        """Why a weight [out, in] of a model with this configuration stays as it is; empty where it need not."""
        ...

    def load(self, weight: torch.Tensor) -> Any:
        """The weight in this form, in host memory; it has `nbytes`."""
        ...

    def place(self, held: Any, device: torch.device) -> Any:
        """What `load` gave, on the device, ready for products and for a capture."""
        ...

    def apply(self, held: Any, bias: torch.nn.Parameter | None, begin: int, end: int) -> torch.nn.Module:
        """A layer that multiplies by rows `begin` to `end` of a weight that was placed."""
        ...

    def join(self, layers: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
        """Layers that compute what these do, which share an input, in one product; empty where that is impossible."""
        ...


class PlainMethod:
    """Weights as the checkpoint has them, and torch's product."""

    name = "plain"
    invariant_rows = CUDA_ROWS

    def accepts(self, config: Any, weight: torch.Tensor) -> str:
        """Every weight."""
        return ""

    def load(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight itself, where it lies."""
        return weight

    def place(self, held: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
        """The weight on the device."""
        return torch.nn.Parameter(held.to(device), requires_grad=False)

    def apply(self, held: torch.nn.Parameter, bias: torch.nn.Parameter | None, begin: int, end: int) -> "JointLinear":
        """A layer of rows `begin` to `end`."""
        return JointLinear(held, bias, begin, end)

    def join(self, layers: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
        """Slices of one weight that has the values of all; none where the layers are slices already."""
        given = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
        if len(given) < len(layers) or len({layer.bias is None for layer in given}) > 1:
            return []
        weight = _joined([layer.weight for layer in given])
        bias = None if given[0].bias is None else _joined([layer.bias for layer in given])
        found: list[torch.nn.Module] = []
        begin = 0
        for layer in given:
            end = begin + int(layer.weight.shape[0])
            found.append(self.apply(weight, bias, begin, end))
            begin = end
        return found


PLAIN = PlainMethod()


class JointLinear(torch.nn.Module):
    """Rows `begin` to `end` of a linear map that several modules share."""

    method = PLAIN

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None, begin: int, end: int) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.begin = begin
        self.end = end
        self.in_features, self.out_features = int(weight.shape[1]), end - begin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]; returns [..., end - begin]."""
        return linear(x, self.weight, self.bias)[..., self.begin : self.end]


def _joined(parts: Sequence[torch.Tensor]) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.cat([part.data for part in parts]), requires_grad=False)


def method_of(module: torch.nn.Module) -> LinearMethod | None:
    """The method of a linear layer; None of other modules, and of subclasses of torch's that are none of ours.

    Such a subclass may compute something else.
    """
    found: LinearMethod | None = PLAIN if type(module) is torch.nn.Linear else getattr(module, "method", None)
    return found


def linear_layers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """(parent, its name there, layer) of each linear layer, which may be replaced meanwhile."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if method_of(module) is not None:
                yield parent, name, module
