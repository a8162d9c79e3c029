"""The sampler against transformers' logits processors, a slow reference, and the distributions it must draw from."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvrail.engine.batch.batch import NOT_DRAWN, SampleRow
from kvrail.engine.sampling.draw import DrawParams, keep_threshold
from kvrail.engine.sampling.edits import edit_logits
from kvrail.engine.sampling.noise import gumbel_noise, noise_key
from kvrail.engine.sampling.sampler import Sampler
from kvrail.errors import ConfigError
from kvrail.values.sampling import LogitBias, SamplingParams
from tests.engine.test_sampler_noise import chi_square_z

CPU = torch.device("cpu")


def row(
    index: int = 0,
    position: int = 9,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: tuple[int, ...] = (),
    **params: object,
) -> SampleRow:
    return SampleRow(SamplingParams(max_tokens=8, **params), index, position, prompt, output, banned)


def draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    return [token.token_id for token in Sampler(logits.shape[1], CPU).sample(logits, rows)]


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def warpers(params: SamplingParams) -> LogitsProcessorList:
    """transformers' filters in vLLM's order."""
    found = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.min_p > 0:
        found.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        found.append(TopPLogitsWarper(params.top_p))
    return found


def slow_edits(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """Bias, bans and penalties of one row by loops, in double precision."""
    params, values = row.params, logits.double().clone()
    for token_id, bias in params.logit_bias.items():
        values[token_id] += bias
    for token_id in row.banned:
        values[token_id] = -math.inf
    if params.repetition_penalty != 1.0:
        seen = torch.tensor([[*row.prompt_ids, *row.output_ids]])
        values = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(seen, values[None])[0]
    for token_id in set(row.output_ids):
        values[token_id] -= params.frequency_penalty * list(row.output_ids).count(token_id) + params.presence_penalty
    return values


def slow_draw(logits: torch.Tensor, row: SampleRow) -> int:
    values = slow_edits(logits, row)
    if row.params.greedy:
        return int(values.argmax())
    scores = warpers(row.params)(torch.zeros(1, 0, dtype=torch.long), values[None])[0]
    key = noise_key(row.params.seed, row.index, row.position)
    return int((scores + torch.from_numpy(gumbel_noise(key, np.arange(len(scores), dtype=np.uint32)))).argmax())


SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 40, 10**6]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 1.5, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.7, -0.3]),
        "logit_bias": st.dictionaries(st.integers(0, 199), st.floats(-100, 100, width=32), max_size=3)
        | st.dictionaries(st.integers(0, 199), st.floats(-100, 100, width=32), max_size=3).map(LogitBias),
        "seed": st.integers(0, 2**64 - 1),
    }
)
TOKENS = st.lists(st.integers(0, 199), max_size=12)


@settings(max_examples=200)
@given(SETTINGS, TOKENS, TOKENS, st.sets(st.integers(0, 199), max_size=3), st.integers(0, 3), st.integers(0, 10**6))
def test_equals_the_slow_reference(params, prompt, output, banned, index, position) -> None:
    logits = random_logits(1, 200, position)
    asked = row(index, position, prompt, output, tuple(banned), **params)
    assert draw(logits, [asked]) == [slow_draw(logits[0], asked)]


@settings(max_examples=300)
@given(
    st.sampled_from([3, 50, 4000]),
    st.integers(0, 10**6),
    st.sampled_from([0, 1, 5, 100, 3999]),
    st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    st.sampled_from([0.1, 1.0, 10.0]),
)
def test_filters_keep_what_transformers_keeps(vocab_size, seed, top_k, top_p, min_p, temperature) -> None:
    logits = random_logits(1, vocab_size, seed).double()
    asked = row(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    expected = warpers(asked.params)(torch.zeros(1, 0, dtype=torch.long), logits)[0].isfinite()
    scores = ((logits - logits.max()) / temperature)[0].float().numpy()
    kept = torch.from_numpy(scores >= np.float32(keep_threshold(scores, DrawParams.of(asked))))
    different = torch.nonzero(kept != expected).flatten().tolist()
    if different:  # only where rounding decides: one token, at the very edge of top_p
        assert len(different) == 1 and top_p < 1.0
        mass = logits.div(temperature).softmax(-1)[0]
        mass = mass * (mass >= min_p * mass.max())
        if top_k and top_k < vocab_size:
            mass = mass * (mass >= mass.topk(top_k).values.min())
        edge = mass[mass > mass[different[0]]].sum() / mass.sum()
        assert float(edge) == pytest.approx(top_p, abs=1e-6)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_frequencies_follow_the_filtered_softmax(params: dict) -> None:
    """Chi-square over 5,000 positions."""
    logits = random_logits(1, 50, seed=1) / 2
    asked = row(**params)
    expected = warpers(asked.params)(torch.zeros(1, 0, dtype=torch.long), logits)[0].softmax(-1).double().numpy()
    positions = 5_000
    drawn = draw(logits.expand(positions, 50), [row(position=position, **params) for position in range(positions)])
    counts = np.bincount(drawn, minlength=50)
    assert not counts[expected == 0].any()
    often = expected * positions >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum()) * positions
    present = wanted > 0
    assert abs(chi_square_z(observed[present], wanted[present])) < 4


@settings(max_examples=100)
@given(st.lists(st.tuples(SETTINGS, TOKENS, TOKENS, st.sets(st.integers(0, 199), max_size=3)), min_size=1, max_size=4))
def test_edited_logits_equal_the_slow_reference(kinds) -> None:
    rows = [row(0, 0, prompt, output, tuple(banned), **params) for params, prompt, output, banned in kinds]
    logits = random_logits(len(rows), 200)
    edited = edit_logits(logits, rows)
    for values, raw, asked in zip(edited, logits, rows, strict=True):
        torch.testing.assert_close(values.double(), slow_edits(raw, asked), rtol=1e-5, atol=1e-5)


def mixed_rows(count: int) -> list[SampleRow]:
    kinds: list[dict] = [
        {},
        {"temperature": 0.0},
        {"top_k": 7},
        {"top_p": 0.9},
        {"min_p": 0.05, "top_p": 0.99},
        {"repetition_penalty": 1.2, "prompt": [1, 2, 3], "output": [4, 4]},
        {"logit_bias": {5: 3.0}, "banned": (6,)},
        {"logprobs": 2, "temperature": 1.7},
    ]
    return [row(i % 3, 100 + i, seed=i // 2, **kinds[i % len(kinds)]) for i in range(count)]


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    rows, logits = mixed_rows(40), random_logits(40, 3000)
    sampler = Sampler(3000, CPU)
    together = sampler.sample(logits, rows)
    assert len({token.token_id for token in together}) > 20
    for i in range(40):
        assert sampler.sample(logits[i : i + 1].clone(), [rows[i]]) == [together[i]]
    order = np.random.default_rng(0).permutation(40).tolist()
    assert sampler.sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_the_key_decides_the_draw() -> None:
    logits = torch.zeros(1, 1000)
    base = draw(logits, [row(seed=1)])
    assert draw(logits, [row(seed=1)]) == base
    for other in (row(seed=2), row(seed=1, index=1), row(seed=1, position=10), row(seed=2**64 - 1)):
        assert draw(logits, [other]) != base


def test_logits_are_left_as_they_are() -> None:
    rows, logits = mixed_rows(16), random_logits(16, 100)
    before = logits.clone()
    Sampler(100, CPU).sample(logits, rows)
    assert torch.equal(logits, before)


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(2, 10)
    logits[:, [4, 7]] = 1.0
    assert draw(logits, [row(temperature=0.0), row(temperature=0.0)]) == [4, 4]
    assert draw(logits, [row(temperature=0.0), row(temperature=0.0, banned=(4,))]) == [4, 7]


def test_tiny_temperatures_are_finite() -> None:
    logits = random_logits(4, 100) * 1e4
    for temperature in (1e-46, 1e-30, 1e-5):  # the first is no float32
        assert draw(logits, [row(temperature=temperature, top_p=0.9)] * 4) == logits.argmax(-1).tolist()


UNDRAWABLE = {"nan": (3, math.nan), "inf": (3, math.inf), "all masked": (slice(None), -math.inf)}


@pytest.mark.parametrize("where", UNDRAWABLE)
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_p": 0.9, "top_k": 5}, {}, {"logprobs": 2}], ids=str)
def test_a_row_without_a_finite_maximum_is_not_drawn_and_moves_no_other(where, params) -> None:
    logits = random_logits(3, 100)
    rows = [row(i, **params) for i in range(3)]
    sound = draw(logits, rows)
    place, value = UNDRAWABLE[where]
    logits[1, place] = value
    assert draw(logits, rows) == [sound[0], NOT_DRAWN, sound[2]]


def test_equal_logits_are_kept_together() -> None:
    logits = torch.tensor([[2.0, 2.0, 2.0, 0.0]])
    for params in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}):
        assert set(draw(logits.expand(200, 4), [row(position=i, **params) for i in range(200)])) == {0, 1, 2}


def test_ids_outside_the_vocabulary_are_passed_over() -> None:
    logits = random_logits(1, 10)
    asked = row(temperature=0.0, banned=(10, 99), logit_bias={500: 5.0}, repetition_penalty=1.1, output=[700])
    assert draw(logits, [asked]) == [int(logits.argmax())]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(3, 500)
    rows = [
        row(logprobs=5, logit_bias={3: 50.0}, temperature=0.1),
        row(),
        row(logprobs=0, temperature=0.0),
    ]
    tokens = Sampler(500, CPU).sample(logits, rows)
    expected = logits.log_softmax(-1)
    assert tokens[0].token_id == 3 and tokens[1].logprobs is None
    first, last = tokens[0].logprobs, tokens[2].logprobs
    assert first is not None and last is not None
    assert first.logprob == pytest.approx(float(expected[0, 3]), abs=1e-5)
    assert [token_id for token_id, _ in first.top] == expected[0].topk(5).indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(expected[0].topk(5).values.tolist(), abs=1e-5)
    assert last.top == () and last.logprob == pytest.approx(float(expected[2].max()), abs=1e-5)


def test_logprobs_of_named_tokens() -> None:
    logits = random_logits(2, 500)
    rows = [row(logprobs=0, logprob_token_ids=(7, 499, 3)), row(logprobs=1, temperature=0.0)]
    expected = logits.log_softmax(-1)
    first, second = (token.logprobs for token in Sampler(500, CPU).sample(logits, rows))
    assert first is not None and second is not None
    assert [token_id for token_id, _ in first.top] == [7, 499, 3]
    assert [value for _, value in first.top] == pytest.approx(expected[0, [7, 499, 3]].tolist(), abs=1e-5)
    assert [token_id for token_id, _ in second.top] == [int(logits[1].argmax())]


def test_logprob_ties_go_to_the_lower_id() -> None:
    logits = torch.full((1, 300), -1.0)
    logits[0, [250, 20, 100, 30]] = 2.0
    logits[0, 299] = 3.0
    asked = [row(logprobs=count) for count in (3, 5, 8)]
    tokens = Sampler(300, CPU).sample(logits.expand(3, 300), asked)
    found = [[token_id for token_id, _ in token.logprobs.top] for token in tokens]
    assert found == [[299, 20, 30], [299, 20, 30, 100, 250], [299, 20, 30, 100, 250, 0, 1, 2]]


def test_wrong_input_is_refused() -> None:
    sampler = Sampler(10, CPU)
    with pytest.raises(ValueError, match=r"expected float32 \(1, 10\)"):
        sampler.sample(torch.zeros(1, 11), [row()])
    with pytest.raises(ValueError, match="bfloat16"):
        sampler.sample(torch.zeros(1, 10, dtype=torch.bfloat16), [row()])
    with pytest.raises(ConfigError, match="choose cpu or cuda"):
        Sampler(10, torch.device("meta"))
    assert sampler.sample(torch.zeros(0, 10), []) == []
