"""Closing, opening and attention in Triton's interpreter on a CPU; tests/gpu runs the same cases compiled."""

import copy
import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels on this machine", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below

from kvrail.engine.kv.fixed import cuda
from kvrail.engine.kv.fixed.form import WIDTHS
from tests.engine.attention_cases import make_case
from tests.fixed.cases import check_kernels
from tests.lossless.cases import close_case
from tests.lossless.test_kernels import PREFILLS, SHAPES, decode, prefill


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(("dims", "page_size"), [((64, 128), 64), ((128, 64), 128)])
def test_closing_and_opening(dims: tuple[int, int], page_size: int, bits: int) -> None:
    check_kernels(dims, page_size, bits, "cpu", cuda, heads=1)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_same_bits(shape: dict, bits: int) -> None:
    plan = [(1, n) for n in (1, 64, 65, 129, 400)]
    case = make_case(plan, **{"page_size": 64, "kv_dtype": "bfloat16", "dtype": torch.bfloat16, **shape})
    opened = copy.deepcopy(case)
    closed, tokens = close_case(case, 1000, code_bits=bits, opened=opened.pages)
    found, wanted = decode(closed, 1, tokens), decode(opened, 1)
    assert wanted.isfinite().all() and torch.equal(found.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(("shape", "tuning"), PREFILLS.values(), ids=PREFILLS)
def test_prefill_gives_the_same_bits(shape: dict, tuning: object, bits: int) -> None:
    plan = [(7, 7), (5, 200), (33, 161)]
    case = make_case(plan, **{"page_size": 64, "kv_dtype": "bfloat16", "dtype": torch.bfloat16, **shape})
    opened = copy.deepcopy(case)
    closed, tokens = close_case(case, 1000, code_bits=bits, opened=opened.pages)
    found, wanted = prefill(closed, tuning, tokens), prefill(opened, tuning)
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
