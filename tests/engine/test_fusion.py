"""Projections of one input: found, joined without changing a value, and computed once."""

from dataclasses import replace

import torch
from torch import nn

from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.model import fusion
from kvrail.engine.model.fusion import compile_layers, join_projections, merge_equal_products
from kvrail.engine.model.linear import JointLinear
from kvrail.engine.step.runner import ModelRunner
from tests.engine import tiny_models


def step(runner: ModelRunner) -> torch.Tensor:
    return runner.execute([SequenceSlice(list(range(20)), 0, [0, 1], 1)])


def test_finds_projections_by_their_input() -> None:
    wanted = {("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")}
    assert set(tiny_models.load("llama").projections) == wanted
    assert set(tiny_models.load("qwen2").projections) == wanted
    assert set(tiny_models.load("phi3").projections) == set()  # its checkpoints join them already


def test_joined_projections_compute_the_same() -> None:
    for name in ("llama", "qwen2"):
        loaded = tiny_models.load(name, dtype="bfloat16")  # in float32 a CPU has other linear layers
        loaded = replace(loaded, model=loaded.model.float(), dtype=torch.float32)
        runner = ModelRunner(loaded, 8, max_running=2, max_batch_tokens=64)
        before, count = step(runner), sum(p.numel() for p in loaded.model.parameters())
        for layer in loaded.layers:
            join_projections(layer, loaded.projections)
        assert sum(isinstance(m, JointLinear) for m in loaded.model.modules()) == 5 * len(loaded.layers)
        assert sum(p.numel() for p in loaded.model.parameters()) == count
        torch.testing.assert_close(step(runner), before, rtol=1e-5, atol=1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.other = nn.Linear(8, 4), nn.Linear(8, 6), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.gate(x), self.up(x), self.other(x + 1)], -1)


def test_equal_products_are_computed_once() -> None:
    block, x = Block(), torch.randn(3, 8)
    before = block(x)
    join_projections(block, [["gate", "up"]])
    traced = inline(block)
    assert merge_equal_products(traced.graph) == 1
    traced.recompile()
    assert sum(node.target is nn.functional.linear for node in traced.graph.nodes) == 2
    torch.testing.assert_close(traced(x), before)


def test_products_of_other_arguments_are_kept() -> None:
    traced = inline(Block())
    assert merge_equal_products(traced.graph) == 0


def test_a_layer_is_compiled_once_for_steps_of_all_shapes(monkeypatch) -> None:
    """Code for another number of tokens would add in another order (kvrail.engine.step.runner._COMPILED_FOR)."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(fusion, "_backend", backend)
    layer, groups = nn.TransformerEncoderLayer(64, 4), []
    compile_layers([layer], groups)
    for tokens, sequences in ((64, 64), (64, 3), (5, 64), (3, 2)):
        layer(torch.zeros(tokens, sequences, 64))
    assert len(compiled) == 1


def inline(block: nn.Module) -> torch.fx.GraphModule:
    """The block as one graph in which equal attributes are one node, as torch.compile hands it to a backend."""

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return False

    graph = Tracer().trace(block)
    first: dict[int, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            kept = first.setdefault(id(attribute(block, node.target)), node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)
    return torch.fx.GraphModule(block, graph)


def attribute(module: nn.Module, path: str) -> object:
    for part in path.split("."):
        module = getattr(module, part)
    return module
