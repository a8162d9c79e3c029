"""The progressive codec on the CPU: both payloads equal the reference, a first stage the formula, a second restores."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_blocks import bits_of, copy_of, decode_stages, random_block, scattered, spec_of
from progressive_cases import (
    channel_tops,
    every_pattern,
    exponents_of,
    kv_pages,
    matrices,
    middles,
    plans_of,
    raw_of,
    reference_payloads,
)
from test_splitzip import SHAPES, golden_pages

from kvrail.codec.base import Block, CodecError, PagedBlock
from kvrail.codec.core import cpu as core_cpu
from kvrail.codec.splitzip.one_stage.codec import splitzip_channel
from kvrail.codec.splitzip.progressive import reference
from kvrail.codec.splitzip.progressive.codec import ProgressiveCodec
from kvrail.codec.splitzip.progressive.format import Cut
from kvrail.codec.splitzip.progressive.payload import parse_rest
from kvrail.codec.splitzip.progressive_ans.codec import ProgressiveAnsCodec
from kvrail.codec.splitzip.tiles.format import FORMATS
from kvrail.codec.splitzip.tiles.payload import HEADER_BYTES

GOLDEN = Path(__file__).parent / "golden"
PROPERTY = settings(max_examples=1000 if os.environ.get("CI") == "true" else 60)
CUTS = [Cut(keys, values) for keys, values in ((2, 1), (1, 3), (3, 2))]
SIXTEEN = ["bfloat16", "float16"]
TWO_STAGES = [ProgressiveCodec, ProgressiveAnsCodec]


def assert_equals_reference(pages, cut=None, chunk=4096):
    """Encode, decode stage by stage; give the stats and the payloads."""
    codec, plans, before = ProgressiveCodec(cut, chunk), plans_of(pages.spec, cut, chunk), copy_of(pages)
    encoding = codec.encode(pages)
    first, second = encoding.stages()
    assert (bytes(first), bytes(second)) == reference_payloads(pages, plans)
    assert bits_of(pages.pools) == bits_of(before.pools)
    out = scattered(pages.spec, 99)  # poisoned: random bits everywhere
    expected = copy_of(out)
    raw = raw_of(second, plans)
    for stage, wanted in enumerate((middles(pages.gather(), plans, raw), pages.gather())):
        codec.decode(stage, [first, second][: stage + 1], out)
        expected.scatter(wanted)
        assert bits_of(out.pools) == bits_of(expected.pools)
    return encoding.stats(), (first, second)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_equals_the_reference(dtype, cut, shape):
    assert_equals_reference(kv_pages(spec_of(shape, dtype), 1), cut)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_of_eight_bits_only_escapes_travel_in_the_second_stage(dtype, shape):
    pages = kv_pages(spec_of(shape, dtype), 1)
    stats, (_, second) = assert_equals_reference(pages)
    parts = parse_rest(np.frombuffer(second, dtype=np.uint8), plans_of(pages.spec)).parts
    beside = sum(0 if part.raw else 2 * part.plan.tiles + 8 * part.plan.groups for part in parts)
    padding = second.nbytes - HEADER_BYTES - beside - 2 * stats.escapes - sum(part.extensions for part in parts)
    assert 0 <= padding < 2 * 4 * 16


@pytest.mark.parametrize("chunk", [256, 1024, 16384])
@pytest.mark.parametrize("dtype", FORMATS)
def test_equals_the_reference_at_any_chunk_size(dtype, chunk):
    for shape in ((1, 1, 64, 2, 70, 66), (1, 2, 17, 3, 20, 4)):
        assert_equals_reference(kv_pages(spec_of(shape, dtype), 2), chunk=chunk)


@PROPERTY
@given(
    dtype=st.sampled_from(sorted(FORMATS)),
    cut=st.builds(Cut, st.integers(1, 3), st.integers(1, 3)),
    chunk=st.sampled_from([256, 1024, 4096]),
    shape=st.tuples(
        st.integers(1, 2), st.integers(0, 3), st.integers(1, 20), *[st.integers(1, 3)], *[st.integers(1, 9)] * 2
    ),
    outliers=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_equals_the_reference_on_any_pages(dtype, cut, chunk, shape, outliers, seed):
    assert_equals_reference(kv_pages(spec_of(shape, dtype), seed, outliers), cut, chunk)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("dtype", FORMATS)
def test_every_bit_pattern_survives(dtype, cut):
    block, codec = every_pattern(dtype), ProgressiveCodec(cut)
    out, plans = random_block(block.spec, 4), plans_of(block.spec, cut)
    encoding = codec.encode(PagedBlock.whole(block))
    first, second = encoding.stages()
    assert encoding.stats().raw_tensors == 0
    codec.decode(0, [first], PagedBlock.whole(out))
    assert bits_of(out) == bits_of(middles(block, plans))
    codec.decode(1, [first, second], PagedBlock.whole(out))
    assert bits_of(out) == bits_of(block)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_first_stage_is_within_half_an_interval_of_what_the_window_covers(dtype):
    block, cut = every_pattern(dtype), Cut()
    for tensor in (block.keys, block.values):
        tensor.view(-1)[::50] = 0  # escapes, but for the lowest channels
    out, plans = random_block(block.spec, 4), plans_of(block.spec, cut)
    codec = ProgressiveCodec(cut)
    codec.decode(0, [codec.encode(PagedBlock.whole(block)).stages()[0]], PagedBlock.whole(out))
    tensors = ((block.keys, out.keys, plans[0]), (block.values, out.values, plans[1]))
    for exact, coarse, plan in tensors:
        exponents, coarse_exponents = exponents_of(exact, plan), exponents_of(coarse, plan)
        tops = channel_tops(exponents, plan)
        lowest = tops - 6
        covered = exponents >= lowest
        assert torch.equal(coarse_exponents[covered], exponents[covered])
        assert not covered.all() and torch.equal(coarse_exponents[~covered], lowest[~covered])
        assert torch.equal(coarse.signbit(), exact.signbit())
        assert coarse.isfinite()[exact.isfinite()].all()
        error = (coarse.double() - exact.double()).abs()
        normal = covered & exact.isfinite() & (exponents > 0)
        octave = 2.0 ** exact.double().abs().log2().floor()
        assert (error <= octave * 2.0 ** -(plan.kept_bits + 1))[normal].all()
        fine = normal & (tops - exponents < 2) & (exact.double().abs() < 1.5 * octave)
        assert fine.any() and (error <= octave * 2.0 ** -(plan.kept_bits + 2))[fine].all()
        assert (coarse.abs() < torch.finfo(exact.dtype).smallest_normal)[covered & (exponents == 0)].all()


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("loud", [float("inf"), float("nan"), 1.0])
def test_silent_channel_is_made_of_escapes(dtype, loud):
    """Its drop is cut at 15, so that its window ends above its values; infinities and NaNs are loudest of all."""
    spec = spec_of((1, 1, 64, 1, 64, 64), dtype)
    keys = torch.rand((1, 1, 64, 1, 64), generator=torch.Generator().manual_seed(1)) + 0.5
    keys *= torch.finfo(getattr(torch, dtype)).max / 16
    keys[..., 0] *= loud
    keys[..., 1] = -(2.0**-14)
    keys[..., 2] = 0
    keys = keys.to(getattr(torch, dtype))
    block, out, plan = Block(keys, keys.clone()), random_block(spec, 4), plans_of(spec)[0]
    encoding = ProgressiveCodec().encode(PagedBlock.whole(block))
    first, second = encoding.stages()
    assert encoding.stats().raw_tensors == 0 and encoding.stats().escapes == 2 * 2 * 64
    ProgressiveCodec().decode(0, [first], PagedBlock.whole(out))
    assert (exponents_of(out.keys, plan)[..., 1:3] == exponents_of(keys, plan).max() - 15 - 6).all()
    assert torch.equal(out.keys.isfinite(), keys.isfinite()) and torch.equal(out.keys.signbit(), keys.signbit())
    ProgressiveCodec().decode(1, [first, second], PagedBlock.whole(out))
    assert bits_of(out) == bits_of(block)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FORMATS)
def test_second_stage_gives_every_bit_whatever_lies_in_the_pages(dtype, shape):
    """But for scales and for what travels raw, which the first stage alone has."""
    pages = kv_pages(spec_of(shape, dtype), 4)
    stages, out = ProgressiveCodec().encode(pages).stages(), scattered(pages.spec, 5)
    for tensor in out.pools.tensors():
        tensor.view(torch.uint8).fill_(0xA5)
    expected, wanted, poison = copy_of(out), pages.gather(), out.gather()
    raw = (*raw_of(stages[1], plans_of(pages.spec)), True, True)
    tensors = zip(wanted.tensors(), poison.tensors(), raw, strict=False)
    expected.scatter(Block(*(left if whole else exact for exact, left, whole in tensors)))
    ProgressiveCodec().decode(1, stages, out)
    assert bits_of(out.pools) == bits_of(expected.pools)


@pytest.mark.parametrize("dtype", FORMATS)
def test_all_bits_come_to_no_more_than_in_one_stage_but_for_more_escapes(dtype):
    pages = kv_pages(spec_of((2, 4, 64, 2, 64, 64), dtype), 3, outliers=0)
    stages, one = ProgressiveCodec().encode(pages), splitzip_channel().encode(pages)
    more = 3 * (stages.stats().escapes - one.stats().escapes)
    assert (more > 0) == (dtype in SIXTEEN)
    assert sum(stage.nbytes for stage in stages.stages()) <= one.stages()[0].nbytes + more + HEADER_BYTES + 2 * 2 * 16


def test_bits_of_the_stages():
    """Planes of code, sign, kept bits and tops; planes of the rest and all that there is of escapes."""
    pages = kv_pages(spec_of((1, 4, 64, 2, 64, 64), "bfloat16"), 3, outliers=0)
    values = 2 * 4 * 64 * 2 * 64
    codec = ProgressiveCodec()
    first, second = codec.encode(pages).stages()
    plans = plans_of(pages.spec)
    assert [sum(plan.planes["anchor"]) for plan in plans] == [3 + 1 + 2, 3 + 1 + 1]
    planes = values // 2 * 6 // 8 + values // 2 * 5 // 8
    tops = sum(plan.tiles * (1 + plan.tile_width // 2) for plan in plans)
    assert 0 <= first.nbytes - (HEADER_BYTES + planes + tops) < 2 * 2 * 16
    parts = parse_rest(np.frombuffer(second, dtype=np.uint8), plans).parts
    assert parts[0].records and parts[1].records
    planes = values // 2 * 5 // 8 + values // 2 * 6 // 8
    escapes = sum(2 * plan.tiles + 8 * plan.groups for plan in plans) + sum(part.escape_bytes for part in parts)
    assert 0 <= second.nbytes - (HEADER_BYTES + planes + escapes) < 2 * 2 * 16


@pytest.mark.parametrize("dtype", FORMATS)
def test_random_bits_travel_raw_in_the_first_stage(dtype):
    spec = spec_of((2, 3, 64, 2, 64, 64), dtype)
    pages, codec = scattered(spec, 5), ProgressiveCodec()
    encoding = codec.encode(pages)
    first, second = encoding.stages()
    assert first.nbytes <= spec.raw_bytes + HEADER_BYTES + 3 * 16 and second.nbytes == HEADER_BYTES
    assert encoding.stats().raw_tensors == 2 and encoding.stats().escapes == 0
    out = scattered(spec, 6)
    codec.decode(0, [first], out)
    assert bits_of(out.gather()) == bits_of(pages.gather())
    codec.decode(1, [first, second], out)
    assert bits_of(out.gather()) == bits_of(pages.gather())


@pytest.mark.parametrize("raw", ["keys", "values"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2"])
def test_one_tensor_raw_the_other_coded(dtype, raw):
    pages = kv_pages(spec_of((2, 2, 64, 2, 32, 48), dtype), 6, outliers=0)
    noise = random_block(pages.pools.spec, 7)
    pages = dataclasses.replace(pages, pools=dataclasses.replace(pages.pools, **{raw: getattr(noise, raw)}))
    stats, _ = assert_equals_reference(pages)
    assert stats.raw_tensors == 1


def test_pages_too_long_for_a_tile_travel_raw():
    stats, _ = assert_equals_reference(kv_pages(spec_of((1, 1, 300, 1, 4, 4), "bfloat16"), 12), chunk=256)
    assert stats.raw_tensors == 2


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("dtype", FORMATS)
def test_reference_decodes_what_it_encodes(dtype, cut):
    pages = kv_pages(spec_of((2, 2, 17, 2, 9, 20), dtype), 8)
    page_ids = np.array(pages.page_ids)
    out = scattered(pages.spec, 9)
    tensors = zip(plans_of(pages.spec, cut, 256), pages.layer_pools(), out.layer_pools(), strict=False)
    for plan, source, target in tensors:
        dense, rest = np.zeros(plan.fixed_bytes, np.uint8), np.zeros(plan.rest.fixed_bytes, np.uint8)
        escapes = reference.encode_tensor(matrices(source), page_ids, plan, dense, rest)
        reference.decode_anchor(dense, page_ids, plan, matrices(target))
        coarse = matrices(target)[:, page_ids]
        assert not np.array_equal(coarse, matrices(source)[:, page_ids])
        matrices(target)[:] = 0xA5
        reference.decode_exact(dense, rest, *escapes, page_ids, plan, matrices(target))
        assert np.array_equal(matrices(target)[:, page_ids], matrices(source)[:, page_ids])


@pytest.mark.parametrize("make", TWO_STAGES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_many_threads_give_the_same_payloads(dtype, make, monkeypatch):
    pages = kv_pages(spec_of((3, 5, 48, 2, 40, 24), dtype), 10, outliers=0.0)
    codec = make(chunk=1024)
    one = [bytes(stage) for stage in codec.encode(pages).stages()]
    monkeypatch.setattr(core_cpu, "BYTES_PER_THREAD", 1)
    monkeypatch.setattr(core_cpu, "MAX_THREADS", 3)
    out = scattered(pages.spec, 11)
    expected = copy_of(out)
    expected.scatter(pages.gather())
    assert [bytes(stage) for stage in codec.encode(pages).stages()] == one
    decode_stages(codec, [memoryview(payload) for payload in one], out)
    assert bits_of(out.pools) == bits_of(expected.pools)


@pytest.mark.parametrize("make", TWO_STAGES)
def test_pool_that_is_not_contiguous_is_refused(make):
    block = random_block(spec_of((1, 2, 8, 2, 16, 16), "bfloat16"))
    pages, codec = PagedBlock.whole(block), make()
    stages = codec.encode(pages).stages()
    wide = random_block(spec_of((1, 2, 8, 2, 32, 32), "bfloat16"))
    pages = PagedBlock.whole(Block(wide.keys[..., :16], wide.values[..., :16]))
    with pytest.raises(CodecError, match="not contiguous"):
        codec.encode(pages)
    for stage in range(2):
        with pytest.raises(CodecError, match="not contiguous"):
            codec.decode(stage, stages[: stage + 1], pages)


@pytest.mark.parametrize("kept", [0, 4])
def test_cut_that_there_is_not_is_refused(kept):
    with pytest.raises(ValueError, match=f"{kept} mantissa bits of values; choose 1 to 3"):
        Cut(values=kept)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2"])
def test_golden_payloads(dtype):
    pages, codec = golden_pages(dtype, octaves=6), ProgressiveCodec()
    out = dataclasses.replace(pages, pools=random_block(pages.pools.spec, 13))
    stages = codec.encode(pages).stages()
    stats = codec.encode(pages).stats()
    assert stats.raw_tensors < 2 and stats.escapes
    golden = [(GOLDEN / f"splitzip_progressive_{dtype}_{stage}.bin").read_bytes() for stage in range(2)]
    assert [bytes(stage) for stage in stages] == golden
    decode_stages(codec, [memoryview(stage) for stage in golden], out)
    assert bits_of(out.gather()) == bits_of(pages.gather())
