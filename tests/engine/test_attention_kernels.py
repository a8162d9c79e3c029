"""The Triton kernels in Triton's interpreter, on a CPU; tests/gpu runs the same cases compiled."""

import copy
import itertools
import math
import os

import pytest
import torch
import triton
import triton.language as tl

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels on this machine", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below

from kvrail.engine.attention import reference
from kvrail.engine.attention.triton.decode_kernel import decode_attention
from kvrail.engine.attention.triton.order import HeadShape, parts_of
from kvrail.engine.attention.triton.order_kernel import begins_part, part_begin, part_of
from kvrail.engine.attention.triton.page_kernels import write_pages
from kvrail.engine.attention.triton.prefill_kernel import PrefillTuning, prefill_attention, tuning_for
from tests.engine.attention_cases import Case, expected, make_case, relative_error, shares

SHAPES = {
    "plain": {},
    "group of three, values narrower": {"heads": 6, "key_dim": 48, "value_dim": 24},
    "many query heads": {"heads": 20, "kv_heads": 1, "key_dim": 32, "value_dim": 32},
    "window of one page": {"window": 16},
    "all at once": {"heads": 2, "window": 33, "softcap": 5.0, "sinks": True},
    "large pages": {"heads": 4, "page_size": 128},
    "e5m2": {"heads": 2, "kv_dtype": "float8_e5m2"},
    "e4m3": {"heads": 2, "kv_dtype": "float8_e4m3fn", "window": 40},
    "e4m3 with sinks": {"heads": 2, "kv_dtype": "float8_e4m3fn", "sinks": True},
}
LARGE_TILES = PrefillTuning(64, 4, 2)
PREFILLS = {
    name: (shape, None if name in ("plain", "e4m3 with sinks") else LARGE_TILES) for name, shape in SHAPES.items()
}
"""Small tiles, which float32 gets, take the interpreter longest, so that two shapes must do."""


ALONE = ("plain", "all at once", "e4m3 with sinks")
DECODES = {name: (shape, 40) for name, shape in SHAPES.items()} | {
    f"{name}, alone": (SHAPES[name], 1) for name in ALONE
}


SHARED = ([2300] * 3, [900, 2600, 1, 1900, 300, 256], [9000, 40, 70], [1300] * 7 + [0, 0])
"""Lengths of sequences that programs share."""


@pytest.mark.parametrize(("shape", "processors"), DECODES.values(), ids=DECODES)
def test_decode(shape: dict, processors: int) -> None:
    """On 40 processors programs share the longest sequence, on one they do not."""
    case = make_case([(1, n) for n in (1, 16, 63, 64, 65, 300)], **shape)
    exact = not case.pages.scaled
    if not exact:
        for new in (case.key, case.value):
            make_exact(new, case.pages.keys.dtype)
    wanted = expected(case)
    out = decode(case, processors)
    assert relative_error(out, wanted) < 1e-5
    written = copy.deepcopy(case.pages)
    reference.write_pages(case.pages, case.key, case.value, case.slots)
    for ours, theirs in zip(written.tensors(), case.pages.tensors(), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize(
    ("lengths", "window"),
    [
        ([1300] * 2, 0),
        ([900, 1, 600, 256], 0),
        ([900] * 4 + [0, 0], 700),
        *(
            pytest.param(lengths, window, marks=() if max(lengths) == 9000 and window else pytest.mark.heavy)
            for lengths, window in itertools.product(SHARED, (0, 700))
        ),
    ],
    ids=str,
)
def test_no_share_changes_a_bit(lengths: list[int], window: int) -> None:
    case = make_case([(1, max(1, length)) for length in lengths], window=window, heads=2, kv_heads=1)
    case.plan = [(1, length) for length in lengths]
    wanted = decode(copy.deepcopy(case), 0)
    for processors in (1, 5, 30):
        assert torch.equal(decode(copy.deepcopy(case), processors), wanted)


def test_decode_of_padding_is_zero_and_stores_nothing() -> None:
    case = make_case([(1, 40), (1, 40)])
    case.plan[1] = (1, 0)
    before = case.pages.keys.clone()
    for processors in (1, 100):
        out = decode(case, processors)
        assert (out[1] == 0).all() and out[0].isfinite().all()
    changed = (before.view(torch.uint8) != case.pages.keys.view(torch.uint8)).flatten(2).any(-1).nonzero()
    assert changed.tolist() == [[int(case.page_tables[0, 2]), 39 % 16]]


def decode(case: Case, processors: int) -> torch.Tensor:
    """Decode all rows of `case`; the counters must end as zeros."""
    counters = torch.zeros(case.query.shape[0] * case.key.shape[1], dtype=torch.int32)
    out = torch.full((*case.query.shape[:2], case.value.shape[2]), float("nan"))
    decode_attention(
        case.query,
        case.key,
        case.value,
        case.pages,
        case.page_tables,
        case.kv_lens,
        shares(case.kv_lens, case.key.shape[1], 4 * processors or 1),
        counters,
        out,
        case.options,
    )
    assert not counters.any()
    return out


@pytest.mark.parametrize(("shape", "tuning"), PREFILLS.values(), ids=PREFILLS)
def test_prefill(shape: dict, tuning: PrefillTuning | None) -> None:
    case = make_case([(7, 7), (30, 65), (17, 80), (2, 100), (16, 16), (33, 33)], **shape)
    wanted = expected(case)
    reference.write_pages(case.pages, case.key, case.value, case.slots)
    out = torch.full((len(wanted) + 20, *wanted.shape[1:]), float("nan"))
    query = torch.cat([case.query, torch.full((20, *case.query.shape[1:]), float("nan"))])
    shape_ = HeadShape(case.query.shape[2], case.value.shape[2], 4, case.pages.keys.element_size())
    chosen = tuning or tuning_for(shape_, len(query), *(t.shape[1] for t in (query, case.key)), 100)
    blocks = case.blocks(chosen.queries, padding=17)
    prefill_attention(query, case.pages, case.page_tables, blocks, out, case.options, 100, chosen)
    assert relative_error(out[: len(wanted)], wanted) < 1e-5
    assert (out[len(wanted) : -3] == 0).all() and out[-3:].isnan().all()


SPLIT = {
    "plain": ({"heads": 4, "kv_heads": 1}, (1, 2, 8)),
    "group of three, values narrower": ({"heads": 3, "kv_heads": 1, "key_dim": 48, "value_dim": 32}, (1, 2)),
    "window and all": (
        {"heads": 4, "kv_heads": 1, "window": 300, "softcap": 5.0, "sinks": True, "kv_dtype": "float8_e5m2"},
        (1, 2),
    ),
}


@pytest.mark.parametrize(("shape", "splits"), SPLIT.values(), ids=SPLIT)
def test_few_queries_behind_many_tokens(shape: dict, splits: tuple[int, ...]) -> None:
    """Programs share what a block sees, up to three parts, and leave parts: the same bits as one program's."""
    case = make_case([(7, 700), (16, 520), (2, 100)], **shape)
    reference.write_pages(case.pages, case.key, case.value, case.slots)
    wanted = expected(case)
    found = []
    for programs in splits:
        out = torch.full((len(wanted) + 20, *wanted.shape[1:]), float("nan"))
        query = torch.cat([case.query, torch.full((20, *case.query.shape[1:]), float("nan"))])
        tuning = PrefillTuning(16, 4, 2, math.gcd(shape["heads"], 4), programs)
        blocks = case.blocks(16, padding=17)
        prefill_attention(query, case.pages, case.page_tables, blocks, out, case.options, 100, tuning)
        assert relative_error(out[: len(wanted)], wanted) < 1e-5
        assert (out[len(wanted) : -3] == 0).all() and out[-3:].isnan().all()
        found.append(out[:-3].view(torch.int32))
    assert all(torch.equal(found[0], more) for more in found[1:])


def test_few_tokens_get_more_programs() -> None:
    narrow, wide = HeadShape(128, 128, 2, 2), HeadShape(128, 128, 4, 4)
    assert tuning_for(narrow, 32, 64, 8, 132) == PrefillTuning(16, 4, 2, heads=4, splits=16)
    assert tuning_for(narrow, 64, 64, 8, 132) == PrefillTuning(16, 4, 2, heads=4, splits=8)
    assert tuning_for(narrow, 64, 40, 8, 132) == PrefillTuning(16, 4, 2, heads=1, splits=2)
    assert tuning_for(narrow, 65, 64, 8, 132) == PrefillTuning(64, 4, 2)
    assert tuning_for(wide, 32, 64, 8, 132) == PrefillTuning(16, 4, 2, heads=1, splits=4)
    assert tuning_for(wide, 1000, 64, 8, 132) == PrefillTuning(16, 4, 2)


def test_only_narrow_heads_over_pages_of_16_bits_are_read_far_ahead() -> None:
    shapes = [HeadShape(128, 128, 2, 2), HeadShape(128, 128, 2, 1), HeadShape(256, 256, 2, 2), HeadShape(64, 64, 4, 4)]
    for tokens, stages in ((2048, [5, 2, 2, 2]), (64, [3, 2, 2, 2])):
        assert [tuning_for(shape, tokens, 32, 8, 132, ahead=True).stages for shape in shapes] == stages


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "float8_e5m2", "float8_e4m3fn"])
def test_write(kv_dtype: str) -> None:
    shape = {"heads": 6, "kv_heads": 3, "key_dim": 24, "value_dim": 40, "kv_dtype": kv_dtype}
    case, other = make_case([(5, 5), (3, 20)], **shape), make_case([(5, 5), (3, 20)], **shape)
    for new in (case.key, case.value):
        if case.pages.scaled:
            make_exact(new, getattr(torch, kv_dtype))
    case.key[2] = 0.0
    slots = case.slots.int()
    slots[[0, 6]] = -1  # passed over
    write_pages(case.pages, case.key, case.value, slots)
    there = slots >= 0
    reference.write_pages(other.pages, case.key[there], case.value[there], case.slots[there])
    for ours, theirs in zip(case.pages.tensors(), other.pages.tensors(), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def make_exact(new: torch.Tensor, dtype: torch.dtype) -> None:
    """Values that need no rounding, a power of two apart from the type's: the interpreter rounds eight bits wrongly."""
    new.copy_(new.to(dtype))
    new[..., 0] = torch.finfo(dtype).max
    new *= 4


def test_write_takes_strided_heads_first_input() -> None:
    case = make_case([(5, 5), (3, 20)])
    key = case.key.transpose(0, 1).contiguous().transpose(0, 1)
    write_pages(case.pages, key, case.value, case.slots)
    assert torch.equal(case.pages.keys.flatten(0, 1)[case.slots], case.key)


@triton.jit
def _parts_kernel(tokens, found, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    token = tl.load(tokens + at)
    tl.store(found + at, part_of(token))
    tl.store(found + COUNT + at, part_begin(token))
    tl.store(found + 2 * COUNT + at, begins_part(token).to(tl.int32))


def test_parts_end_at_fixed_places() -> None:
    begins = [0]
    while begins[-1] < 300_000:  # 256 tokens each up to 8,192, from there a sixteenth of the power of two before them
        before = 1 << (begins[-1].bit_length() - 1) if begins[-1] else 0
        begins.append(begins[-1] + max(256, before // 16))
    near = sorted({token + more for token in begins[:-1] for more in (-1, 0, 1, 100) if token + more >= 0})
    count = triton.next_power_of_2(len(near))
    tokens = torch.zeros(count, dtype=torch.int32)
    tokens[: len(near)] = torch.tensor(near)
    found = torch.zeros(3, count, dtype=torch.int32)
    _parts_kernel[(1,)](tokens, found, count)
    for token, number, following, begun in zip(near, *found[:, : len(near)].tolist(), strict=True):
        part = max(i for i, begin in enumerate(begins) if begin <= token)
        assert (number, begun) == (part, begins[part] == token)
        assert following == (token if begun else begins[part + 1])
        assert parts_of(token + 1) == part + 1
