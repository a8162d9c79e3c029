"""torch.compile for decoder layers, and projections of one input computed as one product.

A model computes query, key and value (or gate and up) as separate products of the same input; at decode's sizes each
of them is too small to fill the chip. Which projections belong together is observed, not named: linear modules of one
parent that were called with the same tensor. Their weights are joined, each module becomes a slice of the joint
product, and the compiler backend merges the equal products that this leaves.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import linear

from kvrail.engine.model.linear import method_of

logger = logging.getLogger(__name__)

_COMPILER = {"deterministic": True}
"""Of Inductor's settings: its kernels for sums, norms' among them, have block sizes that follow from the code alone.
By default it times candidates in each process, and the fastest decides in which order a sum is added: two workers of
one model would compute other bits."""


@contextmanager
def observe_projections(layers: Iterable[torch.nn.Module]) -> Iterator[list[list[str]]]:
    """While the block runs the model, note which linear modules share an input.

    Yields a list, filled at the end of the block: groups of sibling modules' names, relative to their layer, equal in
    all layers.
    """
    groups: list[list[str]] = []
    layers = list(layers)
    calls: list[dict[str, torch.Tensor]] = [{} for _ in layers]
    handles = [
        module.register_forward_pre_hook(_noting(seen, name))
        for layer, seen in zip(layers, calls, strict=True)
        for name, module in layer.named_modules()
        if method_of(module) is not None
    ]
    try:
        yield groups
    finally:
        for handle in handles:
            handle.remove()
    found = [_siblings(seen) for seen in calls]
    groups.extend(group for group in found[0] if all(group in other for other in found))


def _noting(seen: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    def note(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        seen[name] = args[0]

    return note


def _siblings(seen: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names with the same parent and the same input, two or more together."""
    together: dict[tuple[str, int], list[str]] = {}
    for name, given in seen.items():
        together.setdefault((name.rpartition(".")[0], id(given)), []).append(name)
    return [names for names in together.values() if len(names) > 1]


def join_projections(layer: torch.nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Join the weights of each group's modules in `layer`; they keep their values and take no more memory."""
    for names in groups:
        modules = [layer.get_submodule(name) for name in names]
        method, *others = {method_of(module) for module in modules}
        joined = [] if method is None or others else method.join(modules)
        for name, module in zip(names, joined, strict=False):
            parent, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(parent), leaf, module)


def compile_layers(layers: Iterable[torch.nn.Module], groups: Sequence[Sequence[str]]) -> None:
    """Compile each layer's forward, for any number of tokens; layers of one kind share their compiled code.

    Hooks on the layers stay outside of what is compiled. Calling it again changes nothing. The first step decides for
    how many tokens the code is tuned, and with that the order of sums: it must be the same on all workers.
    """
    torch.fx.experimental._config.use_duck_shape = False
    for layer in layers:
        if "forward" in vars(layer):
            continue
        join_projections(layer, groups)
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=_backend)


def _backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx  # two seconds, which only workers that compile spend

    merged = merge_equal_products(graph.graph)
    logger.debug("compiling a layer: %d equal products merged", merged)
    graph.recompile()
    return compile_fx(graph, inputs, config_patches=_COMPILER)


def merge_equal_products(graph: torch.fx.Graph) -> int:
    """Replace products of equal arguments by the first of them; returns how many were replaced.

    Products are torch's linear and the operations of our own namespace.
    """
    first: dict[Any, torch.fx.Node] = {}
    merged = 0
    for node in list(graph.nodes):
        ours = getattr(node.target, "namespace", "") == "kvrail"
        if node.op != "call_function" or not (node.target is linear or ours):
            continue
        key = (node.args, tuple(sorted(node.kwargs.items())))
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
            merged += 1
        else:
            first[key] = node
    return merged
