"""Closing, opening and attention in Triton's interpreter on a CPU; tests/gpu runs the same cases compiled."""

import copy
import os
from collections.abc import Callable
from functools import partial

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels on this machine", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below

from kvrail.engine.kv.closed import cuda
from kvrail.engine.kv.kvcomp.form import CODED
from kvrail.engine.kv.rotated.form import ROTATED
from tests.engine.attention_cases import make_case
from tests.fixed.cases import check_kernels
from tests.lossless.cases import close_case
from tests.lossless.test_kernels import PREFILLS, SHAPES, decode, prefill


@pytest.mark.parametrize(
    ("dims", "page_size", "bits"),
    [
        ((64, 128), 64, 4),
        ((64, 128), 64, 8),
        ((128, 64), 128, 4),
        pytest.param((64, 64), 64, CODED, marks=pytest.mark.heavy),
        pytest.param((128, 64), 128, CODED, marks=pytest.mark.heavy),
        ((64, 128), 64, CODED),
        ((64, 64), 64, ROTATED),
        ((64, 128), 128, ROTATED),
    ],
)
def test_closing_and_opening(dims: tuple[int, int], page_size: int, bits: int) -> None:
    check_kernels(dims, page_size, bits, "cpu", cuda, few=True)


def check_attention(plan: list, shape: dict, bits: int, pages: int, attend: Callable, wanted: Callable) -> None:
    """With at most `pages` of each sequence closed, `attend` gives the bits that `wanted` gives over opened ones."""
    case = make_case(plan, **{"page_size": 64, "kv_dtype": "bfloat16", "dtype": torch.bfloat16, **shape})
    opened = copy.deepcopy(case)
    closed, tokens = close_case(case, pages, code_bits=bits, opened=opened.pages)
    assert 0 in tokens and (tokens > 0).any()
    found, expected = attend(closed, closed_tokens=tokens), wanted(opened)
    assert expected.isfinite().all() and torch.equal(found.view(torch.int16), expected.view(torch.int16))


def usual(is_usual: bool) -> list[pytest.MarkDecorator]:
    """Marks of a case that `make test` has, or that `make test-heavy` has."""
    return [] if is_usual else [pytest.mark.heavy]


BOTH = [
    *zip(SHAPES, (4, 8, 4, 8, 4), strict=True),
    pytest.param("all options", 4, marks=pytest.mark.heavy),
    pytest.param("values narrower", 8, marks=pytest.mark.heavy),
    *(pytest.param(name, bits, marks=usual(name == "values narrower")) for bits in (CODED, ROTATED) for name in SHAPES),
]
"""Shapes and widths of codes."""


@pytest.mark.parametrize(("name", "bits"), BOTH)
def test_the_same_bits_however_many_programs_share_a_sequence(name: str, bits: int) -> None:
    """No closed page, one, and several; windows begin in the first page and in closed ones."""
    plan = [(1, n) for n in (1, 64, 65, 129, 220, 400)]
    check_attention(plan, SHAPES[name], bits, 1000, partial(decode, share=True), partial(decode, share=False))


def test_windows_that_begin_behind_closed_pages() -> None:
    plan = [(1, 400), (1, 129), (1, 65)]
    check_attention(plan, SHAPES["all options"], 4, 1, partial(decode, share=False), partial(decode, share=False))
    tuning = PREFILLS["all options"][1]
    both = (partial(prefill, tuning=tuning),) * 2
    check_attention([(5, 330), (3, 70)], SHAPES["all options"], 4, 1, *both)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        *zip(PREFILLS, (4, 8, 4), strict=True),
        *(
            pytest.param(name, bits, marks=usual(name == "all options"))
            for bits in (CODED, ROTATED)
            for name in PREFILLS
        ),
    ],
)
def test_prefill_gives_the_same_bits(name: str, bits: int) -> None:
    shape, tuning = PREFILLS[name]
    plan = [(7, 7), (5, 330), (33, 161)]
    check_attention(plan, shape, bits, 1000, *(partial(prefill, tuning=tuning),) * 2)
