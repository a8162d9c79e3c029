"""How a worker holds its model's weights: what `--weights` names, and a model's layers taken over by it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch

from kvrail.codec.compact import gpu as compact_gpu
from kvrail.codec.compact.format import FIXED_BYTES, CompactWeight
from kvrail.codec.compact.torch_ops import compress as compact
from kvrail.codec.fused.builds import unsupported
from kvrail.codec.fused.weight import FusedWeight, refusal
from kvrail.codec.papers.tbe import gpu as tbe_gpu
from kvrail.codec.papers.tbe.cpu import compress
from kvrail.codec.papers.tbe.format import UNIT, TbeWeight
from kvrail.config.settings import WorkerSettings
from kvrail.engine.model.fusion import join_projections
from kvrail.engine.model.linear import PLAIN, LinearMethod, linear_layers
from kvrail.engine.model.loader import LoadedModel, WeightForms
from kvrail.errors import ConfigError
from kvrail.worker.packed.weights import PackedWeights

logger = logging.getLogger(__name__)

Held = TypeVar("Held", CompactWeight, TbeWeight)

_LEAST_ROWS = 8
"""The products with compressed weights have at least eight tokens' columns."""


class HeldLinear(torch.nn.Module):
    """Rows `begin` to `end` of a linear layer whose weight of `rows` is compressed; several may share one weight."""

    method: ClassVar[LinearMethod]
    product: ClassVar[Any]
    """The form's operation, see `product_op`."""

    def __init__(self, weight: FusedWeight, bias: torch.Tensor | None, begin: int, end: int) -> None:
        super().__init__()
        self.bias, self.rows, self.columns, self.begin, self.end = bias, weight.rows, weight.columns, begin, end
        self.in_features, self.out_features = weight.columns, end - begin
        self._parts = tuple(weight.parts)
        for name, part in weight.parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: bfloat16 [..., columns]; returns bfloat16 [..., end - begin]."""
        parts = [getattr(self, name) for name in self._parts]
        out: torch.Tensor = self.product(x, self.bias, *parts, self.rows, self.columns)
        return out if self.end - self.begin == self.rows else out[..., self.begin : self.end]


class CompactLinear(HeldLinear):
    """Such a layer whose weight is compact."""

    product = compact_gpu.product


class TbeLinear(HeldLinear):
    """Such a layer whose weight is TCA-TBE."""

    product = tbe_gpu.product


# What layers keep of a weight. Parts take as much as its values need, but layers share compiled code only where their
# tensors have one shape: it is cut to the least that weights of that shape have, and kernels find the rest by its
# address. torch.compile takes the shapes of parameters, and of nothing else, for constants.


def _compact_cut(weight: CompactWeight) -> dict[str, torch.Tensor]:
    return {"blocks": weight.blocks[: FIXED_BYTES * len(weight.index)]}


def _tbe_cut(weight: TbeWeight) -> dict[str, torch.Tensor]:
    return {
        "sign_mantissas": weight.sign_mantissas[:UNIT],
        "full_values": weight.full_values[: UNIT // weight.full_values.itemsize],
    }


@dataclass(frozen=True, slots=True)
class CompressedMethod(Generic[Held]):
    """A form in which a GPU holds weights in fewer bytes, and multiplies by them, with the bits of the plain ones.

    load: a weight to it, in host memory. prepare: what must be done on the device before a capture. cut: the parts of
    which the layers that share a weight keep less. apply: the layer, of that, bias, first row and last.
    """

    name: str
    load: Callable[[torch.Tensor], Held]
    prepare: Callable[[Held], None]
    cut: Callable[[Held], dict[str, torch.Tensor]]
    apply: Callable[[Held, torch.Tensor | None, int, int], HeldLinear]
    invariant_rows: int = _LEAST_ROWS

    def accepts(self, config: Any, weight: torch.Tensor) -> str:
        """Why a weight cannot have this form; empty where it can."""
        return refusal(weight)

    def place(self, held: Held, device: torch.device) -> Held:
        """A weight from the host, ready, as layers keep it.

        The allocator gives back first what it can: a weight that takes the place of a larger one, the plain one or
        what compressing it took, would keep the rest from others.
        """
        torch.cuda.empty_cache()
        there: Held = held.to(device)
        self.prepare(there)
        kept = [torch.nn.Parameter(part, requires_grad=False) for part in (there.parts | self.cut(there)).values()]
        return type(there)(there.rows, there.columns, *kept)

    def join(self, layers: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
        """None: projections are joined before their weights take this form."""
        return []


COMPACT = CompressedMethod(
    "compact", lambda weight: compact(weight).to("cpu"), compact_gpu.prepare, _compact_cut, CompactLinear
)
TBE = CompressedMethod("tbe", compress, tbe_gpu.prepare, _tbe_cut, TbeLinear)
CompactLinear.method, TbeLinear.method = COMPACT, TBE

METHODS: dict[str, LinearMethod] = {method.name: method for method in (PLAIN, COMPACT, TBE)}
"""What --weights may name."""


def forms_of(settings: WorkerSettings) -> WeightForms:
    """In which forms a worker reads its weights, and in which it holds them.

    Raises ConfigError where the settings do not allow the form that they ask for.
    """
    method = METHODS[settings.weights]
    if method is PLAIN:
        return WeightForms(PackedWeights())
    name = method.name
    device = torch.device(settings.device)
    why = "" if device.type == "cuda" and not torch.cuda.is_available() else unsupported(device, name)
    if why:
        raise ConfigError(f"weights is {name!r}, but {why}; set it to plain")
    if settings.dtype == "float32":
        raise ConfigError(f"weights is {name!r}, but dtype is 'float32'; only bfloat16 can be held so")
    return WeightForms(PackedWeights(), lambda loaded: hold(loaded, method, join=not settings.eager))


def hold(loaded: LoadedModel, method: LinearMethod, *, join: bool) -> LoadedModel:
    """Have the model's linear layers take a method, in place; those whose weights it does not accept stay as they are.

    join: first join the projections that share an input, as compiling the layers would.
    """
    if join:
        for layer in loaded.layers:
            join_projections(layer, loaded.projections)
    before = after = 0
    left: dict[str, int] = {}
    embedded = {id(module.weight) for module in loaded.model.modules() if isinstance(module, torch.nn.Embedding)}
    for weight, places in _weights(loaded.model):
        before += weight.nbytes
        held: Any = None
        why = "they are the embedding's, too" if id(weight) in embedded else method.accepts(loaded.config, weight)
        if not why:
            held = method.load(weight.detach())
            why = "they would take as much" if held.nbytes >= weight.nbytes else ""
        if why:
            left[why] = left.get(why, 0) + 1
            after += weight.nbytes
            continue
        after += held.nbytes
        device = weight.device
        del weight
        for place in places:
            setattr(place.parent, place.name, None)  # frees the weight
        shared = method.place(held, device)
        for place in places:
            setattr(place.parent, place.name, method.apply(shared, place.bias, place.begin, place.end))
    for reason, count in left.items():
        logger.warning("%d weights of linear layers stay plain: %s", count, reason)
    sizes = before / (1 << 30), after / (1 << 30)
    logger.info("weights of linear layers are held as %s: %.2f GiB are %.2f", method.name, *sizes)
    return loaded if left else replace(loaded, least_rows=method.invariant_rows)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a linear layer is, its bias, and which rows of its weight it takes."""

    parent: torch.nn.Module
    name: str
    bias: torch.nn.Parameter | None
    begin: int
    end: int


def _weights(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, list[_Place]]]:
    """Weights of linear layers, each with where it is used; one that was yielded is not kept here."""
    found: dict[int, tuple[torch.nn.Parameter, list[_Place]]] = {}
    for parent, name, layer in linear_layers(model):
        begin, end = getattr(layer, "begin", 0), getattr(layer, "end", layer.weight.shape[0])  # type: ignore[index]
        _, places = found.setdefault(id(layer.weight), (layer.weight, []))  # type: ignore[arg-type]
        places.append(_Place(parent, name, layer.bias, begin, end))  # type: ignore[arg-type]
        del layer
    while found:
        yield found.pop(next(iter(found)))
