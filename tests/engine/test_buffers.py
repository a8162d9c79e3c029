"""Steps of fixed size, as CUDA graphs replay them, with the GPU's attention in Triton's interpreter on a CPU."""

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu replays captured steps on this machine", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below

from kvrail.engine.attention import cpu, cuda
from kvrail.engine.attention.step import PagedStep
from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.batch.inputs import StepInputs
from kvrail.engine.batch.packing import pack
from kvrail.engine.step.buffers import StepBuffer, StepSize, decode_size, mixed_size
from kvrail.engine.step.runner import ModelRunner
from tests.engine import tiny_models
from tests.engine.mixed_steps import steps_of
from tests.engine.test_runner import poisoned_runner, tokens

TOLERANCE = 1e-5
WIDTH = 6


@pytest.fixture
def on_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator takes the GPU's path."""
    monkeypatch.setattr(cuda, "_processors", lambda device: 1)
    monkeypatch.setattr(cpu, "paged_attention", cuda.paged_attention)


class FixedSize:
    """One step of fixed size over a runner's pages, filled again and again as a captured one is."""

    def __init__(self, runner: ModelRunner, size: StepSize) -> None:
        self.runner = runner
        self.buffer = StepBuffer(size, torch.device("cpu"))

    def run(self, slices: list[SequenceSlice]) -> torch.Tensor:
        packed, size, there = pack(slices, self.runner.loaded.layout.page_size), self.buffer.size, self.buffer.there
        self.buffer.fill(packed)
        self.buffer.send()
        step = PagedStep.over(self.runner.cache, there.data, size.extents.plan())
        rows = there.logit_rows if size.logit_rows else 0
        inputs = StepInputs(there.token_ids, there.positions, rows, size.logit_rows or size.extents.tokens, step)
        return self.runner.loaded.logits(inputs)[: len(packed.logit_rows)]


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_oss", marks=pytest.mark.heavy)])
def test_a_step_of_fixed_size_computes_what_one_of_its_own_size_does(name: str, request: pytest.FixtureRequest) -> None:
    loaded = tiny_models.load(name)
    own, fixed = poisoned_runner(loaded), poisoned_runner(loaded)
    steps = steps_of([tokens(n, n) for n in (21, 9, 5)], seed=3)
    wanted = [own.execute(slices).clone() for slices in steps]
    request.getfixturevalue("on_gpu_kernels")
    sized = FixedSize(fixed, mixed_size(40, 4, WIDTH, loaded.layout.num_kv_heads, 40, queries=16))
    for slices, logits in zip(steps, wanted, strict=True):
        found = sized.run(slices)
        assert found.shape == logits.shape
        assert (found - logits).norm() <= TOLERANCE * logits.norm()
    for ours, theirs in zip(fixed.cache.as_block(), own.cache.as_block(), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())  # padding stored nothing
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_padding_rows_of_decodes_store_nothing(request: pytest.FixtureRequest) -> None:
    loaded = tiny_models.load("llama")
    own, fixed = poisoned_runner(loaded), poisoned_runner(loaded)
    sequences = [tokens(20, 1), tokens(9, 2), tokens(17, 3)]
    tables = [[1, 2], [3], [4, 5]]
    for runner in (own, fixed):
        runner.execute([SequenceSlice(ids[:-3], 0, table, 0) for ids, table in zip(sequences, tables, strict=True)])
    wanted = []
    steps = []
    for left in (3, 2, 1):
        chosen = list(zip(sequences, tables, strict=True))[: left + 1]
        steps.append([SequenceSlice([ids[-left]], len(ids) - left, table, 1) for ids, table in chosen])
        wanted.append(own.execute(steps[-1]).clone())
    request.getfixturevalue("on_gpu_kernels")
    sized = FixedSize(fixed, decode_size(8, WIDTH, loaded.layout.num_kv_heads))
    for slices, logits in zip(steps, wanted, strict=True):
        assert (sized.run(slices) - logits).norm() <= TOLERANCE * logits.norm()
    assert torch.equal(fixed.cache.tensors["keys"].isnan(), own.cache.tensors["keys"].isnan())
