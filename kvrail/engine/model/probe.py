"""Tries a freshly loaded model: which attention it calls, and whether paged attention gives what dense gives."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvrail.engine.attention.registry import NAME
from kvrail.engine.attention.step import AttentionStep, bind_layer
from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.batch.inputs import StepInputs, step_inputs
from kvrail.engine.batch.packing import pack
from kvrail.engine.kv.cache import PagedCache
from kvrail.engine.model.fusion import observe_projections
from kvrail.engine.model.support import expected_window
from kvrail.errors import UnsupportedModelError
from kvrail.values.layout import KVLayout

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Largest ‖paged - dense‖ / ‖dense‖ of the logits. A model that ignores its pages is off by about 1, bfloat16 alone by
0.01 to 0.05. A mixture of experts is off by more where its router chooses others: 0.19 was seen with a correct one."""
_PROMPTS = (
    ([2, 1, 4, 3, 0, 2, 1], [1, 3, 3, 2, 0, 1]),
    ([3, 0, 1, 4, 2, 0, 3], [4, 2, 0, 1, 3, 2]),
    ([1, 1, 4, 0, 2, 3, 0], [0, 4, 2, 3, 1, 4]),
)
"""Pairs of sequences to compare on. A router may choose other experts for some tokens; state that paged attention does
not see is wrong for all of them."""


@dataclass(frozen=True, slots=True)
class Found:
    """What the probe saw.

    The KV shape, the decoder layers in order, and which of a layer's linear modules take the same input (names relative
    to the layer).
    """

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    layers: tuple[torch.nn.Module, ...]
    projections: tuple[tuple[str, ...], ...]


@dataclass(slots=True)
class _Call:
    module: torch.nn.Module
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int


@dataclass(slots=True)
class _Recorder:
    """Answers attention calls with zeros and records their arguments."""

    calls: list[_Call] = field(default_factory=list)
    on_layer: Callable[[int], None] | None = None
    on_body: Callable[[Any], None] | None = None

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        heads, key_dim, value_dim = key.shape[1], key.shape[3], value.shape[3]
        self.calls.append(_Call(module, heads, key_dim, value_dim, window))
        return query.new_zeros(1, query.shape[2], query.shape[1], value_dim)


def inspect(model: Any, config: Any) -> Found:
    """Run a few tokens and look at the attention calls; bind modules to their layers.

    Each attention module gets its layer's number in the page pool. Each decoder layer, and what is before the model's
    head, reports to the step.

    Raises UnsupportedModelError where attention bypasses the registry, layers differ in shape, a layer is called twice
    or not at all, or the configuration's sliding window does not reach attention.
    """
    recorder = _Recorder()
    tokens = torch.arange(3, device=model.device)
    _guarded(lambda: _call(model, tokens, tokens, tokens, recorder), model)
    calls, name = recorder.calls, type(model).__name__
    expected = int(config.get_text_config().num_hidden_layers)
    if len(calls) != expected or len({id(c.module) for c in calls}) != expected:
        raise UnsupportedModelError(
            f"{name} has {expected} layers but called paged attention {len(calls)} times: its attention bypasses "
            "transformers' attention registry, or some layers are of another kind"
        )
    shapes = {(c.kv_heads, c.key_dim, c.value_dim) for c in calls}
    if len(shapes) > 1:
        raise UnsupportedModelError(f"{name} has layers with different KV shapes (heads, key, value): {sorted(shapes)}")
    for index, call in enumerate(calls):
        window = expected_window(config, index)
        if window is not None and window != call.window:
            raise UnsupportedModelError(
                f"{name} should attend to {window or 'all'} tokens in layer {index} but asks attention for "
                f"{call.window or 'all'}"
            )
        bind_layer(call.module, index)
    layers = tuple(_decoder_layers(model, [c.module for c in calls]))
    for index, layer in enumerate(layers):
        layer.register_forward_hook(_reporter(index), with_kwargs=True)
    _keep_body(model)
    kv_heads, key_dim, value_dim = shapes.pop()
    return Found(
        num_layers=expected,
        num_kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        layers=layers,
        projections=_projections(model, layers),
    )


def verify(model: Any, layout: KVLayout) -> None:
    """Compare packed, chunked, paged logits of two sequences with the model's own dense attention.

    Raises UnsupportedModelError where they differ by more than rounding on every pair of _PROMPTS. Pages keep the
    computed type here, so that their rounding does not blur the comparison.
    """
    layout = replace(layout, dtype=str(model.dtype).removeprefix("torch."))
    errors = []
    for first, second in _PROMPTS:
        errors.append(_difference(model, layout, first, second))
        if errors[-1] <= _TOLERANCE[model.dtype]:
            return
    raise UnsupportedModelError(
        f"{type(model).__name__} computes other logits paged than dense (relative difference {min(errors):.2g}): "
        "it keeps state or masks in a way that paged attention does not see"
    )


def _difference(model: Any, layout: KVLayout, first: list[int], second: list[int]) -> float:
    """‖paged - dense‖ / ‖dense‖ of the logits behind both sequences, each computed in two chunks."""
    count = layout.pages_for(len(first))
    cache = PagedCache(layout, 2 * count, model.device)
    here, there = range(2 * count)[::2], range(2 * count)[1::2]
    _paged(model, cache, [SequenceSlice(first[:4], 0, here, 0), SequenceSlice(second[:5], 0, there, 0)])
    rest = [SequenceSlice(first[4:], 4, here, 1), SequenceSlice(second[5:], 5, there, 1)]
    paged = _paged(model, cache, rest)
    model.set_attn_implementation("eager")
    try:
        dense = _guarded(lambda: torch.stack([_dense(model, ids) for ids in (first, second)]), model)
    finally:
        model.set_attn_implementation(NAME)
    return float(torch.linalg.vector_norm(paged - dense) / torch.linalg.vector_norm(dense))


def forward(model: Any, inputs: StepInputs, out: torch.Tensor | None = None) -> torch.Tensor:
    """One packed forward pass: float32 logits [rows, vocab] on the device, in `out` if it is given."""
    return _call(model, inputs.token_ids, inputs.positions, inputs.logit_rows, inputs.step, out)[: inputs.num_rows]


def head(model: Any, body: Any, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Write float32 logits [rows, vocab] of the tokens `rows`, int64, to `out`. body: as a step's on_body got it."""
    with torch.inference_mode():
        out.copy_(model(use_cache=False, logits_to_keep=rows, kvrail_body=body).logits[0])


def _call(
    model: Any,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor | int,
    step: AttentionStep,
    result: torch.Tensor | None = None,
) -> torch.Tensor:
    with torch.inference_mode():
        out = model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            kvrail_step=step,
        )
        logits: torch.Tensor = out.logits[0]
        return logits.float() if result is None else result.copy_(logits)


def _paged(model: Any, cache: PagedCache, slices: list[SequenceSlice]) -> torch.Tensor:
    inputs = step_inputs(cache, pack(slices, cache.layout.page_size), model.dtype)
    return _guarded(lambda: forward(model, inputs), model)


def _dense(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = (
            model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False).logits[0, -1].float()
        )
    return out


def _guarded(run: Callable[[], torch.Tensor], model: Any) -> torch.Tensor:
    """Call `run`; any failure of the model's own code becomes an UnsupportedModelError."""
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError, IndexError, NotImplementedError) as error:
        raise UnsupportedModelError(f"{type(model).__name__} does not run with paged attention: {error}") from error


def _projections(model: Any, layers: tuple[torch.nn.Module, ...]) -> tuple[tuple[str, ...], ...]:
    tokens = torch.arange(3, device=model.device)
    with observe_projections(layers) as groups:
        _call(model, tokens, tokens, tokens, _Recorder())
    return tuple(tuple(group) for group in groups)


def _reporter(index: int) -> Callable[..., None]:
    """A forward hook that reports to the step's observer that layer `index` has been enqueued."""

    def report(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        step: AttentionStep | None = kwargs.get("kvrail_step")
        if step is not None and step.on_layer is not None:
            step.on_layer(index)

    return report


def _keep_body(model: Any) -> None:
    """Let a step see what the model gives to its head, and let `head` give that to it again.

    Where the model calls its base in another way, no step sees any.
    """
    base = model.base_model
    compute = base.forward

    @functools.wraps(compute)
    def forward(*args: Any, kvrail_body: Any = None, **kwargs: Any) -> Any:
        if kvrail_body is not None:
            return kvrail_body
        found, step = compute(*args, **kwargs), kwargs.get("kvrail_step")
        if step is not None and step.on_body is not None:
            step.on_body(found)
        return found

    if base is not model:
        base.forward = forward


def _decoder_layers(model: torch.nn.Module, attentions: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """For each attention module, the largest module around it that contains no other attention module."""
    names = {id(module): name for name, module in model.named_modules()}
    paths = [names[id(module)].split(".") for module in attentions]
    layers = []
    for path in paths:
        depth = len(path)
        while depth > 1 and sum(other[: depth - 1] == path[: depth - 1] for other in paths) == 1:
            depth -= 1
        layers.append(model.get_submodule(".".join(path[:depth])))
    return layers
