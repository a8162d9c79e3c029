"""How a worker holds its model's weights."""

import logging
from collections.abc import Iterator
from dataclasses import replace

import torch

from kvrail.codec.packed.builds import unsupported
from kvrail.codec.packed.form import FIXED_BYTES, PackedWeight, refusal
from kvrail.codec.packed.gpu import prepare
from kvrail.codec.packed.op import packed_product
from kvrail.codec.packed.packing import pack
from kvrail.config import WorkerSettings
from kvrail.engine.fusion import JointLinear, join_projections
from kvrail.engine.loader import LoadedModel, WeightForms
from kvrail.errors import ConfigError
from kvrail.services.packed.weights import PackedWeights

logger = logging.getLogger(__name__)

_LEAST_ROWS = 8
"""Of a step whose linear layers are all packed: their products have eight tokens' columns at least."""


def forms_of(settings: WorkerSettings) -> WeightForms:
    """In which forms a worker reads its weights, and in which it holds them.

    Raises ConfigError where the settings do not allow the form that they ask for.
    """
    if settings.weights == "plain":
        return WeightForms(PackedWeights())
    device = torch.device(settings.device)
    why = "" if device.type == "cuda" and not torch.cuda.is_available() else unsupported(device)
    if why:
        raise ConfigError(f"weights is 'packed', but {why}; set it to plain")
    if settings.dtype == "float32":
        raise ConfigError("weights is 'packed', but dtype is 'float32'; only bfloat16 can be packed")
    return WeightForms(PackedWeights(), lambda loaded: hold_packed(loaded, join=settings.compile))


class PackedLinear(torch.nn.Module):
    """Rows `begin` to `end` of a linear layer whose weight is packed; several may share one weight."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, begin: int, end: int) -> None:
        super().__init__()
        self.columns, self.rows, self.begin, self.end = weight.columns, weight.rows, begin, end
        self.bias, self.index = bias, weight.index
        # Blocks take as much as their records need, but layers share compiled code only where their tensors have one
        # shape: this is the least that blocks of this shape take, and a kernel finds the rest by their address.
        self.blocks = weight.blocks[: FIXED_BYTES * len(weight.index)]
        self.counts, self.shifts, self.scales = weight.counts, weight.shifts, weight.scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: bfloat16 [..., columns]; returns bfloat16 [..., end - begin]."""
        parts = (self.blocks, self.index, self.counts, self.shifts, self.scales)
        out: torch.Tensor = packed_product(x, self.bias, *parts, self.columns)
        return out if self.end - self.begin == self.rows else out[..., self.begin : self.end]


def hold_packed(loaded: LoadedModel, *, join: bool) -> LoadedModel:
    """Replace the model's linear layers by packed ones, in place; what cannot be packed stays plain.

    join: first join the projections that share an input, as compiling the layers would.
    """
    if join:
        for layer in loaded.layers:
            join_projections(layer, loaded.projections)
    before = after = 0
    plain: dict[str, int] = {}
    embedded = {id(module.weight) for module in loaded.model.modules() if isinstance(module, torch.nn.Embedding)}
    for weight, places in _weights(loaded.model):
        dense = weight.nbytes
        shared = "they are the embedding's, too" if id(places[0][2].weight) in embedded else ""
        packed = None if (why := shared or refusal(weight)) else pack(weight)
        if packed is None or packed.nbytes >= dense:
            reason = why or "packed it would take as much"
            plain[reason] = plain.get(reason, 0) + 1
            after += dense
        else:
            prepare(packed)
            for parent, name, module in places:
                begin, end = (module.begin, module.end) if isinstance(module, JointLinear) else (0, packed.rows)
                setattr(parent, name, PackedLinear(packed, module.bias, begin, end))
            after += packed.nbytes
        before += dense
    for reason, count in plain.items():
        logger.warning("%d weights of linear layers stay plain: %s", count, reason)
    logger.info("weights of linear layers packed: %.2f GiB are %.2f", before / (1 << 30), after / (1 << 30))
    return loaded if plain else replace(loaded, least_rows=_LEAST_ROWS)


_Place = tuple[torch.nn.Module, str, torch.nn.Linear | JointLinear]


def _weights(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, list[_Place]]]:
    """Weights of linear layers, each with the layers that have it; none is held here when the next is asked for."""
    found: dict[int, list[_Place]] = {}
    for parent in model.modules():
        for name, module in parent.named_children():
            if type(module) in (torch.nn.Linear, JointLinear):
                found.setdefault(id(module.weight), []).append((parent, name, module))  # type: ignore[arg-type]
    while found:
        places = found.pop(next(iter(found)))
        yield places[0][2].weight.detach(), places
