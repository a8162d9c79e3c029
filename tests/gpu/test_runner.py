"""Whole models on CUDA: float32 against a CPU, served types against float64, captured steps against eager ones."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from kvrail.engine.batch.batch import Feed, SampleRow, SequenceSlice  # noqa: E402
from kvrail.engine.batch.packing import pack  # noqa: E402
from kvrail.engine.sampling.mask_kernel import _mask_kernel  # noqa: E402
from kvrail.engine.sampling.masks import Masks  # noqa: E402
from kvrail.engine.sampling.sampler import Sampler  # noqa: E402
from kvrail.engine.sampling.sampling_kernels import _draw_kernel  # noqa: E402
from kvrail.engine.step.runner import ModelRunner  # noqa: E402
from kvrail.values.sampling import SamplingParams  # noqa: E402
from kvrail.worker.pages import paged_block  # noqa: E402
from tests.engine import tiny_models  # noqa: E402
from tests.engine.mixed_steps import steps_of  # noqa: E402
from tests.engine.test_runner import TOLERANCE, errors, poisoned_runner, run_schedule, tokens  # noqa: E402

SEQUENCES = [tokens(75, 1), tokens(41, 2), tokens(33, 3)]
CHUNKS = [[23, 27, 17, 1, 1, 6], [37, 1, 1, 1, 1], [1, 1, 31]]
PREFIXED = [*SEQUENCES, tokens(60, 4)]
VERIFIED = [33, 1, 6, 1]
"""Of each of PREFIXED, so many tokens come over a cached prefix: drafts that are verified, beside decodes."""


@pytest.mark.parametrize("name", tiny_models.SERVED)
def test_float32_matches_dense_forward(name: str) -> None:
    loaded = tiny_models.load(name, device="cuda", dtype="float32")
    logits = run_schedule(poisoned_runner(loaded), SEQUENCES, CHUNKS, seed=4)
    assert max(errors(name, SEQUENCES, {place: row.cpu() for place, row in logits.items()})) <= TOLERANCE


def after_prefix(runner: ModelRunner, counts: list[int], *, at_once: bool) -> tuple[torch.Tensor, ...]:
    """Logits of the last counts[i] tokens of PREFIXED[i] over what is cached of it, in one step or token by token."""
    tables = [list(range(5 * i, 5 * i + 5)) for i in range(len(PREFIXED))]
    begins = [len(ids) - count for ids, count in zip(PREFIXED, counts, strict=True)]
    every = list(zip(PREFIXED, begins, tables, strict=True))
    runner.execute([SequenceSlice(ids[:begin], 0, table, 0) for ids, begin, table in every])
    if at_once:
        slices = [SequenceSlice(ids[begin:], begin, table, len(ids) - begin) for ids, begin, table in every]
        return runner.execute(slices).clone().split(counts)
    steps = ((SequenceSlice(ids[at : at + 1], at, table, 1) for at in range(b, len(ids))) for ids, b, table in every)
    return tuple(torch.cat([runner.execute([each]).clone() for each in slices]) for slices in steps)


@pytest.mark.parametrize("name", tiny_models.SERVED)
def test_many_logits_over_a_prefix_beside_decodes(name: str) -> None:
    loaded = tiny_models.load(name, device="cuda", dtype="float32")
    found = after_prefix(poisoned_runner(loaded), VERIFIED, at_once=True)
    singly = after_prefix(poisoned_runner(loaded), VERIFIED, at_once=False)
    for ids, count, rows, other in zip(PREFIXED, VERIFIED, found, singly, strict=True):
        dense = tiny_models.dense_logits(name, ids)[-count:]
        assert ((rows.cpu() - dense).norm(dim=1) <= TOLERANCE * dense.norm(dim=1)).all()
        assert ((rows - other).norm(dim=1) <= TOLERANCE * other.norm(dim=1)).all()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral"])
def test_bfloat16_is_as_near_to_float64_as_transformers(name: str) -> None:
    loaded = tiny_models.load(name, device="cuda", kv_dtype="bfloat16")
    logits = run_schedule(poisoned_runner(loaded), SEQUENCES, CHUNKS, seed=4)
    wide = copy.deepcopy(tiny_models.dense_model(name)).double()
    half = copy.deepcopy(tiny_models.dense_model(name)).to("cuda", torch.bfloat16)
    ours, theirs = [], []
    with torch.no_grad():
        exact = [wide(torch.tensor([ids]), use_cache=False).logits[0] for ids in SEQUENCES]
        rounded = [half(torch.tensor([ids]).cuda(), use_cache=False).logits[0].cpu() for ids in SEQUENCES]
    for (i, at), row in logits.items():
        norm = exact[i][at].norm()
        ours.append(float((row.cpu().double() - exact[i][at]).norm() / norm))
        theirs.append(float((rounded[i][at].double() - exact[i][at]).norm() / norm))
    assert sum(ours) / len(ours) < 1.5 * sum(theirs) / len(theirs) < 0.3


def graph_runner(name: str, *, compile: bool, kv_dtype: str = "bfloat16", **options: object) -> ModelRunner:
    torch._dynamo.reset()
    loaded = tiny_models.load(name, device="cuda", kv_dtype=kv_dtype, **options)
    runner = ModelRunner(loaded, 96, max_running=12, max_batch_tokens=256, cuda_graphs=True, compile=compile)
    runner.warm_up()
    return runner


def decode_steps(runner: ModelRunner, batch: int, prefill: ModelRunner | None = None) -> list[torch.Tensor]:
    """Prefill `batch` sequences of uneven length, by runner `prefill` if given, then four decode steps."""
    tables = [list(range(6 * i, 6 * i + 6)) for i in range(batch)]
    ids = [tokens(20 + 5 * i, i) for i in range(batch)]
    for seq, table in zip(ids, tables, strict=True):
        (prefill or runner).execute([SequenceSlice(seq[:-4], 0, table, 0)])
    if prefill is not None:
        runner.cache.tensors["keys"].copy_(prefill.cache.tensors["keys"])
        runner.cache.tensors["values"].copy_(prefill.cache.tensors["values"])
    found = []
    for step in range(4, 0, -1):
        slices = [
            SequenceSlice(seq[len(seq) - step :][:1], len(seq) - step, table, 1)
            for seq, table in zip(ids, tables, strict=True)
        ]
        found.append(runner.execute(slices).clone())
    return found


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
def test_captured_steps_equal_eager_ones(name: str) -> None:
    captured = graph_runner(name, compile=False)
    eager = ModelRunner(captured.loaded, 96, max_running=12, max_batch_tokens=256, cuda_graphs=False, compile=False)
    for batch in (1, 4, 12):  # batch sizes that have a graph of their own: the same kernels in the same shapes
        for one, other in zip(decode_steps(captured, batch, eager), decode_steps(eager, batch), strict=True):
            assert torch.equal(one, other)
    for batch in (3, 9, 11):
        for one, other in zip(decode_steps(captured, batch), decode_steps(eager, batch), strict=True):
            assert (one - other).norm() < 0.03 * other.norm()


def note(seen: list[tuple[int, torch.Tensor]], runner: ModelRunner, layer: int) -> None:
    seen.append((layer, runner.cache.tensors["keys"][layer].clone()))


def bits(runner: ModelRunner) -> list[torch.Tensor]:
    return [pool.view(torch.uint8).clone() for pool in runner.cache.as_block()]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("compile", [False, True], ids=["as it is", "compiled"])
def test_captured_chunks_equal_the_same_step_enqueued(name: str, kv_dtype: str, compile: bool) -> None:
    """The same padded step through its graphs and kernel by kernel: the same kernels on the same rows."""
    runner = graph_runner(name, compile=compile, kv_dtype=kv_dtype)
    eager = ModelRunner(runner.loaded, 96, max_running=12, max_batch_tokens=256, cuda_graphs=False, compile=False)
    graphs, size = runner._graphs, runner.loaded.layout.page_size
    assert graphs is not None
    captured = 0
    for slices in steps_of([tokens(n, n) for n in (70, 33, 50, 5, 41)], seed=3):
        packed = pack(slices, size)
        seen: list[tuple[int, torch.Tensor]] = []
        logits = graphs.run(packed, partial(note, seen, runner))
        assert logits is not None
        logits, pages = logits.clone(), bits(runner)
        assert [layer for layer, _ in seen] == [0, 1, 2]
        for layer, then in seen:  # what a layer stores is there when the layer is told of
            assert torch.equal(then.view(torch.uint8), runner.cache.tensors["keys"][layer].view(torch.uint8))
        step = graphs._size_for(packed, grouped=True)
        assert step is not None
        again = runner.loaded.logits(graphs._inputs(step.buffer, None))[: len(packed.logit_rows)]
        assert torch.equal(logits, again)
        assert all(torch.equal(one, other) for one, other in zip(pages, bits(runner), strict=True))
        own = eager.execute(slices)  # unpadded: products of other sizes may take other kernels, which round otherwise
        if name != "gpt_oss":  # there rounding changes which experts a token takes
            assert (logits - own).norm() <= 0.05 * own.norm()
        captured += 1
    assert captured > 3


@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "enqueued"])
def test_tokens_that_the_host_does_not_know(graphs: bool) -> None:
    """A decode step and a mixed one take tokens from the device, in another order than they were drawn in."""
    loaded = tiny_models.load("llama", device="cuda", kv_dtype="bfloat16")
    runner = ModelRunner(loaded, 96, max_running=12, max_batch_tokens=256, cuda_graphs=graphs, compile=False)
    runner.warm_up()
    tables = [list(range(6 * i, 6 * i + 6)) for i in range(4)]
    ids = [tokens(20 + 5 * i, i) for i in range(4)]
    runner.execute([SequenceSlice(seq[:-1], 0, table, 0) for seq, table in zip(ids, tables, strict=True)])
    drawn = torch.tensor([seq[-1] for seq in ids], device="cuda")
    order = [2, 0, 3]
    for rest in ([], [SequenceSlice(tokens(30, 9), 0, list(range(40, 46)), 1)]):
        known = [SequenceSlice(ids[i][-1:], len(ids[i]) - 1, tables[i], 1) for i in order] + rest
        unknown = [SequenceSlice([0], len(ids[i]) - 1, tables[i], 1) for i in order] + rest
        wanted = runner.execute(known).clone()
        assert torch.equal(runner.execute(unknown, None, Feed(drawn, order)), wanted)


def test_a_captured_decode_step_draws_what_the_sampler_does() -> None:
    """Greedy rows and random ones; then a step is fed by such draws, and one by draws that the sampler made."""
    runner = graph_runner("llama", compile=False)
    sampler = Sampler(runner.loaded.vocab_size, torch.device("cuda"))
    kinds = [{"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 2.0, "top_k": 5, "top_p": 0.8}]
    asked = [SamplingParams(max_tokens=9, seed=i, **kinds[i % 3]) for i in range(5)]
    tables = [list(range(6 * i, 6 * i + 6)) for i in range(5)]
    ids = [tokens(20 + 5 * i, i) for i in range(5)]
    runner.execute([SequenceSlice(seq[:-1], 0, table, 0) for seq, table in zip(ids, tables, strict=True)])
    assert runner.extras.drawn is None
    for random in (True, False, True):
        rows = [SampleRow(asked[i if random else 0], 0, len(ids[i]), ids[i], []) for i in range(5)]
        step = [SequenceSlice(ids[i][-1:], len(ids[i]) - 1, tables[i], 1) for i in range(5)]
        logits = runner.execute(step, None, None, sampler.params_of(rows))
        assert runner.extras.drawn is not None
        drawn, wanted = runner.extras.drawn.tolist(), [each.token_id for each in sampler.sample(logits, rows)]
        assert drawn == wanted
        order = [3, 1, 4]
        known = [SequenceSlice([wanted[i]], len(ids[i]), tables[i], 1) for i in order]
        unknown = [SequenceSlice([0], len(ids[i]), tables[i], 1) for i in order]
        expected = runner.execute(known).clone()
        assert runner.extras.drawn is None
        for own in (True, False):
            runner.execute(step, None, None, sampler.params_of(rows))
            assert torch.equal(
                runner.execute(
                    unknown, None, Feed(runner.extras.drawn.clone() if not own else runner.extras.drawn, order)
                ),
                expected,
            )


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_many_logits_over_a_prefix_match_captured_steps(name: str) -> None:
    runner = graph_runner(name, compile=False)
    singly = after_prefix(runner, VERIFIED, at_once=False)
    for rows, other in zip(after_prefix(runner, VERIFIED, at_once=True), singly, strict=True):
        assert (rows - other).norm() < 0.03 * other.norm()


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_compiled_layers_match_eager_ones(name: str) -> None:
    options = {"max_running": 12, "max_batch_tokens": 256, "cuda_graphs": False, "compile": False}
    eager = ModelRunner(tiny_models.load(name, device="cuda", kv_dtype="bfloat16"), 96, **options)
    compiled = graph_runner(name, compile=True)
    seen = []
    compiled.execute([SequenceSlice(tokens(40, 1), 0, [0, 1, 2], 0)], seen.append)
    assert seen == [0, 1, 2]
    counters = torch._dynamo.utils.counters
    graphs = counters["stats"]["unique_graphs"]
    assert not counters["graph_break"]
    for batch in (1, 3, 8):
        for one, other in zip(decode_steps(compiled, batch), decode_steps(eager, batch), strict=True):
            assert (one - other).norm() < 0.05 * other.norm()
    assert counters["stats"]["unique_graphs"] == graphs  # warm_up compiled all there is


def test_float32_compiled_and_captured_matches_dense_forward() -> None:
    torch._dynamo.reset()
    loaded = tiny_models.load("qwen3", device="cuda", dtype="float32")
    runner = ModelRunner(loaded, 64, max_running=8, max_batch_tokens=256)
    runner.warm_up()
    logits = run_schedule(runner, SEQUENCES, CHUNKS, seed=4)
    assert max(errors("qwen3", SEQUENCES, {place: row.cpu() for place, row in logits.items()})) <= TOLERANCE


def test_pages_move_between_pools_bit_for_bit() -> None:
    loaded = tiny_models.load("llama", device="cuda", kv_dtype="float8_e4m3fn")
    first, second = poisoned_runner(loaded), poisoned_runner(loaded)
    ids = tokens(40, 9)
    first.execute([SequenceSlice(ids[:39], 0, [1, 2, 3], 0)])
    source, target = (paged_block(r.cache, range(3), ids) for r, ids in ((first, [1, 2, 3]), (second, [7, 8, 9])))
    target.scatter(source.gather())
    moved = second.execute([SequenceSlice(ids[39:], 39, [7, 8, 9], 1)])
    assert torch.equal(moved, first.execute([SequenceSlice(ids[39:], 39, [1, 2, 3], 1)]))


def test_after_a_warm_up_nothing_that_draws_is_compiled() -> None:
    compiled = [kernel.device_caches[torch.cuda.current_device()][0] for kernel in (_draw_kernel, _mask_kernel)]
    sampler = Sampler(4096, torch.device("cuda"))
    sampler.warm_up()
    before = [len(each) for each in compiled]
    assert all(before)
    logits = torch.randn(7, 4096, device="cuda")
    params = SamplingParams(max_tokens=1, temperature=0.8, top_k=5, logprobs=3, logit_bias={1: 2.0})
    masks = Masks(np.full((3, 128), -1, np.int32), np.arange(7, dtype=np.int32) % 3)
    sampler.begin(logits, [SampleRow(params, 0, 9, [1], [2])] * 7, masks).wait()
    sampler.begin(logits[2:5], [SampleRow(replace(params, logprobs=None), 1, 9, [1], [2])] * 3).wait()
    assert [len(each) for each in compiled] == before
