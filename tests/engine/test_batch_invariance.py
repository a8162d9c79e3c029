"""On a CPU in float32 a token's logits and KV do not depend on what is computed beside it, bit for bit."""

import pytest
import torch

from kvrail.engine.attention import cpu
from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.model.loader import LoadedModel, load_model
from kvrail.engine.step.runner import ModelRunner
from tests.engine import tiny_models
from tests.engine.test_runner import poisoned_runner, run_schedule, tokens

# Not: mixtures of experts, where tokens meet in the products of an expert.
DENSE = ("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "cohere2", "gpt2")
DEMO = "models/kvrail-demo"


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch):
    """As workers have them, whatever the tests' own process was given: work may be shared out otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(cpu, "_THREADS", 2)
    monkeypatch.setattr(cpu, "_PRODUCTS_PER_THREAD", 1 << 16)
    yield
    torch.set_num_threads(before)


def demo(kv_dtype: str) -> LoadedModel:
    return load_model(DEMO, device="cpu", dtype="float32", kv_dtype=kv_dtype, page_size=16, load_format="safetensors")


def one_by_one(runner: ModelRunner, ids: list[int], table: range) -> torch.Tensor:
    """Logits of every token of a sequence that is computed token by token, alone."""
    rows = [runner.execute([SequenceSlice([token], at, table, 1)]) for at, token in enumerate(ids)]
    return torch.cat([row.clone() for row in rows])


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("name", DENSE)
def test_chunks_and_other_sequences_change_nothing(name: str) -> None:
    loaded = tiny_models.load(name)
    sequences = [tokens(40, 1), tokens(11, 2), tokens(70, 3)]
    chunks = [[17, 20, 1, 1, 1], [7, 1, 1, 2], [1, 1, 65, 3]]
    logits = run_schedule(poisoned_runner(loaded), sequences, chunks, seed=4)
    size = loaded.layout.page_size
    for number, ids in enumerate(sequences):
        alone = one_by_one(poisoned_runner(loaded), ids, range(-(-len(ids) // size)))
        for (sequence, position), row in logits.items():
            if sequence == number:
                assert_same_bits(row, alone[position])


@pytest.mark.parametrize("kv_dtype, begin", [("bfloat16", 70), ("float32", 808)])
def test_verifying_many_tokens_leaves_the_kv_of_one_at_a_time(kv_dtype: str, begin: int) -> None:
    loaded, ids = demo(kv_dtype), tokens(begin + 40, 5)
    pages = -(-len(ids) // loaded.layout.page_size)
    pools, logits = [], []
    for sizes in ([1] * 40, [33, 1, 6], [3, 37]):
        runner, at, rows = poisoned_runner(loaded, max_batch_tokens=1000), begin, []
        runner.execute([SequenceSlice(ids[:begin], 0, range(pages), 0)])
        for size in sizes:
            rows.append(runner.execute([SequenceSlice(ids[at : at + size], at, range(pages), size)]).clone())
            at += size
        logits.append(torch.cat(rows))
        pools.append(
            torch.cat(
                [runner.cache.tensors["keys"][:, :pages].flatten(), runner.cache.tensors["values"][:, :pages].flatten()]
            )
        )
    for pool, rows in zip(pools[1:], logits[1:], strict=True):
        assert_same_bits(rows, logits[0])
        assert torch.equal(pool.view(torch.uint8), pools[0].view(torch.uint8))


def test_a_prompt_at_once_and_in_chunks_leaves_the_same_kv() -> None:
    length = 400
    loaded, ids = demo("bfloat16"), tokens(length, 6)
    pages = -(-length // loaded.layout.page_size)
    pools = []
    for chunk in (length, 64, 37):
        runner = poisoned_runner(loaded, max_batch_tokens=1000)
        for at in range(0, length, chunk):
            runner.execute([SequenceSlice(ids[at : at + chunk], at, range(pages), 0)])
        flat = [pool[:, :pages].flatten(1, 2)[:, :length] for pool in runner.cache.tensors.values()]
        pools.append(torch.cat(flat))
    for pool in pools[1:]:
        assert torch.equal(pool.view(torch.int16), pools[0].view(torch.int16))
