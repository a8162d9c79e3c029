"""Attention over closed pages on a CPU gives the bits that it gives over plain ones."""

import copy

import pytest
import torch

from kvrail.engine.attention import cpu
from kvrail.engine.attention.meta import StepMeta
from tests.engine.attention_cases import Case, make_case
from tests.lossless.cases import close_case, distributions, pages_of

MIXES = {
    "decodes": [(1, n) for n in (1, 64, 65, 66, 150, 193, 700)],
    "mixed": [(1, 40), (7, 7), (1, 300), (20, 133), (70, 260), (2, 129)],
}
SHAPES = {
    "64 wide": {},
    "128 wide": {"key_dim": 128, "value_dim": 128},
    "values narrower": {"key_dim": 192, "value_dim": 128},
    "window": {"window": 100},
    "all options": {"window": 170, "softcap": 5.0, "sinks": True},
    "large pages": {"page_size": 128},
}


def attend(case: Case, closed_tokens: torch.Tensor | None = None) -> torch.Tensor:
    meta = StepMeta(case.slots.int(), case.page_tables, case.plan, closed_tokens=closed_tokens)
    return cpu.paged_attention(case.query, case.key, case.value, case.pages, meta, case.options)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("plan", MIXES.values(), ids=MIXES)
def test_the_same_bits(plan: list, shape: dict) -> None:
    case = make_case(plan, **{"page_size": 64, "kv_dtype": "bfloat16", **shape})
    wanted = attend(copy.deepcopy(case))
    for pages in (None, 1000):
        found = attend(*close_case(copy.deepcopy(case), pages))
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("name", ["outlier channels", "escapes", "far escapes", "subnormal", "rising"])
def test_odd_values(name: str) -> None:
    """Raw tiles, and tiles with escapes."""
    case = make_case([(1, 600), (30, 400)], page_size=64, kv_dtype="bfloat16")
    for pool, seed in ((case.pages.keys, 1), (case.pages.values, 2)):
        odd = pages_of(distributions(tuple(pool.shape), seed)[name])
        pool.copy_(torch.where(odd.isfinite() & (odd.abs() < 1e15), odd, 1.0))
    wanted = attend(copy.deepcopy(case))
    assert wanted.isfinite().all()
    found = attend(*close_case(case, 1000))
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
