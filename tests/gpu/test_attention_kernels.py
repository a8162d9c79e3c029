"""The compiled kernels against the reference in float64, at sizes that break tiles; pages nobody owns hold NaN."""

import copy

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from kvrail.engine.attention import cuda, reference  # noqa: E402
from kvrail.engine.attention.meta import StepMeta  # noqa: E402
from kvrail.engine.attention.triton.decode_kernel import decode_attention  # noqa: E402
from kvrail.engine.attention.triton.order import HeadShape  # noqa: E402
from kvrail.engine.attention.triton.page_kernels import write_pages  # noqa: E402
from kvrail.engine.attention.triton.prefill_kernel import prefill_attention, queries_for  # noqa: E402
from tests.engine.attention_cases import Case, expected, make_case, relative_error, shares  # noqa: E402

SIZES = (1, 63, 64, 65, 500, 3000, 2, 129)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = {
    "plain": {},
    "8B": {"heads": 32, "kv_heads": 8, "key_dim": 128, "value_dim": 128, "page_size": 64},
    "256 wide": {"heads": 8, "kv_heads": 4, "key_dim": 256, "value_dim": 256, "page_size": 64},
    "96 wide": {"heads": 6, "key_dim": 96, "value_dim": 96},
    "values narrower": {"heads": 4, "kv_heads": 4, "key_dim": 192, "value_dim": 128},
    "many query heads": {"heads": 40, "kv_heads": 1, "key_dim": 64, "value_dim": 64},
    "window": {"window": 100},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "all": {"window": 33, "softcap": 5.0, "sinks": True, "page_size": 128},
    "e5m2": {"kv_dtype": "float8_e5m2"},
    "e4m3": {"kv_dtype": "float8_e4m3fn", "window": 400, "sinks": True, "page_size": 64},
}


def case_of(plan: list, shape: dict, dtype: torch.dtype) -> Case:
    kept = str(dtype).removeprefix("torch.")
    return make_case(plan, **{"kv_dtype": kept, **shape}, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_decode(shape: dict, dtype: torch.dtype) -> None:
    case = case_of([(1, n) for n in (*SIZES, 9000)], shape, dtype)
    wanted = expected(case)
    pristine = copy.deepcopy(case.pages)
    reference.write_pages(pristine, case.key, case.value, case.slots)
    for processors in (1, 132, 4000):
        assert relative_error(decode(case, processors), wanted) < TOLERANCE[dtype]
    for ours, theirs in zip(case.pages.tensors(), pristine.tensors(), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def decode(case: Case, processors: int) -> torch.Tensor:
    """Decode all rows of `case`, twice over the same counters; the second result."""
    counters = torch.zeros(case.query.shape[0] * case.key.shape[1], dtype=torch.int32, device="cuda")
    for _ in range(2):
        out = torch.full((*case.query.shape[:2], case.value.shape[2]), float("nan"), dtype=case.query.dtype).cuda()
        decode_attention(
            case.query,
            case.key,
            case.value,
            case.pages,
            case.page_tables,
            case.kv_lens,
            shares(case.kv_lens, case.key.shape[1], 4 * processors),
            counters,
            out,
            case.options,
        )
    assert not counters.any()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_prefill(shape: dict, dtype: torch.dtype) -> None:
    case = case_of([(n, n) for n in SIZES[1:]] + [(70, 500), (2, 3000), (65, 66)], shape, dtype)
    wanted = expected(case)
    reference.write_pages(case.pages, case.key, case.value, case.slots)
    out = torch.full(wanted.shape, float("nan"), dtype=dtype, device="cuda")
    prefill_attention(case.query, case.pages, case.page_tables, blocks_of(case), out, case.options, 132)
    rounding = 2 if case.pages.scaled else 1  # eight-bit pages are rounded again on the way
    assert relative_error(out, wanted) < rounding * TOLERANCE[dtype]


def blocks_of(case: Case, padding: int = 0) -> torch.Tensor:
    """All queries of sequences with several, in blocks of as many as the kernel takes, and padding behind."""
    sizes = (case.query.element_size(), case.pages.keys.element_size())
    shape = HeadShape(case.query.shape[2], case.value.shape[2], *sizes)
    return case.blocks(queries_for(shape, len(case.query) + padding), padding)


@pytest.mark.parametrize("kv_dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_subnormal_elements_of_eight_bits(kv_dtype: str) -> None:
    """They are the only ones that are subnormal as operands, too: tensor cores must not take them for zeros."""
    case = case_of([(1, 300), (1, 65)], {"kv_dtype": kv_dtype}, torch.bfloat16)
    for pool, scales in case.pages.pairs:
        codes = pool.view(torch.uint8)
        codes &= 0x83 if kv_dtype == "float8_e5m2" else 0x87
        scales.fill_(1.0)
    for new in (case.key, case.value):
        new.zero_()
    case.query *= 2.0**14 if kv_dtype == "float8_e5m2" else 2.0**7
    assert relative_error(decode(case, 132), expected(case)) < TOLERANCE[torch.bfloat16]


MIXES = {
    "decodes": [(1, n) for n in SIZES],
    "whole prompts": [(n, n) for n in (63, 64, 65, 500, 2)],
    "chunks": [(70, 500), (2, 3000), (64, 65)],
    "mixed": [(1, 65), (63, 63), (1, 3000), (64, 500), (1, 1)],
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("plan", MIXES.values(), ids=MIXES)
def test_whole_step(plan: list, shape: dict) -> None:
    case = case_of(plan, shape, torch.bfloat16)
    wanted = expected(case)
    counters = torch.zeros(case.decodes * case.key.shape[1], dtype=torch.int32, device="cuda")
    blocks = blocks_of(case) if case.decodes < len(case.plan) else torch.zeros(0, 4, dtype=torch.int32, device="cuda")
    programs = shares(case.kv_lens, case.key.shape[1], 528)
    meta = StepMeta(case.stored_apart, case.page_tables, [], case.kv_lens, programs, counters, blocks)
    out = cuda.paged_attention(case.query, case.key, case.value, case.pages, meta, case.options)
    rounding = 2 if case.pages.scaled else 1  # eight-bit pages are rounded again on the way
    assert relative_error(out, wanted) < rounding * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("plan", MIXES.values(), ids=MIXES)
def test_a_padded_step_is_the_same_bit_for_bit(plan: list) -> None:
    """What a captured step launches: more rows and blocks than it needs, and tokens behind its own."""
    shape = {"heads": 32, "kv_heads": 8, "key_dim": 128, "value_dim": 128, "page_size": 64}
    case, other = case_of(plan, shape, torch.bfloat16), case_of(plan, shape, torch.bfloat16)
    tokens, rows, padding = len(case.query), 16, 40
    heads = case.key.shape[1]
    counters = torch.zeros(rows * heads, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(rows, dtype=torch.int32, device="cuda")
    lengths[: case.decodes] = case.kv_lens
    tables = torch.zeros(rows, case.page_tables.shape[1] + 3, dtype=torch.int32, device="cuda")
    tables[: len(case.plan), : case.page_tables.shape[1]] = case.page_tables
    slots = torch.full((tokens + padding,), -1, dtype=torch.int32, device="cuda")
    slots[:tokens] = case.stored_apart
    meta = StepMeta(slots, tables, [], lengths, shares(lengths, heads, 528), counters, blocks_of(case, padding))
    q, k, v = (
        torch.cat([t, torch.full_like(t[:1], 3).expand(padding, -1, -1)]) for t in (case.query, case.key, case.value)
    )
    found = cuda.paged_attention(q, k, v, case.pages, meta, case.options)
    exact = StepMeta(
        other.stored_apart,
        other.page_tables,
        kv_lens=lengths[: case.decodes],
        shares=shares(case.kv_lens, heads, 132),
        counters=counters[: case.decodes * heads],
        blocks=blocks_of(other),
    )
    wanted = cuda.paged_attention(other.query, other.key, other.value, other.pages, exact, other.options)
    assert torch.equal(found[:tokens], wanted)
    assert (found[tokens:] == 0).all() and not counters.any()
    for ours, theirs in ((case.pages.keys, other.pages.keys), (case.pages.values, other.pages.values)):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "float8_e5m2", "float8_e4m3fn"])
@pytest.mark.parametrize("dim", [64, 96])
def test_write_bit_for_bit(kv_dtype: str, dim: int) -> None:
    shape = {"heads": 6, "kv_heads": 3, "key_dim": dim, "value_dim": 40, "kv_dtype": kv_dtype}
    case, other = (make_case([(63, 63), (500, 3000)], **shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    case.key[7] = 0
    case.value[3] *= 1e30
    case.value[4] *= 1e-30
    heads_first = case.key.transpose(0, 1).contiguous().transpose(0, 1)
    write_pages(case.pages, heads_first, case.value, case.slots.int())
    reference.write_pages(other.pages, case.key, case.value, case.slots)
    for ours, theirs in zip(case.pages.tensors(), other.pages.tensors(), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_decode_of_padding_is_zero() -> None:
    case = case_of([(1, 500), (1, 500)], {}, torch.bfloat16)
    case.plan[1] = (1, 0)
    for processors in (1, 132):
        out = decode(case, processors)
        assert (out[1] == 0).all() and out[0].isfinite().all()


def test_pages_beyond_two_to_the_31_elements() -> None:
    """Offsets into a pool of more than 2^31 elements need 64 bits."""
    heads, dim, page_size = 8, 128, 64
    num_pages = (1 << 31) // (page_size * heads * dim) + 3
    shape = {"heads": 32, "kv_heads": heads, "key_dim": dim, "value_dim": dim, "page_size": page_size}
    case = case_of([(1, 130), (40, 130)], shape, torch.bfloat16)
    wanted = expected(case)
    far = [torch.empty(num_pages, page_size, heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    used = len(case.pages.keys)
    for pool, old in zip(far, (case.pages.keys, case.pages.values), strict=True):
        pool[-used:] = old
    shift = num_pages - used
    layer = type(case.pages)(*far)
    write_pages(layer, case.key[1:], case.value[1:], (case.slots[1:] + shift * page_size).int())
    tables = case.page_tables + shift
    counters = torch.zeros(heads, dtype=torch.int32, device="cuda")
    out = torch.full(wanted.shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    q, k, v = (t[:1] for t in (case.query, case.key, case.value))
    lengths = case.kv_lens[:1]
    programs = shares(lengths, heads, 528)
    decode_attention(q, k, v, layer, tables[:1], lengths, programs, counters, out[:1], case.options)
    prefill_attention(case.query, layer, tables, blocks_of(case), out, case.options, 132)
    assert relative_error(out, wanted) < TOLERANCE[torch.bfloat16]
