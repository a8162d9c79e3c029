"""Lynx on the CPU equals its reference bit for bit, payloads and pages of every stage."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_blocks import bits_of, copy_of, decode_stages, random_block, scattered, spec_of
from lynx_cases import kv_block, kv_pages, reference_decode, reference_payloads

from kvrail.codec.base import Block, BlockSpec, CodecError, PagedBlock
from kvrail.codec.core import cpu as core_cpu
from kvrail.codec.core.floats import WIDE
from kvrail.codec.papers.lynx.codec import lynx, lynx_exact
from kvrail.codec.papers.lynx.format import LynxCode
from kvrail.codec.papers.lynx.payload import EXACT, parse, parse_both, plans_of

GOLDEN = Path(__file__).parent / "golden"
PROPERTY = settings(max_examples=100 if os.environ.get("CI") == "true" else 40)
CODES = [LynxCode(), LynxCode(chunk=16), LynxCode(alpha=3.0), LynxCode(alpha=0.25, chunk=8), LynxCode(alpha=255.0)]
SHAPES = [  # layers, pages, page_size, kv_heads, key_dim, value_dim
    (1, 1, 1, 1, 1, 1),
    (2, 3, 7, 1, 5, 33),
    (1, 2, 16, 2, 24, 8),
    (2, 1, 63, 2, 9, 17),
    (1, 2, 64, 2, 64, 40),
    (1, 1, 200, 1, 3, 11),
]


def assert_equals_reference(pages, code):
    """Encode and decode `pages`, stage by stage; give the stats and the pages after each stage."""
    before = copy_of(pages)
    encoding = lynx_exact(code).encode(pages)
    payloads = encoding.stages()
    assert [bytes(each) for each in payloads] == reference_payloads(pages, code, 3)
    assert [bytes(each) for each in lynx(code).encode(pages).stages()] == [bytes(each) for each in payloads[:2]]
    assert bits_of(pages.pools) == bits_of(before.pools)
    out, expected = scattered(pages.spec, 99), scattered(pages.spec, 99)  # poisoned: random bits everywhere
    stages, layouts = [], []
    for stage, payload in enumerate(payloads):
        lynx_exact(code).decode(stage, payloads[: stage + 1], out)
        layouts.append(parse(np.frombuffer(payload, dtype=np.uint8), pages.spec, code, stage))
        reference_decode(payloads[: stage + 1], layouts, expected)
        assert bits_of(out.pools) == bits_of(expected.pools)
        stages.append(out.gather())
    assert bits_of(stages[-1]) == bits_of(pages.gather())
    return encoding.stats(), stages


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("dtype", WIDE)
def test_equals_the_reference(dtype, code, shape):
    assert_equals_reference(kv_pages(spec_of(shape, dtype), 1, noise=0.01), code)


@PROPERTY
@given(
    dtype=st.sampled_from(sorted(WIDE)),
    code=st.builds(LynxCode, st.sampled_from([0.0, 0.01, 1.0, 60.0]), st.sampled_from([8, 16, 64])),
    shape=st.tuples(*[st.integers(1, 2)] * 2, st.integers(1, 40), st.integers(1, 2), *[st.integers(1, 9)] * 2),
    noise=st.sampled_from([0.0, 0.02, 1.0]),
    offset=st.sampled_from([0.0, 1.0, 1000.0]),
    seed=st.integers(0, 2**32),
)
def test_equals_the_reference_on_any_pages(dtype, code, shape, noise, offset, seed):
    assert_equals_reference(kv_pages(spec_of(shape, dtype), seed, noise, offset), code)


def test_several_blocks_of_columns_and_several_threads():
    pages = kv_pages(spec_of((2, 9, 64, 3, 120, 100), "bfloat16"), 2)
    stats, _ = assert_equals_reference(pages, LynxCode())
    assert stats.raw_tensors == 0 and 0 < stats.escapes < stats.values // 50


def every_pattern(dtype):
    """A page whose values have every pattern of 16 bits, in an order that mixes them."""
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    bits = order.to(torch.int16).view(1, 16, 64, 1, 64)
    return Block(bits.view(dtype), bits.flip(3).contiguous().view(dtype))


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_restores_all_patterns(dtype, code):
    block = every_pattern(dtype)
    pages, out = PagedBlock.whole(block), random_block(block.spec, 4)
    decode_stages(lynx_exact(code), lynx_exact(code).encode(pages).stages(), PagedBlock.whole(out))
    assert bits_of(out) == bits_of(block)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_restores_all_patterns_among_ordinary_values(dtype):
    """Each channel of a page has one pattern and 63 values of one scale: the stream, not the elements, restores it."""
    code = LynxCode()
    generator = torch.Generator().manual_seed(5)
    ordinary = (torch.randn(1, 64, 64, 1, 1024, generator=generator)).to(dtype).view(torch.int16)
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(1, 64, 1, 1, 1024)
    rows = torch.randint(64, (1, 64, 1, 1, 1024), generator=generator)
    bits = ordinary.scatter(2, rows, patterns).view(dtype)
    block = Block(bits, ordinary.view(dtype))
    encoding = lynx_exact(code).encode(PagedBlock.whole(block))
    payloads, out = encoding.stages(), random_block(block.spec, 4)
    assert encoding.stats().raw_tensors == 0 and encoding.stats().escapes > 500
    decode_stages(lynx_exact(code), payloads, PagedBlock.whole(out))
    assert bits_of(out) == bits_of(block)
    assert_non_finite_values_leak_nowhere(block, code)


def assert_non_finite_values_leak_nowhere(block, code):
    """With 0 in place of each value that is not finite, the others' coarse and refined values are the same."""
    numbers = block.keys.float()
    finite = numbers.isfinite()
    # The least finite value of its channel: it neither widens nor narrows it.
    filler = torch.where(finite, numbers, torch.inf).amin(2, keepdim=True).expand_as(numbers).to(block.keys.dtype)
    tame = Block(torch.where(finite, block.keys, filler), block.values)
    results = []
    for source in (block, tame):
        out = random_block(block.spec, 6)
        decode_stages(lynx(code), lynx(code).encode(PagedBlock.whole(source)).stages(), PagedBlock.whole(out))
        assert out.keys.float().isfinite().all()
        results.append(out.keys[finite].view(torch.int16))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", WIDE)
def test_values_that_are_not_finite_become_finite(dtype):
    """Infinities become the ends of their channel, NaN the lower one: within a step of them."""
    spec = spec_of((1, 1, 16, 1, 3, 3), dtype)
    keys = torch.linspace(-4, 4, 16).view(1, 1, 16, 1, 1).repeat(1, 1, 1, 1, 3)
    keys[0, 0, 5, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    block = Block(keys.to(getattr(torch, dtype)), torch.full_like(keys, torch.nan).to(getattr(torch, dtype)))
    out = random_block(spec, 1)
    decode_stages(lynx(), lynx().encode(PagedBlock.whole(block)).stages(), PagedBlock.whole(out))
    found = out.keys[0, 0, 5, 0].float()
    assert torch.allclose(found, torch.tensor([4.0, -4.0, -4.0]), atol=4 / 128)
    assert not out.values.view(torch.uint8).any()


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("dtype", WIDE)
def test_errors_keep_their_bounds(dtype, code):
    """README.md, "Error": half a cell, half a step, and what is rounded to the element type."""
    block = kv_block(spec_of((1, 3, 64, 2, 32, 32), dtype), 7, offset=0.5)
    out, exact = random_block(block.spec, 8), block.keys.double()
    pages, chunk = PagedBlock.whole(out), min(code.chunk, 64)
    payloads = lynx(code).encode(PagedBlock.whole(block)).stages()
    parts = exact.view(1, 3, 64 // chunk, chunk, 2, 32)
    half = (parts.amax(3, keepdim=True) - parts.amin(3, keepdim=True)) / 2
    page = (exact.amax(2) - exact.amin(2)).view(1, 3, 1, 1, 2, 32) / 2
    scale = (half * (1 + 2**-7) + page * (4 / 255 if chunk < 64 else 0)).expand_as(parts).reshape(exact.shape)
    rounding = exact.abs() * 2.0 ** -WIDE[dtype].mantissa_bits
    for stage, widths in ((0, np.diff(code.edges)), (1, code.steps)):
        lynx(code).decode(stage, payloads[: stage + 1], pages)
        bound = scale * float(widths.max()) / 128 / 2 * (1 + 2**-7) + rounding * (1 + stage)
        error = (out.keys.double() - exact).abs()
        assert (error <= bound).all()
        assert (error > bound / 4).any()  # the bound is not generous


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("dtype", WIDE)
def test_second_stage_gives_the_same_whatever_lies_in_the_pages(dtype, code, shape):
    """But for what travels raw, which the first stage alone has."""
    pages = kv_pages(spec_of(shape, dtype), 4, noise=0.01)
    payloads, wanted, out = lynx(code).encode(pages).stages(), scattered(pages.spec, 5), scattered(pages.spec, 5)
    sources = [np.frombuffer(payload, dtype=np.uint8) for payload in payloads]
    layouts = parse_both(*sources, pages.spec, code)
    for pool in (*out.pools.tensors(), *wanted.pools.tensors()):
        pool.view(torch.uint8).fill_(0xA5)
    reference_decode(payloads, layouts, wanted)
    lynx(code).decode(1, payloads, out)
    assert bits_of(out.pools) == bits_of(wanted.pools)


@pytest.mark.parametrize("name", ["lynx", "lynx_exact"])
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_eight_bit_types_are_refused(name, dtype):
    codec, pages = {"lynx": lynx(), "lynx_exact": lynx_exact()}[name], scattered(spec_of((1, 1, 4, 1, 8, 8), dtype))
    with pytest.raises(CodecError, match=f"{dtype}; it takes bfloat16, float16, float32"):
        codec.encode(pages)
    with pytest.raises(CodecError, match=dtype):
        codec.decode(0, [memoryview(b"")], pages)


def test_pages_that_are_not_contiguous_are_refused():
    block = kv_block(spec_of((1, 2, 8, 8, 8, 8), "bfloat16"))
    pages = PagedBlock.whole(Block(block.keys.transpose(2, 3), block.values.transpose(2, 3)))
    with pytest.raises(CodecError, match="contiguous"):
        lynx().encode(pages)
    with pytest.raises(CodecError, match="contiguous"):
        lynx().decode(0, [lynx().encode(PagedBlock.whole(block)).stages()[0]], pages)


@pytest.mark.parametrize("values", [{"alpha": -1}, {"alpha": 256}, {"chunk": 4}, {"chunk": 48}, {"chunk": 8192}])
def test_parameters_that_make_no_code_are_refused(values):
    with pytest.raises(ValueError, match=str(next(iter(values.values())))):
        LynxCode(**values)


def test_codes_of_other_parameters_have_other_ids():
    codes = [*CODES, LynxCode(chunk=32), LynxCode(alpha=0.5)]
    assert len({code.id for code in codes}) == len(codes) and LynxCode().id == LynxCode(0.0, 64).id


def test_edges_are_those_of_the_logarithmic_map():
    """Lynx, equation 3: the share of the code range that a value at each edge has is a multiple of an eighth."""
    for alpha in (0.5, 3.0, 63.0):
        shares = np.log1p(alpha * LynxCode(alpha).edges.astype(np.float64) / 128) / np.log1p(alpha)
        assert np.allclose(shares, np.arange(9) / 8, atol=1e-6)
    assert LynxCode().edges.tolist() == list(range(0, 129, 16))


def test_a_page_that_would_grow_travels_as_it_is_in_stage_0():
    pages = kv_pages(spec_of((2, 3, 2, 2, 64, 64), "bfloat16"), 9, noise=0.1)
    assert all(plan.raw for plan in plans_of(pages.spec, LynxCode()))
    encoding = lynx().encode(pages)
    payloads = encoding.stages()
    assert encoding.stats().raw_tensors == 2 and payloads[1].nbytes == 32
    out = scattered(pages.spec, 10)
    lynx().decode(0, [payloads[0]], out)
    assert bits_of(out.gather()) == bits_of(pages.gather())


def test_a_stream_that_would_be_no_smaller_is_replaced_by_the_elements():
    spec = spec_of((1, 2, 64, 1, 32, 32), "bfloat16")
    block = Block(torch.full((1, 2, 64, 1, 32), torch.nan, dtype=torch.bfloat16), kv_block(spec).values)
    encoding = lynx_exact().encode(PagedBlock.whole(block))
    payloads, out = encoding.stages(), random_block(spec, 2)
    layout = parse(np.frombuffer(payloads[EXACT], dtype=np.uint8), spec, LynxCode(), EXACT)
    assert [part.raw for part in layout.parts] == [True, False] and encoding.stats().raw_tensors == 1
    decode_stages(lynx_exact(), payloads, PagedBlock.whole(out))
    assert bits_of(out) == bits_of(block)


def test_rows_that_drafts_overwrite_change_no_row_before_them():
    pages = kv_pages(spec_of((1, 2, 64, 2, 32, 32), "bfloat16"), 11)
    payloads, out = lynx_exact().encode(pages).stages(), scattered(pages.spec, 12)
    noise = random_block(out.pools.spec, 13)
    for stage in range(len(payloads)):
        lynx_exact().decode(stage, payloads[: stage + 1], out)
        for pool, other in zip(out.pools.tensors(), noise.tensors(), strict=True):
            pool[:, out.page_ids[1], 40:] = other[:, out.page_ids[1], 40:]
    found, expected = out.gather(), pages.gather()
    for ours, theirs in zip(found.tensors(), expected.tensors(), strict=True):
        assert torch.equal(ours[:, 0].view(torch.int16), theirs[:, 0].view(torch.int16))
        assert torch.equal(ours[:, 1, :40].view(torch.int16), theirs[:, 1, :40].view(torch.int16))


def golden_pages():
    """Integers that are bfloat16 numbers: pages that no library draws."""
    spec = BlockSpec("bfloat16", 2, 3, 24, 2, 8, 4, False)
    lead = (spec.num_layers, spec.num_pages, spec.page_size, spec.num_kv_heads)
    count = torch.arange(2 * 3 * 24 * 2 * 8, dtype=torch.int64)
    keys = (count * 7919 % 251 - 100).to(torch.bfloat16).view(*lead, 8)
    values = (count[: keys.numel() // 2] * 104729 % 127 / 8).to(torch.bfloat16).view(*lead, 4)
    return PagedBlock(Block(keys, values), range(2), (2, 0))


@pytest.mark.parametrize(("name", "code"), [("lynx", LynxCode()), ("lynx_curved", LynxCode(alpha=3.0, chunk=16))])
def test_golden_payloads(name, code):
    pages = golden_pages()
    out = dataclasses.replace(pages, pools=random_block(pages.pools.spec, 13))
    golden = [(GOLDEN / f"{name}_bf16_{stage}.bin").read_bytes() for stage in range(3)]
    assert [bytes(payload) for payload in lynx_exact(code).encode(pages).stages()] == golden
    decode_stages(lynx_exact(code), [memoryview(payload) for payload in golden], out)
    assert bits_of(out.gather()) == bits_of(pages.gather())


def test_threads_take_pages(monkeypatch):
    monkeypatch.setattr(core_cpu, "BYTES_PER_THREAD", 1 << 10)
    monkeypatch.setattr(core_cpu, "MAX_THREADS", 3)
    assert_equals_reference(kv_pages(spec_of((2, 2, 64, 1, 40, 24), "float16"), 14, noise=0.01), LynxCode())
