"""Closing, opening and decode attention in Triton's interpreter on a CPU; tests/gpu runs the same cases compiled."""

import copy
import os
from dataclasses import replace

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels on this machine", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below

from kvrail.engine.attention import reference
from kvrail.engine.attention.triton.decode_kernel import decode_attention, tuning_over
from kvrail.engine.attention.triton.prefill_kernel import PrefillTuning, prefill_attention
from kvrail.engine.kv.closed import cuda
from tests.engine.attention_cases import Case, make_case, shares
from tests.lossless.cases import check_kernels, close_case, distributions, pages_of

SHAPES = {
    "64 wide": {},
    "128 wide": {"key_dim": 128, "value_dim": 128},
    "values narrower": {"key_dim": 128, "value_dim": 64, "heads": 4, "kv_heads": 4},
    "all options": {"window": 170, "softcap": 5.0, "sinks": True},
    "large pages": {"page_size": 128},
}


def decode(case: Case, share: bool, closed_tokens: torch.Tensor | None = None) -> torch.Tensor:
    """share: four programs share each long sequence."""
    tuning = tuning_over(case.pages, case.query.dtype, len(case.query))
    if case.query.device.type == "cpu":  # numpy's sums, unlike tensor cores', depend on which operand comes first
        tuning = replace(tuning, columns=True)
    processors = 4 * case.query.shape[0] * case.key.shape[1] if share else 1
    counters = torch.zeros(case.query.shape[0] * case.key.shape[1], dtype=torch.int32, device=case.query.device)
    out = case.query.new_full((*case.query.shape[:2], case.value.shape[2]), float("nan"))
    decode_attention(
        case.query,
        case.key,
        case.value,
        case.pages,
        case.page_tables,
        case.kv_lens,
        shares(case.kv_lens, case.key.shape[1], processors),
        counters,
        out,
        case.options,
        tuning,
        closed_tokens=None if closed_tokens is None else closed_tokens.int(),
    )
    return out


@pytest.mark.parametrize(("dims", "page_size"), [((64, 128), 64), ((128, 64), 128)])
def test_closing_and_opening(dims: tuple[int, int], page_size: int) -> None:
    check_kernels(dims, page_size, "cpu", cuda, few=True)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_same_bits(shape: dict) -> None:
    """The first program of those that share the longest sequence has two parts of it."""
    plan = [(1, n) for n in (1, 64, 65, 129, 1030)]
    case = make_case(plan, **{"page_size": 64, "kv_dtype": "bfloat16", "dtype": torch.bfloat16, **shape})
    wanted = decode(copy.deepcopy(case), False)
    for share, pages in ((False, None), (True, 1000)):
        closed, tokens = close_case(copy.deepcopy(case), pages)
        found = decode(closed, share, tokens)
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("name", ["outlier channels", "escapes", "far escapes", "rising"])
def test_odd_values(name: str) -> None:
    """Raw tiles, and tiles with escapes."""
    case = make_case([(1, 300), (1, 130)], page_size=64, kv_dtype="bfloat16", dtype=torch.bfloat16)
    for pool, seed in ((case.pages.keys, 1), (case.pages.values, 2)):
        odd = pages_of(distributions(tuple(pool.shape), seed)[name])
        pool.copy_(torch.where(odd.isfinite() & (odd.abs() < 1e15), odd, 1.0))
    wanted = decode(copy.deepcopy(case), False)
    closed, tokens = close_case(case, 1000)
    found = decode(closed, False, tokens)
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


PREFILLS = {
    "one program": (SHAPES["64 wide"], PrefillTuning(16, 4, 2)),
    "heads together, programs share": (SHAPES["128 wide"], PrefillTuning(16, 4, 2, 4, 4)),
    "all options": (SHAPES["all options"], PrefillTuning(32, 4, 2)),
}


def prefill(case: Case, tuning: PrefillTuning, closed_tokens: torch.Tensor | None = None) -> torch.Tensor:
    out = case.query.new_full((*case.query.shape[:2], case.value.shape[2]), float("nan"))
    reference.write_pages(case.pages, case.key, case.value, case.slots)
    tokens = None if closed_tokens is None else closed_tokens.int()
    blocks = case.blocks(tuning.queries)
    prefill_attention(case.query, case.pages, case.page_tables, blocks, out, case.options, 1, tuning, tokens)
    return out


@pytest.mark.parametrize(("shape", "tuning"), PREFILLS.values(), ids=PREFILLS)
def test_prefill_gives_the_same_bits(shape: dict, tuning: PrefillTuning) -> None:
    plan = [(7, 7), (5, 330), (33, 161)]
    case = make_case(plan, **{"page_size": 64, "kv_dtype": "bfloat16", "dtype": torch.bfloat16, **shape})
    wanted = prefill(copy.deepcopy(case), tuning)
    for pages in (None, 1000) if tuning.splits == 1 else (1000,):
        closed, tokens = close_case(copy.deepcopy(case), pages)
        found = prefill(closed, tuning, tokens)
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
