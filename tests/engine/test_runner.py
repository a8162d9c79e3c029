"""Packed paged steps against transformers' own dense forward pass, for many architectures."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import kvrail.engine.step.runner
from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.batch.inputs import step_inputs
from kvrail.engine.batch.packing import pack
from kvrail.engine.model.loader import LoadedModel
from kvrail.engine.model.onednn_linear import mean_weights
from kvrail.engine.step.graphs import batch_sizes, token_sizes
from kvrail.engine.step.runner import ModelRunner
from tests.engine import tiny_models
from tests.engine.attention_cases import poison

TOLERANCE = 1e-4


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(tiny_models.VOCAB), k=count)


def poisoned_runner(loaded, num_pages: int = 64, **options) -> ModelRunner:
    runner = ModelRunner(loaded, num_pages, **{"max_running": 8, "max_batch_tokens": 256, **options})
    for layer in range(loaded.layout.num_layers):
        poison(runner.cache.layer(layer))
    return runner


def run_schedule(runner: ModelRunner, sequences: list[list[int]], chunks: list[list[int]], seed: int) -> dict:
    """Feed each sequence in its chunks, several a step, on shuffled pages; logits by (sequence, position)."""
    choice = random.Random(seed)
    size = runner.loaded.layout.page_size
    pages = choice.sample(range(runner.cache.num_pages), runner.cache.num_pages)
    tables = [[pages.pop() for _ in range(-(-len(ids) // size))] for ids in sequences]
    waiting = [list(c) for c in chunks]
    done, logits = [0] * len(sequences), {}
    while any(waiting):
        ready = [i for i, left in enumerate(waiting) if left]
        chosen = choice.sample(ready, choice.randint(1, len(ready)))
        slices, wanted = [], []
        for i in chosen:
            count = waiting[i].pop(0)
            wants = choice.choice([0, 1, 1, choice.randint(1, count), count])
            slices.append(SequenceSlice(sequences[i][done[i] : done[i] + count], done[i], tables[i], wants))
            done[i] += count
            wanted += [(i, position) for position in range(done[i] - wants, done[i])]
        for place, row in zip(wanted, runner.execute(slices), strict=True):
            logits[place] = row.clone()
    return logits


def errors(name: str, sequences: list[list[int]], logits: dict) -> list[float]:
    dense = [tiny_models.dense_logits(name, ids) for ids in sequences]
    return [float((row - dense[i][at]).norm() / dense[i][at].norm()) for (i, at), row in logits.items()]


@pytest.mark.parametrize("name", tiny_models.SERVED)
def test_matches_dense_forward(name: str) -> None:
    runner = poisoned_runner(tiny_models.load(name))
    sequences = [tokens(75, 1), tokens(41, 2), tokens(33, 3)]
    chunks = [[23, 27, 17, 1, 1, 6], [37, 1, 1, 1, 1], [1, 1, 31]]
    logits = run_schedule(runner, sequences, chunks, seed=4)
    assert len(logits) > 5
    assert max(errors(name, sequences, logits)) <= TOLERANCE


@pytest.mark.parametrize("name", [name for name in tiny_models.SERVED if name not in ("gpt2", "opt")])
def test_the_head_again_for_some_rows(name: str) -> None:
    """As captured steps compute it. The two others' heads call parts of their bases, so no step sees a body."""
    runner, bodies = poisoned_runner(tiny_models.load(name)), []
    packed = pack([SequenceSlice(tokens(20, 1), 0, range(2), 20)], runner.loaded.layout.page_size)
    inputs = step_inputs(runner.cache, packed, runner.loaded.dtype)
    logits = runner.loaded.logits(replace(inputs, step=replace(inputs.step, on_body=bodies.append)))
    rows, again = torch.tensor([19, 0, 7, 7]), torch.full((4, logits.shape[1]), torch.nan)
    runner.loaded.head(*bodies, rows, again)
    assert torch.allclose(again, logits[rows], rtol=1e-5, atol=1e-6)


def test_batch_of_decodes_of_uneven_length() -> None:
    runner = poisoned_runner(tiny_models.load("llama"), num_pages=128, max_running=16, max_batch_tokens=1024)
    sequences = [tokens(n, n) for n in (3, 15, 16, 17, 18, 60, 100, 200, 31, 33)]
    chunks = [[len(ids) - 2, 1, 1] for ids in sequences]
    logits = run_schedule(runner, sequences, chunks, seed=5)
    assert max(errors("llama", sequences, logits)) <= TOLERANCE


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e5m2", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_rounded_pages_do_not_depend_on_the_schedule(name: str, kv_dtype: str) -> None:
    loaded = tiny_models.load(name, kv_dtype=kv_dtype)
    sequences = [tokens(50, 6), tokens(30, 7)]
    whole = run_schedule(poisoned_runner(loaded), sequences, [[49, 1], [29, 1]], seed=1)
    rounding = max(errors(name, sequences, whole))
    assert 1e-4 < rounding < 0.5  # the pages did round
    for seed in (2, 3):
        chunked = run_schedule(poisoned_runner(loaded), sequences, [[7, 30, 12, 1], [1, 28, 1]], seed)
        for place in whole.keys() & chunked.keys():
            # Not equal: an element that lies between two stored values may go either way.
            assert (whole[place] - chunked[place]).norm() <= 0.2 * rounding * whole[place].norm()


def test_reports_each_layer_once_in_order() -> None:
    runner = poisoned_runner(tiny_models.load("gemma3_text"))
    seen = []
    runner.execute([SequenceSlice(tokens(9, 8), 0, [3], 0)], seen.append)
    assert seen == [0, 1, 2]
    runner.execute([SequenceSlice(tokens(9, 8), 0, [4], 0)])
    assert seen == [0, 1, 2]


def test_a_layers_pages_are_complete_when_it_is_reported() -> None:
    runner = poisoned_runner(tiny_models.load("llama"))
    caught = []
    runner.execute(
        [SequenceSlice(tokens(9, 8), 0, [3], 1)], lambda i: caught.append(runner.cache.tensors["keys"][i, 3].clone())
    )
    assert all(
        torch.equal(then[:9], now[:9]) for then, now in zip(caught, runner.cache.tensors["keys"][:, 3], strict=True)
    )
    assert all(then[:9].isfinite().all() for then in caught)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e5m2"])
def test_a_page_can_be_copied_before_the_step(kv_dtype: str) -> None:
    loaded = tiny_models.load("llama", kv_dtype=kv_dtype)
    runner, size = poisoned_runner(loaded), loaded.layout.page_size
    ids = tokens(2 * size, 9)
    runner.execute([SequenceSlice(ids[:-1], 0, [3, 5], 0)])
    before = runner.cache.tensors["keys"][:, 5].clone()
    apart = runner.execute([SequenceSlice(ids[-1:], len(ids) - 1, [3, 8], 1, copied_page=5)]).clone()
    assert torch.equal(runner.cache.tensors["keys"][:, 5].view(torch.uint8), before.view(torch.uint8))
    assert torch.equal(apart, runner.execute([SequenceSlice(ids[-1:], len(ids) - 1, [3, 5], 1)]))


def test_two_runners_share_a_model() -> None:
    loaded = tiny_models.load("llama")
    first, second = poisoned_runner(loaded), poisoned_runner(loaded)
    ids = tokens(40, 9)
    first.execute([SequenceSlice(ids[:39], 0, [1, 2, 3], 0)])
    for own, other in (
        (first.cache.tensors["keys"], second.cache.tensors["keys"]),
        (first.cache.tensors["values"], second.cache.tensors["values"]),
    ):
        assert own[:, 1:3].isfinite().all() and other.isnan().all()
        other[:, 7:10] = own[:, 1:4]
    moved = second.execute([SequenceSlice(ids[39:], 39, [7, 8, 9], 1)])
    stayed = first.execute([SequenceSlice(ids[39:], 39, [1, 2, 3], 1)])
    assert torch.equal(moved, stayed)


def test_logits_rows_follow_the_slices() -> None:
    runner = poisoned_runner(tiny_models.load("llama"))
    a, b, c = tokens(20, 10), tokens(5, 11), tokens(1, 12)
    slices = [SequenceSlice(a, 0, [0, 1], 3), SequenceSlice(b, 0, [2], 0), SequenceSlice(c, 0, [3], 1)]
    rows = runner.execute(slices)
    assert rows.shape == (4, tiny_models.VOCAB) and rows.dtype == torch.float32
    for row, ids in zip(rows, (a[:-2], a[:-1], a, c), strict=True):
        assert (row - tiny_models.dense_logits("llama", ids)[-1]).norm() <= TOLERANCE * row.norm()
    assert runner.execute([SequenceSlice(b, 0, [2], 0)]).shape == (0, tiny_models.VOCAB)


def test_captured_batch_sizes_end_with_the_largest_step() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(8) == [1, 2, 4, 8]
    assert batch_sizes(40) == [1, 2, 4, 8, 16, 32, 40]
    assert batch_sizes(100)[-4:] == [48, 64, 96, 100]


def test_a_start_with_256_places_captures_few_sizes() -> None:
    assert len(batch_sizes(256)) + len(token_sizes(2048)) <= 39


def test_prompts_of_powers_of_two_are_not_padded() -> None:
    assert {64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192} <= set(token_sizes(16384))


@pytest.mark.parametrize("most", [1, 100, 512, 2048, 8192])
def test_captured_steps_are_at_most_an_eighth_larger(most: int) -> None:
    sizes = token_sizes(most)
    assert sizes[-1] == most and sizes == sorted(set(sizes))
    assert all(after <= (before + 1) * 9 / 8 for before, after in pairwise(sizes) if before >= 512)


def test_small_steps_take_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, cores, before = tiny_models.load("llama"), [], torch.get_num_threads()
    monkeypatch.setattr(kvrail.engine.step.runner, "_PRODUCTS_FOR_ALL_CORES", 5 * mean_weights(loaded.model))
    monkeypatch.setattr(LoadedModel, "logits", lambda self, inputs: cores.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        runner = poisoned_runner(loaded)
        for count in (1, 4, 5, 2):
            runner.execute([SequenceSlice([7] * count, 0, [0], 1)])
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert cores == [1, 1, 2, 1]


def test_refuses_steps_beyond_its_limits() -> None:
    runner = poisoned_runner(tiny_models.load("llama"), max_running=2, max_batch_tokens=8)
    with pytest.raises(ValueError, match="max_batch_tokens"):
        runner.execute([SequenceSlice([1] * 9, 0, [0], 1)])
    with pytest.raises(ValueError, match="max_running"):
        runner.execute([SequenceSlice([1], 0, [page], 1) for page in range(3)])
