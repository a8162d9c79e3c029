"""Lossless pages on a GPU: closing, opening, and a step's attention over them, which gives the bits of plain pages."""

import copy

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from kvrail.engine.attention import cuda as attention  # noqa: E402
from kvrail.engine.attention.meta import StepMeta  # noqa: E402
from kvrail.engine.attention.triton.order import HeadShape  # noqa: E402
from kvrail.engine.attention.triton.prefill_kernel import queries_for  # noqa: E402
from kvrail.engine.kv.closed import cuda  # noqa: E402
from tests.engine.attention_cases import Case, make_case, shares  # noqa: E402
from tests.lossless.cases import check_kernels, close_case, distributions, pages_of  # noqa: E402

SHAPES = {
    "8B": {"heads": 32, "kv_heads": 8, "key_dim": 128, "value_dim": 128},
    "64 wide": {"heads": 6, "kv_heads": 2},
    "values narrower": {"heads": 8, "kv_heads": 2, "key_dim": 128, "value_dim": 64, "page_size": 128},
    "all options": {"key_dim": 128, "value_dim": 128, "window": 300, "softcap": 5.0, "sinks": True},
}
PLANS = {
    "decodes": [(1, n) for n in (1, 64, 65, 129, 500, 3000, 9000)],
    "chunks": [(70, 500), (2, 3000), (65, 193)],
    "few queries": [(7, 1100), (16, 9770), (2, 200)],
    "mixed": [(1, 65), (63, 63), (1, 3000), (64, 500), (1, 130)],
}


@pytest.mark.parametrize(("dims", "page_size"), [((64, 64), 64), ((128, 128), 128), ((64, 128), 64)])
def test_closing_and_opening(dims: tuple[int, int], page_size: int) -> None:
    check_kernels(dims, page_size, "cuda", cuda)


def attend(case: Case, closed_tokens: torch.Tensor | None = None) -> torch.Tensor:
    counters = torch.zeros(case.decodes * case.key.shape[1], dtype=torch.int32, device="cuda")
    shape = HeadShape(case.query.shape[2], case.value.shape[2], 2, 2)
    blocks = case.blocks(queries_for(shape, len(case.query)))
    if case.decodes == len(case.plan):
        blocks = blocks[:0]
    tokens = None if closed_tokens is None else closed_tokens.int()
    meta = StepMeta(
        case.stored_apart,
        case.page_tables,
        kv_lens=case.kv_lens,
        shares=shares(case.kv_lens, case.key.shape[1], 528),
        counters=counters,
        blocks=blocks,
        closed_tokens=tokens,
    )
    return attention.paged_attention(case.query, case.key, case.value, case.pages, meta, case.options)


def case_of(plan: list, shape: dict) -> Case:
    kept = {"page_size": 64, "kv_dtype": "bfloat16", "dtype": torch.bfloat16, "device": "cuda"}
    return make_case(plan, **{**kept, **shape})


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_same_bits(plan: list, shape: dict) -> None:
    case = case_of(plan, shape)
    wanted = attend(copy.deepcopy(case))
    assert wanted.isfinite().all()
    for pages in (None, 1000):
        found = attend(*close_case(copy.deepcopy(case), pages))
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("name", ["outlier channels", "escapes", "far escapes", "rising"])
def test_odd_values(name: str) -> None:
    """Raw tiles, and tiles with escapes."""
    case = case_of(PLANS["mixed"], SHAPES["8B"])
    for pool, seed in ((case.pages.keys, 1), (case.pages.values, 2)):
        odd = pages_of(distributions(tuple(pool.shape), seed)[name]).cuda()
        pool.copy_(torch.where(odd.isfinite() & (odd.abs() < 1e15), odd, 1.0))
    wanted = attend(copy.deepcopy(case))
    found = attend(*close_case(case, 1000))
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
