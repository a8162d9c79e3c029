"""The cost of steps, by tokens and by sequences, is a line through what was measured."""

import math

import pytest

from kvrail.engine.request.requests import Resumed
from kvrail.engine.schedule.chunks import StepBudget
from kvrail.engine.schedule.cost import LineFit, StepCostModel
from tests.engine.bench import Bench
from tests.engine.page_machine import expected


def test_a_line_through_steps():
    fit = LineFit()
    assert (fit.line().base, fit.line().each) == (0, 0)
    fit.note(8, 0.4)
    assert (fit.line().base, fit.line().each) == (0, 0.05)
    for size in (1, 4, 16, 8, 2):
        fit.note(size, 0.1 + 0.02 * size)
    for size in (1, 4, 16, 8, 2) * 40:
        fit.note(size, 0.1 + 0.02 * size)
    assert abs(fit.line().base - 0.1) < 1e-4 and abs(fit.line().each - 0.02) < 1e-5
    for _ in range(2000):
        fit.note(16, 0.1 + 0.02 * 16)  # a steady load
    assert fit.line().base == pytest.approx(0.1, rel=0.05) and fit.line().each == pytest.approx(0.02, rel=0.05)
    cost = StepCostModel()
    cost.note(0, 4, 0.02)
    cost.note(100, 4, 0.5)
    assert (cost.decode.at(4), cost.prefill.each, cost.full_prefill) == (pytest.approx(0.02), 0.005, 0.0)
    cost.note(300, 4, 0.5)
    cost.note(500, 4, 1.1)
    beside = cost.decode.base / 2 + 4 * cost.decode.each
    assert abs(cost.full_prefill - (1.6 - 2 * beside) / 800) < 1e-9  # four sequences decoded beside


def test_one_sequence_does_not_say_that_many_take_many_times_as_long():
    """After single requests a crowd comes: chunks of prompts beside it are not as small as they may be, for ever."""
    cost, limited = StepCostModel(), StepBudget(2048, 256, 64, mixed_batch_tokens=512, gap_s=0.03)
    for _ in range(500):
        cost.note(0, 1, 5e-3)
    assert cost.decode.at(1) == pytest.approx(5e-3) and cost.decode.at(16) < 8e-3
    for each in (1, 2) * 200:
        cost.note(0, each, 5e-3 + 1e-3 * (each - 1))  # noise, which says 1 ms a sequence
    assert cost.decode.at(32) > 0.03
    for _ in range(100):  # and no step decodes alone
        tokens = limited.chunk_tokens(31, beside=True, cost=cost)
        cost.note(tokens, 31, 6e-3 + 1.5e-5 * tokens)
    assert cost.decode.at(31) < 0.014 and limited.chunk_tokens(31, beside=True, cost=cost) == 481


def measured(chunk_s: float, steps: int = 200) -> StepCostModel:
    """Decode steps take 8 ms and 20 us a sequence; a token of a prompt beside them adds `chunk_s`."""
    cost = StepCostModel()
    for step in range(steps):
        sequences, tokens = 16 + step % 48, 128 + step % 256
        cost.note(0, sequences, 8e-3 + 2e-5 * sequences)
        cost.note(tokens, sequences, 8e-3 + 2e-5 * sequences + chunk_s * tokens)
    return cost


def test_tokens_of_a_prompt_beside_decoding_are_measured():
    assert measured(2e-5).tokens_within(0.02, 100) == pytest.approx((0.02 - 0.01) / 2e-5, rel=0.01)
    assert measured(2e-5).tokens_within(0.005, 100) == 0
    unknown = StepCostModel()
    unknown.note(500, 0, 0.01)
    unknown.note(500, 10, 0.02)
    assert unknown.tokens_within(0.001, 100) == math.inf  # no step has decoded alone


def test_the_cost_of_a_prompt_is_that_of_a_prompt_alone():
    """Whether it is computed by itself or beside sequences: the router compares workers that do one or the other."""
    alone, beside = StepCostModel(), measured(2e-5)
    for tokens in (256, 1024):
        alone.note(tokens, 0, 4e-3 + 2e-5 * tokens)
    assert beside.full_prefill == pytest.approx(2e-5 + 4e-3 / 256, rel=0.1)
    assert alone.full_prefill == pytest.approx(2e-5 + 4e-3 / 640)


@pytest.mark.parametrize(
    ("chunk_s", "others", "tokens"), [(1e-5, 64, 448), (5e-5, 64, 354), (5e-4, 64, 64), (5e-5, 900, 64)]
)
def test_chunks_keep_the_gap_limit(chunk_s, others, tokens):
    """Up to what is allowed beside others, down to an eighth of it."""
    cost, limits = measured(chunk_s), {"mixed_batch_tokens": 512}
    limited, free = StepBudget(2048, 1024, 64, gap_s=0.03, **limits), StepBudget(2048, 1024, 64, **limits)
    assert limited.chunk_tokens(others, beside=True, cost=cost) == pytest.approx(tokens, abs=5)
    assert limited.chunk_tokens(others, beside=False, cost=cost) == 2048 - others
    assert limited.chunk_tokens(others, beside=True, cost=StepCostModel()) == max(512 - others, 128)
    assert free.chunk_tokens(others, beside=True, cost=cost) == max(512 - others, 128)


@pytest.mark.parametrize(("gap_s", "chunk"), [(0.0, 38), (0.01, 12)])
def test_an_engine_follows_what_its_steps_took(gap_s, chunk):
    bench = Bench(num_pages=200, max_batch_tokens=80, mixed_batch_tokens=40, max_running=16, gap_s=gap_s)
    for number in range(2):
        bench.submit(str(number), [number + 3] * 2, max_tokens=30)
    bench.step(3)
    for step in range(400):
        bench.engine.step_cost.note(0, 1 + step % 3, 3e-3)
        bench.engine.step_cost.note(20 + step % 9, 2, 3e-3 + 5e-4 * (20 + step % 9))
    bench.submit("long", [7] * 70, max_tokens=1)
    bench.step(1)
    assert bench.machine.steps[-1] == [1, 1, chunk]


def test_output_that_is_computed_once_more_is_no_decode(monkeypatch):
    """A request that another worker began: chunks of its output take far longer than a decode, and are no prompt."""
    bench, noted = Bench(max_batch_tokens=16), []
    monkeypatch.setattr(bench.engine.step_cost, "note", lambda *step: noted.append(step[:2]))
    prompt = list(range(8))
    bench.submit("resumed", prompt, 40, resumed=(Resumed(tuple(expected(prompt, 38))),))
    bench.run()
    assert bench.machine.steps == [[16], [16], [14], [1]]
    assert noted == [(16, 0), (16, 0), (14, 0), (0, 1)]
    assert bench.registry.get_sample_value("kvrail_engine_prompt_tokens_total", {"model_name": "machine"}) == 8
