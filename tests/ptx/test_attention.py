"""Kernels over pages that are not plain compile for an H100: the interpreter runs what the compiler refuses.

Those over pages of eight bits are run as well: only compiled they read two channels at once.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrail.engine.kv.closed.forms import FORMS
from kvrail.values.layout import KVLayout
from tests.engine.attention_cases import expected, make_case, relative_error, shares
from tests.ptx.compiled import compiling, emulated, in_a_child

HEADS, KV_HEADS, TOKENS = 8, 2, 64
FEW, MANY = 8, 512
"""Tokens of prompts whose tokens before them prefill's programs share, and of those where each reads all."""
ROUNDS = 11
"""Bits of sums where kernels are run: three more than outputs have, so that another order shows in these."""


def compile_all(form: str, dims: tuple[int, int], prompts: tuple[int, ...] = (FEW, MANY)) -> None:
    from kvrail.engine.kv.closed import cuda
    from kvrail.engine.kv.closed.pages import ClosedPages, LosslessPages, LossyPages
    from kvrail.engine.kv.formats import LayerPages

    layout, one = KVLayout(1, KV_HEADS, *dims, TOKENS, "bfloat16"), torch.zeros(1, dtype=torch.int64)
    closed: ClosedPages = LosslessPages(layout, 1, 1, "cpu")
    if FORMS[form]:
        closed = LossyPages(layout, 1, FORMS[form], "cpu")
    keys, values = (torch.zeros(1, 1, TOKENS, KV_HEADS, dim).bfloat16() for dim in dims)
    with compiling() as compiled:
        cuda.close(closed, keys, values, one, one)
        cuda.open(closed, keys, values, one, one)
        attend(LayerPages(keys[0], values[0], closed=closed.layer(0)), dims, prompts)
    assert {"close_pages", "open_pages", "_decode_kernel", "_prefill_kernel"} <= set(compiled)


def attend(layer: Any, dims: tuple[int, int], prompts: tuple[int, ...]) -> None:
    from kvrail.engine.attention.options import ScoreOptions
    from kvrail.engine.attention.triton.decode_kernel import decode_attention
    from kvrail.engine.attention.triton.prefill_kernel import prefill_attention

    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    closed, options = lengths if layer.closed else None, ScoreOptions(1.0)
    counters, blocks = torch.zeros(KV_HEADS, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)
    key, value = (torch.zeros(1, KV_HEADS, dim).bfloat16() for dim in dims)
    for tokens in (1, *prompts):
        query, out = (torch.zeros(tokens, HEADS, dim).bfloat16() for dim in dims)
        if tokens == 1:
            decode_attention(query, key, value, layer, table, lengths, blocks, counters, out, options, None, closed)
        else:
            prefill_attention(query, layer, table, blocks, out, options, 132, None, closed)


def compile_scaled(dtype: str) -> None:
    from kvrail.engine.kv.formats import LayerPages

    pool = torch.zeros(1, TOKENS, KV_HEADS, 128).to(getattr(torch, dtype))
    scales = torch.ones(1, TOKENS, KV_HEADS)
    with compiling() as compiled:
        attend(LayerPages(pool, pool, scales, scales), (128, 128), ())
    assert "_decode_kernel" in compiled


def attend_scaled(dtype: str, lengths: list[int], slots: int, shape: dict[str, Any]) -> None:
    """Decode's kernel is near the reference, and prefill's has its bits; pages' rows behind a sequence hold NaN."""
    from kvrail.engine.attention.triton.decode_kernel import DecodeTuning, decode_attention
    from kvrail.engine.attention.triton.prefill_kernel import PrefillTuning, prefill_attention

    case = make_case([(1, length) for length in lengths], kv_dtype=dtype, dtype=torch.bfloat16, **shape)
    wanted, queries = expected(case), range(len(lengths))
    by_decode, by_prefill = (torch.full_like(wanted, float("nan"), dtype=torch.bfloat16) for _ in range(2))
    counters = torch.zeros(len(lengths) * case.key.shape[1], dtype=torch.int32)
    programs = shares(case.kv_lens, case.key.shape[1], slots)
    attended = (
        case.page_tables,
        case.kv_lens,
        programs,
        counters,
        by_decode,
        case.options,
        DecodeTuning(2, 2, columns=True),
    )
    with emulated(with_one_value, rounds=ROUNDS):
        decode_attention(case.query, case.key, case.value, case.pages, *attended)
    assert relative_error(by_decode, wanted) < 1e-2 and not counters.any()
    blocks = torch.tensor([[row, 1, lengths[row] - 1, row] for row in queries], dtype=torch.int32)
    read = (case.pages, case.page_tables, blocks)
    for tuning in (PrefillTuning(16, 2, 2), PrefillTuning(16, 2, 2, heads=2, splits=2)):
        with emulated(rounds=ROUNDS):
            prefill_attention(case.query, *read, by_prefill, case.options, 1, tuning)
        assert torch.equal(by_decode.view(torch.int16), by_prefill.view(torch.int16))
        by_prefill.fill_(float("nan"))


def with_one_value(ptx: str) -> str:
    """PTX whose conversions of two values, one of which is never stored and was never written, take a zero for it."""
    return re.sub(r"(cvt\.rn\.satfinite\.\w+\.f32\s+%rs\d+), %r\d+,", r"\1, 0f00000000,", ptx)


def compile_forms(forms: list[str], dims: tuple[int, int]) -> None:
    for form in forms:
        compile_all(form, dims)


def compile_in_turns(forms: list[str]) -> None:
    """Heads of 128; prefill's programs share a sequence in every other form alone. Types of eight bits: decode's."""
    for number, form in enumerate(forms):
        if form in FORMS:
            compile_all(form, (128, 128), ((FEW, MANY)[number % 2],))
        else:
            compile_scaled(form)


@pytest.mark.parametrize(
    "forms",
    [["lossless", "float8_e5m2"], pytest.param(["int4", "kvcomp", "rot3"], marks=pytest.mark.heavy)],
    ids="-".join,
)
def test_heads_of_128(forms: list[str], cache: Path) -> None:
    """The other type of eight bits is below."""
    in_a_child(compile_in_turns, forms, cache=cache)


@pytest.mark.parametrize(
    ("dtype", "lengths", "slots", "shape"),
    [
        ("float8_e4m3fn", [200, 65], 40, {"heads": 4, "key_dim": 128, "value_dim": 128, "page_size": 64}),
        pytest.param("float8_e5m2", [1, 150], 1, {"heads": 4}, marks=pytest.mark.heavy),
        pytest.param("float8_e4m3fn", [300], 1, {"window": 70, "softcap": 5.0, "sinks": True}, marks=pytest.mark.heavy),
        pytest.param("float8_e5m2", [520], 40, {"key_dim": 96, "value_dim": 48}, marks=pytest.mark.heavy),
    ],
)
def test_scaled_pages_are_read(dtype: str, lengths: list[int], slots: int, shape: dict[str, Any], cache: Path) -> None:
    in_a_child(attend_scaled, dtype, lengths, slots, shape, cache=cache)


@pytest.mark.heavy
@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 128)])
def test_other_heads(dims: tuple[int, int], cache: Path) -> None:
    in_a_child(compile_forms, list(FORMS), dims, cache=cache)
