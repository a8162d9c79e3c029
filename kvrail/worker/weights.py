"""How a worker holds its model's weights."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from kvrail.codec.fused.builds import unsupported
from kvrail.codec.packed.format import FIXED_BYTES, PackedWeight
from kvrail.codec.packed.format import refusal as packed_refusal
from kvrail.codec.packed.gpu import prepare as packed_prepare
from kvrail.codec.packed.gpu_op import packed_product
from kvrail.codec.packed.torch_ops import pack
from kvrail.codec.tbe.cpu import compress
from kvrail.codec.tbe.format import UNIT, TbeWeight
from kvrail.codec.tbe.format import refusal as tbe_refusal
from kvrail.codec.tbe.gpu import prepare as tbe_prepare
from kvrail.codec.tbe.gpu_op import tbe_product
from kvrail.config.settings import WorkerSettings
from kvrail.engine.model.fusion import JointLinear, join_projections
from kvrail.engine.model.loader import LoadedModel, WeightForms
from kvrail.errors import ConfigError
from kvrail.worker.packed.weights import PackedWeights

logger = logging.getLogger(__name__)

Held = TypeVar("Held", PackedWeight, TbeWeight)

_LEAST_ROWS = 8
"""Of a step whose linear layers are all held so: their products have eight tokens' columns at least."""


class HeldLinear(torch.nn.Module, ABC):
    """Rows `begin` to `end` of a linear layer whose weight has `rows` in another form; several may share one."""

    def __init__(self, bias: torch.Tensor | None, rows: int, begin: int, end: int) -> None:
        super().__init__()
        self.bias, self.rows, self.begin, self.end = bias, rows, begin, end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: bfloat16 [..., columns]; returns bfloat16 [..., end - begin]."""
        out = self.product(x)
        return out if self.end - self.begin == self.rows else out[..., self.begin : self.end]

    @abstractmethod
    def product(self, x: torch.Tensor) -> torch.Tensor:
        """All rows: bfloat16 [..., rows]."""


class PackedLinear(HeldLinear):
    """Such a layer whose weight is packed."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, begin: int, end: int) -> None:
        super().__init__(bias, weight.rows, begin, end)
        self.columns = weight.columns
        self.blocks, self.index, self.counts = weight.blocks, weight.index, weight.counts
        self.shifts, self.scales = weight.shifts, weight.scales

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """All rows: bfloat16 [..., rows]."""
        parts = (self.blocks, self.index, self.counts, self.shifts, self.scales)
        out: torch.Tensor = packed_product(x, self.bias, *parts, self.rows, self.columns)
        return out


class TbeLinear(HeldLinear):
    """Such a layer whose weight is TCA-TBE."""

    def __init__(self, weight: TbeWeight, bias: torch.Tensor | None, begin: int, end: int) -> None:
        super().__init__(bias, weight.rows, begin, end)
        self.columns = weight.columns
        self.base, self.bitmaps, self.offsets = weight.base, weight.bitmaps, weight.offsets
        self.sign_mantissas, self.full_values = weight.sign_mantissas, weight.full_values

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """All rows: bfloat16 [..., rows]."""
        parts = (self.base, self.bitmaps, self.sign_mantissas, self.full_values, self.offsets)
        out: torch.Tensor = tbe_product(x, self.bias, *parts, self.rows, self.columns)
        return out


# What layers keep of a weight. Parts take as much as its values need, but layers share compiled code only where their
# tensors have one shape: it is cut to the least that weights of that shape have, and kernels find the rest by its
# address. torch.compile takes the shapes of parameters, and of nothing else, for constants.


def _kept(part: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(part, requires_grad=False)


def _packed_for_layers(weight: PackedWeight) -> PackedWeight:
    parts = weight.parts | {"blocks": weight.blocks[: FIXED_BYTES * len(weight.index)]}
    return PackedWeight(weight.rows, weight.columns, *map(_kept, parts.values()))


def _tbe_for_layers(weight: TbeWeight) -> TbeWeight:
    parts = weight.parts | {
        "sign_mantissas": weight.sign_mantissas[:UNIT],
        "full_values": weight.full_values[: UNIT // weight.full_values.itemsize],
    }
    return TbeWeight(weight.rows, weight.columns, *map(_kept, parts.values()))


@dataclass(frozen=True, slots=True)
class HeldForm(Generic[Held]):
    """A form in which a GPU holds weights, and multiplies by them, with the bits of the plain ones.

    refusal: why a weight cannot have it, empty where it can. compress: a weight to it, on the host. prepare: what must
    be done on the device before a capture. for_layers: the weight as the layers that share it keep it. linear: the
    layer, of that, bias, first row and last.
    """

    refusal: Callable[[torch.Tensor], str]
    compress: Callable[[torch.Tensor], Held]
    prepare: Callable[[Held], None]
    for_layers: Callable[[Held], Held]
    linear: Callable[[Held, torch.Tensor | None, int, int], HeldLinear]

    def on_host(self, weight: torch.Tensor) -> Held | str:
        """The weight in this form; or why it stays plain."""
        if why := self.refusal(weight):
            return why
        held = self.compress(weight)
        return "they would take as much" if held.nbytes >= weight.nbytes else held

    def on_device(self, held: Held, device: torch.device) -> Held:
        """A weight from the host, ready, as layers keep it.

        The allocator gives back first what it can: a weight that takes the place of a larger one, the plain one or
        what packing it took, would keep the rest from others.
        """
        torch.cuda.empty_cache()
        there: Held = held.to(device)
        self.prepare(there)
        return self.for_layers(there)


FORMS: dict[str, HeldForm[PackedWeight] | HeldForm[TbeWeight]] = {
    "packed": HeldForm(
        packed_refusal, lambda weight: pack(weight).to("cpu"), packed_prepare, _packed_for_layers, PackedLinear
    ),
    "tbe": HeldForm(tbe_refusal, compress, tbe_prepare, _tbe_for_layers, TbeLinear),
}
"""What --weights may name besides plain."""


def forms_of(settings: WorkerSettings) -> WeightForms:
    """In which forms a worker reads its weights, and in which it holds them.

    Raises ConfigError where the settings do not allow the form that they ask for.
    """
    name = settings.weights
    if name == "plain":
        return WeightForms(PackedWeights())
    device = torch.device(settings.device)
    why = "" if device.type == "cuda" and not torch.cuda.is_available() else unsupported(device, name)
    if why:
        raise ConfigError(f"weights is {name!r}, but {why}; set it to plain")
    if settings.dtype == "float32":
        raise ConfigError(f"weights is {name!r}, but dtype is 'float32'; only bfloat16 can be held so")
    return WeightForms(PackedWeights(), lambda loaded: hold(loaded, name, join=not settings.eager))


def hold(loaded: LoadedModel, name: str, *, join: bool) -> LoadedModel:
    """Replace the model's linear layers by those of a form, in place; what cannot be held so stays plain.

    join: first join the projections that share an input, as compiling the layers would.
    """
    if join:
        for layer in loaded.layers:
            join_projections(layer, loaded.projections)
    form = FORMS[name]
    before = after = 0
    plain: dict[str, int] = {}
    embedded = {id(module.weight) for module in loaded.model.modules() if isinstance(module, torch.nn.Embedding)}
    for weight, places in _weights(loaded.model):
        held = "they are the embedding's, too" if id(weight) in embedded else form.on_host(weight.detach())
        before += weight.nbytes
        if isinstance(held, str):
            plain[held] = plain.get(held, 0) + 1
            after += weight.nbytes
            continue
        after += held.nbytes
        device = weight.device
        del weight
        for place in places:
            setattr(place.parent, place.name, None)  # nobody keeps the weight any more
        shared = form.on_device(held, device)  # type: ignore[arg-type]
        for place in places:
            layer = form.linear(shared, place.bias, place.begin, place.end)  # type: ignore[arg-type]
            setattr(place.parent, place.name, layer)
    for reason, count in plain.items():
        logger.warning("%d weights of linear layers stay plain: %s", count, reason)
    sizes = before / (1 << 30), after / (1 << 30)
    logger.info("weights of linear layers are held as %s: %.2f GiB are %.2f", name, *sizes)
    return loaded if plain else replace(loaded, least_rows=_LEAST_ROWS)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a linear layer is, its bias, and which rows of its weight it takes."""

    parent: torch.nn.Module
    name: str
    bias: torch.Tensor | None
    begin: int
    end: int


def _weights(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, list[_Place]]]:
    """Weights of linear layers, each with where it is used; one that was yielded is not kept here."""
    found: dict[int, tuple[torch.nn.Parameter, list[_Place]]] = {}
    for parent in model.modules():
        for name, module in parent.named_children():
            if type(module) in (torch.nn.Linear, JointLinear):
                begin, end = getattr(module, "begin", 0), getattr(module, "end", module.weight.shape[0])  # type: ignore[index]
                _, places = found.setdefault(id(module.weight), (module.weight, []))  # type: ignore[arg-type]
                places.append(_Place(parent, name, module.bias, begin, end))  # type: ignore[arg-type]
    while found:
        yield found.pop(next(iter(found)))
