"""Attention over open, closed and open pages on a CPU gives the bits that it gives over the same pages opened."""

import copy

import pytest
import torch

from kvrail.engine.kv.closed.forms import CODE_BITS
from tests.engine.attention_cases import make_case
from tests.lossless.cases import close_case
from tests.lossless.test_attention import MIXES, SHAPES, attend


@pytest.mark.parametrize("bits", CODE_BITS.values(), ids=CODE_BITS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("plan", MIXES.values(), ids=MIXES)
def test_the_same_bits(plan: list, shape: dict, bits: int) -> None:
    case = make_case(plan, **{"page_size": 64, "kv_dtype": "bfloat16", **shape})
    exact = attend(copy.deepcopy(case))
    for pages in (None, 1, 1000):
        opened = copy.deepcopy(case)
        closed, tokens = close_case(copy.deepcopy(case), pages, code_bits=bits, opened=opened.pages)
        wanted, found = attend(opened), attend(closed, tokens)
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
        assert not torch.equal(found, exact)
