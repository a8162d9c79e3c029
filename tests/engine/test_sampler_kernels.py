"""The Triton draw against the CPU's: on a GPU where there is one, else in Triton's interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrail.engine.batch.batch import NOT_DRAWN
from kvrail.engine.sampling.draw import DrawParams, draw_on_cpu
from kvrail.engine.sampling.sampling_kernels import begin_draw
from tests.engine.test_sampler import UNDRAWABLE, mixed_rows, random_logits, row

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 40, 10**6]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        "seed": st.integers(0, 2**64 - 1),
    }
)


def drawn_on_cuda(logits: torch.Tensor, params: list[DrawParams]) -> list[int]:
    """On a GPU several programs share a row; tests/ptx has them share one on a CPU."""
    return begin_draw(logits, params, 264 if torch.cuda.is_available() else 1).tolist()


@pytest.mark.parametrize("vocab_size", [1, 513])
def test_equals_the_cpu(vocab_size: int) -> None:
    @settings(max_examples=12)
    @given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 10**6))
    def check(kinds: list[dict], position: int) -> None:
        params = [DrawParams.of(row(i, position, **kind)) for i, kind in enumerate(kinds)]
        logits = random_logits(len(kinds), vocab_size, position)
        assert drawn_on_cuda(logits.to(DEVICE), params) == draw_on_cpu(logits, params)

    check()


def test_many_unfiltered_draws_equal_the_cpu() -> None:
    params = [DrawParams.of(row(i % 4, i, seed=i // 8)) for i in range(128)]
    logits = random_logits(128, 700) / 3
    assert drawn_on_cuda(logits.to(DEVICE), params) == draw_on_cpu(logits, params)


def test_minus_infinity_equal_logits_and_strided_rows() -> None:
    logits = torch.zeros(24, 900)
    logits[:, ::3] = float("-inf")
    logits[:, 100:130] = 2.0
    params = [DrawParams.of(asked) for asked in mixed_rows(24)]
    expected = draw_on_cpu(logits[:, :800].contiguous(), params)
    assert drawn_on_cuda(logits.to(DEVICE)[:, :800], params) == expected


def test_rows_that_cannot_be_drawn_are_told_as_on_the_cpu() -> None:
    logits = random_logits(16, 600)
    for i, (place, value) in enumerate(UNDRAWABLE.values()):
        logits[4 * i + 1, place] = logits[4 * i + 2, place] = value
    params = [DrawParams.of(row(i, temperature=i % 2 * 0.7, top_p=0.9)) for i in range(16)]
    expected = draw_on_cpu(logits, params)
    assert [i for i, token in enumerate(expected) if token == NOT_DRAWN] == [1, 2, 5, 6, 9, 10]
    assert drawn_on_cuda(logits.to(DEVICE), params) == expected
