"""On CUDA a token's KV and logits are the same bits alone, among others, in any chunks and in a verification."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from kvrail.engine.attention import reference  # noqa: E402
from kvrail.engine.attention.triton import decode_kernel, order  # noqa: E402
from kvrail.engine.attention.triton.decode_kernel import DecodeTuning, decode_attention  # noqa: E402
from kvrail.engine.attention.triton.order import HeadShape  # noqa: E402
from kvrail.engine.attention.triton.prefill_kernel import PrefillTuning, prefill_attention, queries_for  # noqa: E402
from kvrail.engine.batch.batch import SequenceSlice  # noqa: E402
from kvrail.engine.model.loader import LoadedModel, load_model  # noqa: E402
from kvrail.engine.step import invariance  # noqa: E402
from kvrail.engine.step.runner import ModelRunner  # noqa: E402
from tests.engine import tiny_models  # noqa: E402
from tests.engine.attention_cases import Case, make_case, shares  # noqa: E402
from tests.engine.test_runner import tokens  # noqa: E402
from tests.gpu.wide_model import wide_model  # noqa: E402

DEMO = "models/kvrail-demo"
MODELS = ("llama", "qwen3", "mistral", "gemma2", "demo")
LENGTH = 330
COMPANY = 63


def load(name: str, kv_dtype: str = "bfloat16") -> LoadedModel:
    if name != "demo":
        return tiny_models.load(name, device="cuda", kv_dtype=kv_dtype)
    return load_model(DEMO, device="cuda", dtype="auto", kv_dtype=kv_dtype, page_size=16, load_format="safetensors")


def runner_of(loaded: LoadedModel, *, graphs: bool = True, compile: bool = False) -> ModelRunner:
    torch._dynamo.reset()
    runner = ModelRunner(
        loaded, 260, max_running=COMPANY + 1, max_batch_tokens=2048, cuda_graphs=graphs, compile=compile
    )
    runner.warm_up()
    return runner


class Sequence:
    """One sequence in pages of its own, computed as the caller says; others stand beside it where asked for."""

    def __init__(self, runner: ModelRunner, ids: list[int]) -> None:
        self.runner, self.ids = runner, ids
        layout = runner.loaded.layout
        self.table = list(range(layout.pages_for(len(ids))))
        self.others = list(range(len(self.table), runner.cache.num_pages))
        self.at = 0
        self.logits: dict[int, torch.Tensor] = {}

    def step(self, count: int, logits: int = 0, company: int = 0, prompt: int = 0) -> None:
        """Compute so many tokens; company: decodes beside it; prompt: tokens of a prompt beside it."""
        size, end = self.runner.loaded.layout.page_size, self.at + count
        slices = [SequenceSlice(self.ids[self.at : end], self.at, self.table, logits)]
        slices += [SequenceSlice([i], i % size, [self.others[i]], 1) for i in range(company)]
        if prompt:
            slices.append(SequenceSlice(tokens(prompt, 5), 0, self.others[company:], 1))
        rows = self.runner.execute(slices)[:logits]
        self.logits |= {end - logits + i: row.clone() for i, row in enumerate(rows)}
        self.at = end

    def bits(self) -> list[torch.Tensor]:
        """KV of all tokens, every layer's, as bytes."""
        return [
            pool[:, self.table].flatten(1, 2)[:, : self.at].contiguous().view(torch.uint8).clone()
            for pool in self.runner.cache.as_block()
        ]


def singly(sequence: Sequence, begin: int) -> None:
    sequence.step(begin)
    while sequence.at < len(sequence.ids):
        sequence.step(1, 1)


def among_others(sequence: Sequence, begin: int) -> None:
    choice = random.Random(3)
    sequence.step(begin)
    while sequence.at < len(sequence.ids):
        company, prompt = choice.choice([(1, 0), (7, 90), (31, 0), (32, 90), (COMPANY, 0), (COMPANY - 1, 90)])
        sequence.step(1, 1, company, prompt)


def verified(sequence: Sequence, begin: int) -> None:
    sequence.step(begin)
    while sequence.at < len(sequence.ids):
        count = min(64, len(sequence.ids) - sequence.at)
        sequence.step(count, count, company=5)


def at_once(sequence: Sequence, begin: int) -> None:
    sequence.step(len(sequence.ids), len(sequence.ids) - begin)


def in_chunks(sequence: Sequence, begin: int) -> None:
    choice = random.Random(4)
    while sequence.at < begin:
        sequence.step(min(choice.choice([1, 2, 17, 64, 100]), begin - sequence.at), company=choice.choice([0, 3]))
    while sequence.at < len(sequence.ids):
        count = min(choice.choice([1, 2, 33]), len(sequence.ids) - sequence.at)
        sequence.step(count, count)


def after_a_prefix(sequence: Sequence, begin: int) -> None:
    """As after a hit of the prefix cache, or a preemption: full pages are there, the rest is computed again."""
    verified(sequence, begin)
    sequence.at = (len(sequence.ids) // 2) // sequence.runner.loaded.layout.page_size * 16
    kept = dict(sequence.logits)
    sequence.logits.clear()
    rest = len(sequence.ids) - sequence.at
    sequence.step(rest, min(rest, len(sequence.ids) - begin), prompt=70)
    assert sequence.logits.keys() <= kept.keys()


WAYS = [among_others, verified, at_once, in_chunks, after_a_prefix]


def differing(runner: ModelRunner, length: int = LENGTH, begin: int = 240) -> Iterator[str]:
    """Names of the ways that do not give the bits of computing token by token, alone."""
    wanted = Sequence(runner, tokens(length, 1))
    singly(wanted, begin)
    kv = wanted.bits()
    for way in WAYS:
        runner.cache.tensors["keys"].zero_(), runner.cache.tensors["values"].zero_()
        found = Sequence(runner, wanted.ids)
        way(found, begin)
        same = all(torch.equal(one, other) for one, other in zip(kv, found.bits(), strict=True))
        rows = [torch.equal(row, wanted.logits[at]) for at, row in found.logits.items() if at in wanted.logits]
        if not (same and rows and all(rows)):
            yield way.__name__


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", MODELS)
def test_a_tokens_bits_do_not_depend_on_its_company(name: str, kv_dtype: str) -> None:
    runner = runner_of(load(name, kv_dtype))
    assert runner.finding.holds, runner.finding.reason
    assert list(differing(runner)) == []


def test_chunks_of_up_to_two_thousand_tokens() -> None:
    runner, ids = runner_of(load("demo")), tokens(2_300, 6)
    choice = random.Random(8)
    found = []
    for sizes in ([64] * 36, [2048, 252], [1, 1000, 7, 700, 592], [choice.choice([1, 5, 130]) for _ in range(2_300)]):
        sequence = Sequence(runner, ids)
        for size in sizes:
            if sequence.at < len(ids):
                company = choice.choice([0, 9]) if size < 2_000 else 0
                sequence.step(min(size, len(ids) - sequence.at), company=company)
        assert sequence.at == len(ids)
        found.append(sequence.bits())
    for bits in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], bits, strict=True))


@pytest.mark.parametrize(("graphs", "compile"), [(False, False), (False, True), (True, True)])
def test_whether_steps_are_captured_or_compiled(graphs: bool, compile: bool) -> None:
    runner = runner_of(load("demo"), graphs=graphs, compile=compile)
    assert runner.finding.holds, runner.finding.reason
    assert list(differing(runner)) == []


def test_another_start_gives_the_same_numerics() -> None:
    first, second = (runner_of(load("demo"), compile=True).finding for _ in range(2))
    assert first.numerics and first == second


def test_another_process_gives_the_same_numerics(tmp_path: Path) -> None:
    """Where nothing is compiled yet, and no kernel that adds is chosen by the time it takes."""
    printed = []
    for number in range(2):
        compiled = tmp_path / f"compiled-{number}"
        command = [sys.executable, "-m", "tests.gpu.wide_model", str(tmp_path / "model")]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(compiled), "TRITON_CACHE_DIR": str(compiled)}
        printed.append(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout)
        chosen = [json.loads(each.read_text()) for each in compiled.rglob("*.best_config")]
        assert chosen
        assert not [each for each in chosen if "R0_BLOCK" in each]
    assert printed[0]
    assert printed[0] == printed[1]


def test_products_that_split_their_sums_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    invariance.choose_products(invariant=False)
    monkeypatch.setattr("kvrail.engine.step.runner.choose_products", lambda *, invariant: None)
    runner = runner_of(wide_model(tmp_path))
    assert not runner.finding.holds and "products of these shapes" in runner.finding.reason
    assert list(differing(runner))


def test_a_wide_model_keeps_its_bits(tmp_path: Path) -> None:
    runner = runner_of(wide_model(tmp_path), compile=True)
    assert runner.finding.holds, runner.finding.reason
    assert list(differing(runner)) == []


def test_blocks_that_begin_elsewhere_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding in shorter blocks than prompts are computed in."""
    monkeypatch.setattr(decode_kernel, "block_of", lambda shape: order.block_of(shape) // 2)
    runner = runner_of(load("demo"))
    assert "depends on what is computed beside it" in runner.finding.reason
    assert list(differing(runner))


SHAPES = {
    "8B": {"heads": 32, "kv_heads": 8, "key_dim": 128, "value_dim": 128, "page_size": 64},
    "256 wide": {"heads": 8, "kv_heads": 4, "key_dim": 256, "value_dim": 256, "page_size": 64},
    "96 wide": {"heads": 6, "key_dim": 96, "value_dim": 96},
    "values narrower": {"heads": 4, "kv_heads": 4, "key_dim": 192, "value_dim": 128},
    "many query heads": {"heads": 40, "kv_heads": 1, "key_dim": 64, "value_dim": 64},
    "window": {"window": 700, "page_size": 64},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": True},
    "e5m2": {"kv_dtype": "float8_e5m2", "key_dim": 128, "value_dim": 128},
    "e4m3": {"kv_dtype": "float8_e4m3fn", "window": 400, "sinks": True, "page_size": 64},
}
LONG = 9100
ROWS = (0, 1, 62, 63, 64, 255, 256, 257, 1000, 2047, 2048, 4095, 4096, 8191, 8192, 8193, 8703, 8704, 9098, LONG - 1)
"""Positions around the ends of blocks, parts and octaves."""
FEW = ((0, 2), (30, 94), (250, 266), (2040, 2057), (8180, 8200), (8690, 8754), (LONG - 33, LONG))
"""Rows that are computed in steps of their own."""


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_of_a_row(shape: dict) -> None:
    case = make_case([(LONG, LONG)], **{"kv_dtype": "bfloat16", **shape}, dtype=torch.bfloat16, device="cuda")
    reference.write_pages(case.pages, case.key, case.value, case.slots)
    wanted = prefill(case, LONG)
    for chunk in (50, 64, 1000):
        assert torch.equal(prefill(case, chunk).view(torch.int16), wanted.view(torch.int16))
    for tuning in (None, PrefillTuning(16, 4, 2, 1, 1), PrefillTuning(16, 4, 3, 1, 16), PrefillTuning(16, 8, 2, 1, 3)):
        for begin, end in FEW:
            found = few(case, begin, end, tuning)
            assert torch.equal(found.view(torch.int16), wanted[begin:end].view(torch.int16))
    rows = torch.tensor(ROWS, device="cuda")
    for processors, tuning in (
        (1, None),
        (132, None),
        (4000, None),
        (132, DecodeTuning(8, 2)),
        (132, DecodeTuning(1, 3)),
        (132, DecodeTuning(columns=True)),
    ):
        found = decode(case, rows, processors, tuning)
        assert torch.equal(found.view(torch.int16), wanted[rows].view(torch.int16))
    alone = torch.cat([decode(case, rows[i : i + 1], 132, None) for i in range(len(rows))])
    assert torch.equal(alone.view(torch.int16), wanted[rows].view(torch.int16))


def prefill(case: Case, chunk: int) -> torch.Tensor:
    """All rows of a case of one sequence, whose chunks' queries lie differently in blocks."""
    shape = HeadShape(case.query.shape[2], case.value.shape[2], 2, case.pages.keys.element_size())
    most, blocks = queries_for(shape, LONG), []
    for begin in range(0, LONG, chunk):
        end = min(begin + chunk, LONG)
        blocks += [[first, min(most, end - first), first, 0] for first in range(begin, end, most)]
    out = torch.full((*case.query.shape[:2], case.value.shape[2]), float("nan"), dtype=torch.bfloat16, device="cuda")
    listed = torch.tensor(blocks, dtype=torch.int32, device="cuda")
    prefill_attention(case.query, case.pages, case.page_tables, listed, out, case.options, 132)
    return out


def few(case: Case, begin: int, end: int, tuning: PrefillTuning | None) -> torch.Tensor:
    """Some rows in a step of their own, in which programs share what these see."""
    query = case.query[begin:end]
    blocks = [[first - begin, min(16, end - first), first, 0] for first in range(begin, end, 16)]
    out = torch.full((*query.shape[:2], case.value.shape[2]), float("nan"), dtype=torch.bfloat16, device="cuda")
    listed = torch.tensor(blocks, dtype=torch.int32, device="cuda")
    prefill_attention(query, case.pages, case.page_tables, listed, out, case.options, 132, tuning)
    return out


def decode(case: Case, rows: torch.Tensor, processors: int, tuning: DecodeTuning | None) -> torch.Tensor:
    """The same rows, each as a sequence with one new token over the same pages."""
    counters = torch.zeros(len(rows) * case.key.shape[1], dtype=torch.int32, device="cuda")
    out = torch.full((len(rows), case.query.shape[1], case.value.shape[2]), float("nan"), dtype=torch.bfloat16).cuda()
    decode_attention(
        case.query[rows],
        case.key[rows],
        case.value[rows],
        case.pages,
        case.page_tables.expand(len(rows), -1).contiguous(),
        (rows + 1).int(),
        shares(rows + 1, case.key.shape[1], 4 * processors),
        counters,
        out,
        case.options,
        tuning,
    )
    assert not counters.any()
    return out
