"""KVComp equals its reference bit for bit, and no value errs by more than the bound."""

import dataclasses
import heapq
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_blocks import bits_of, copy_of, random_block, scattered, spec_of
from lynx_cases import kv_pages
from test_integer import golden_cases

from kvrail.codec import registry
from kvrail.codec.base import Block, CodecError, PagedBlock
from kvrail.codec.core.floats import WIDE
from kvrail.codec.papers.kvcomp import codebook
from kvrail.codec.papers.kvcomp.codec import KVCompCodec
from kvrail.codec.papers.kvcomp.format import (
    BLOCK_CODE,
    CHANNEL_CODE,
    Granularity,
    KVCompCode,
    TensorCode,
)
from kvrail.codec.papers.kvcomp.payload import parse, plans_of
from tests.reference import kvcomp as reference

GOLDEN = Path(__file__).parent / "golden"
PROPERTY = settings(max_examples=100 if os.environ.get("CI") == "true" else 25, deadline=None)
CODES = {"kvcomp": CHANNEL_CODE, "kvcomp-block": BLOCK_CODE}
SHAPES = [  # layers, pages, page_size, kv_heads, key_dim, value_dim
    (1, 1, 1, 1, 1, 1),
    (2, 3, 7, 1, 5, 33),
    (1, 2, 16, 2, 24, 8),
    (2, 1, 63, 2, 9, 17),
    (1, 1, 64, 1, 32, 40),
]
CODE = st.builds(
    KVCompCode,
    *[st.builds(TensorCode, st.sampled_from(Granularity), st.floats(0.005, 0.5, allow_subnormal=False))] * 2,
)


def codec_of(code):
    return KVCompCodec("kvcomp", code)


def assert_equals_reference(code, pages):
    """Encode and decode `pages`; give the encoding's stats and the pages as they arrive."""
    codec, before = codec_of(code), copy_of(pages)
    encoding = codec.encode(pages)
    (payload,) = encoding.stages()
    assert bytes(payload) == reference.encode(pages.gather(), code)
    assert bits_of(pages.pools) == bits_of(before.pools)
    out = scattered(pages.spec, 99)  # poisoned: random bits everywhere
    around = copy_of(out)
    codec.decode(0, [payload], out)
    found = out.gather()
    assert bits_of(found) == bits_of(reference.decode(bytes(payload), pages.gather(), code))
    around.scatter(found)
    assert bits_of(out.pools) == bits_of(around.pools)
    assert_within_bound(code, pages.gather(), found)
    return encoding.stats(), found


def assert_within_bound(code, exact, found):
    """Half the relative scale of the unit's range, and what the element type rounds to; in float64, no tolerance.

    What is not finite is there bit for bit.
    """
    for each, sent, got in zip((code.keys, code.values), exact.tensors(), found.tensors(), strict=True):
        finite, axes = sent.isfinite(), each.granularity.value
        bits = torch.int32 if sent.dtype == torch.float32 else torch.int16
        assert torch.equal(sent.view(bits)[~finite], got.view(bits)[~finite]) and got[finite].isfinite().all()
        low = sent.double().masked_fill(~finite, torch.inf).amin(axes, keepdim=True)
        high = sent.double().masked_fill(~finite, -torch.inf).amax(axes, keepdim=True)
        info = torch.finfo(sent.dtype)
        rounding = (got.double().abs() * (info.eps / 2)).clamp_min(info.smallest_normal * info.eps / 2)
        bound = each.scale * (high - low) / 2 + rounding
        assert ((got.double() - sent.double()).abs() <= bound)[finite].all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", CODES)
def test_equals_the_reference(name, dtype, shape):
    assert_equals_reference(CODES[name], kv_pages(spec_of(shape, dtype), 1))


@PROPERTY
@given(
    code=CODE,
    dtype=st.sampled_from(sorted(WIDE)),
    shape=st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 20), st.integers(1, 2), *[st.integers(1, 30)] * 2),
    noise=st.sampled_from([0.0, 0.002, 0.1, 1.0]),
    offset=st.sampled_from([0.0, 1.0, 1000.0]),
    seed=st.integers(0, 2**32),
)
def test_equals_the_reference_and_keeps_the_bound_on_any_pages(code, dtype, shape, noise, offset, seed):
    assert_equals_reference(code, kv_pages(spec_of(shape, dtype), seed, noise, offset))


@PROPERTY
@given(code=CODE, dtype=st.sampled_from(sorted(WIDE)), seed=st.integers(0, 2**32), power=st.integers(-140, 120))
def test_the_bound_holds_for_any_magnitude(code, dtype, seed, power):
    """From subnormal numbers to the largest, with values at the middle between steps among them."""
    pages = kv_pages(spec_of((1, 2, 24, 2, 20, 20), dtype), seed)
    pools = [(pool.double() * 2.0**power).to(pool.dtype) for pool in pages.pools.tensors()]
    pools[1] = (torch.arange(pools[1].numel()).view(pools[1].shape) % 41 * 2.0 ** (power % 8)).to(pools[1].dtype)
    assert_equals_reference(code, dataclasses.replace(pages, pools=Block(*pools)))


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", CODES)
def test_the_bound_is_not_generous(name, dtype):
    code = CODES[name]
    pages = kv_pages(spec_of((1, 3, 64, 2, 64, 64), dtype), 3)
    stats, found = assert_equals_reference(code, pages)
    sent = pages.gather().values.double()
    ranges = sent.amax((3, 4)) - sent.amin((3, 4))
    errors = (found.values.double() - sent).abs().amax((3, 4))
    assert (errors > 0.9 * code.values.scale / 2 * ranges).any()
    assert stats.escapes == stats.raw_tensors == 0


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", CODES)
def test_the_largest_ranges_stay_finite(name, dtype):
    ramp = torch.linspace(-1, 1, 48, dtype=torch.float64) * WIDE[dtype].largest
    keys = (ramp.view(1, 1, 48, 1, 1) + torch.zeros(1, 1, 48, 1, 48)).to(getattr(torch, dtype))
    block = Block(keys, keys.transpose(2, 4).contiguous())
    stats, found = assert_equals_reference(CODES[name], PagedBlock.whole(block))
    assert stats.escapes == 0 and found.keys.isfinite().all() and found.values.isfinite().all()


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", CODES)
def test_units_of_one_number_are_exact(name, dtype):
    numbers = torch.arange(1, 4).view(1, 3, 1, 1, 1).expand(1, 3, 32, 2, 32).to(getattr(torch, dtype)).contiguous()
    block = Block(numbers, -numbers)
    stats, found = assert_equals_reference(CODES[name], PagedBlock.whole(block))
    assert bits_of(found) == bits_of(block) and stats.raw_tensors == 0


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", CODES)
def test_what_is_not_finite_is_carried_exactly_and_changes_no_other_value(name, dtype, odd):
    pages = kv_pages(spec_of((2, 4, 32, 2, 32, 32), dtype), 3)
    keys, _ = pages.layer_pools()
    page = pages.page_ids[2]
    keys[0, page, 5, 1, 3] = keys[0, page, 6, 1, 3]  # no extreme of its unit, most likely, nor is its neighbour
    _, calm = assert_equals_reference(CODES[name], pages)
    keys[0, page, 5, 1, 3] = odd
    stats, found = assert_equals_reference(CODES[name], pages)
    expected = calm.keys.clone()
    expected[0, 2, 5, 1, 3] = odd
    assert bits_of(Block(found.keys, found.values)) == bits_of(Block(expected, calm.values))
    assert (stats.escapes, stats.raw_tensors) == (1, 0)


@pytest.mark.parametrize("name", CODES)
def test_a_tensor_whose_escapes_do_not_pay_off_travels_as_it_is(name):
    pages = kv_pages(spec_of((1, 4, 32, 1, 32, 32), "bfloat16"), 4)
    pages.layer_pools()[0][:, :, :, :, ::2] = torch.nan
    stats, found = assert_equals_reference(CODES[name], pages)
    assert (stats.escapes, stats.raw_tensors) == (0, 1)
    assert torch.equal(found.keys.view(torch.int16), pages.gather().keys.view(torch.int16))


def test_vectors_too_long_for_their_count_of_bits_travel_as_they_are():
    pages = kv_pages(spec_of((1, 1, 4, 1, 5462, 5461), "bfloat16"), 5)
    encoding = registry.get("kvcomp").encode(pages)
    (payload,) = encoding.stages()
    assert encoding.stats().raw_tensors == 1
    layout = parse(np.frombuffer(payload, np.uint8), pages.spec, CHANNEL_CODE)
    assert [part.raw for part in layout.parts] == [True, False]


def test_more_symbols_than_the_paper_s_thirty_five():
    code = KVCompCode(TensorCode(Granularity.BLOCK, 0.005), TensorCode(Granularity.TOKEN, 0.01))
    pages = kv_pages(spec_of((1, 2, 64, 2, 64, 64), "float32"), 6)
    assert_equals_reference(code, pages)
    (payload,) = codec_of(code).encode(pages).stages()
    layout = parse(np.frombuffer(payload, np.uint8), pages.spec, code)
    assert not any(part.raw for part in layout.parts) and code.keys.symbols == 203


@pytest.mark.parametrize("scale", [0.0049, 0.51, 0.0, -0.1, float("nan")])
def test_scales_beyond_the_limits_are_refused(scale):
    with pytest.raises(ValueError, match=r"it must be from 0.005 to 0.5"):
        TensorCode(Granularity.TOKEN, scale)


def test_ends_with_other_parameters_do_not_understand_each_other():
    codes = [
        KVCompCode(TensorCode(granularity, scale), TensorCode(Granularity.TOKEN, 0.15))
        for granularity in Granularity
        for scale in (0.05, 0.06)
    ]
    assert len({code.id for code in codes}) == 6
    assert {registry.get(name).parameters_id for name in CODES} <= {code.id for code in codes}


@PROPERTY
@given(counts=st.lists(st.integers(0, 10**6), min_size=1, max_size=203).filter(any))
def test_codes_are_complete_bounded_and_as_short_as_huffman_s(counts):
    lengths = codebook.lengths_of(counts)
    assert codebook.is_code(lengths) and [bool(length) for length in lengths] == [bool(count) for count in counts]
    heap, bits = [count for count in counts if count], 0
    heapq.heapify(heap)
    while len(heap) > 1:
        bits += (pair := heapq.heappop(heap) + heapq.heappop(heap))
        heapq.heappush(heap, pair)
    ours = sum(count * length for count, length in zip(counts, lengths, strict=True))
    assert ours >= bits
    if max(lengths) < codebook.MAX_BITS and sum(map(bool, counts)) > 1:
        assert ours == bits
    packed = np.frombuffer(codebook.packed_lengths(lengths), np.uint8)
    assert codebook.unpacked_lengths(packed, len(counts)) == lengths


def test_a_skewed_code_is_cut_to_the_limit():
    lengths = codebook.lengths_of([2**power for power in range(30)])
    assert max(lengths) == codebook.MAX_BITS and codebook.is_code(lengths)
    table = codebook.decoding_table(lengths)
    assert Counter((table >> 4).tolist()) == {symbol: 1 << 12 - length for symbol, length in enumerate(lengths)}


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_eight_bit_types_are_refused(name, dtype):
    codec, pages = registry.get(name), scattered(spec_of((1, 1, 4, 1, 8, 8), dtype))
    with pytest.raises(CodecError, match=f"{name} does not take dtype {dtype}; it takes bfloat16, float16, float32"):
        codec.encode(pages)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("noise", [0.0, 0.002])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", CODES)
def test_a_gpu_writes_and_restores_the_same_bytes(name, dtype, noise):
    codec, pages = registry.get(name), kv_pages(spec_of((3, 7, 61, 3, 64, 33), dtype), 9, noise)
    on_gpu = dataclasses.replace(pages, pools=Block(*(pool.cuda() for pool in pages.pools.tensors())))
    (payload,), (theirs,) = codec.encode(pages).stages(), codec.encode(on_gpu).stages()
    assert bytes(theirs) == bytes(payload)
    outs = [scattered(pages.spec, 10, device) for device in ("cpu", "cuda")]
    for out in outs:
        codec.decode(0, [payload], out)
    assert bits_of(outs[0].pools) == bits_of(outs[1].pools)


@pytest.mark.parametrize("kind", ["plain", "raw_page"])
@pytest.mark.parametrize("name", CODES)
def test_golden_payloads(name, kind):
    """An infinity in `raw_page`'s keys is an escape."""
    pages, codec = golden_cases(kind), registry.get(name)
    golden = (GOLDEN / f"{name.replace('-', '_')}_{kind}_bf16.bin").read_bytes()
    assert [bytes(payload) for payload in codec.encode(pages).stages()] == [golden]
    layout = parse(np.frombuffer(golden, np.uint8), pages.spec, CODES[name])
    assert [part.escapes for part in layout.parts] == [int(kind == "raw_page"), 0]
    assert plans_of(pages.spec, CODES[name]) == tuple(part.plan for part in layout.parts)
    out = dataclasses.replace(pages, pools=random_block(pages.pools.spec, 13))
    codec.decode(0, [memoryview(golden)], out)
    assert_within_bound(CODES[name], pages.gather(), out.gather())


@pytest.mark.parametrize(("name", "grows"), [("kvcomp", 1.0), ("kvcomp-block", 16.0)])
def test_a_large_channel_of_the_keys_coarsens_others_only_where_they_share_its_scale(name, grows):
    """The error of all other channels, with one channel 16 times as large over that without."""
    errors = []
    for factor in (1, 16):
        pages = kv_pages(spec_of((1, 2, 64, 2, 64, 64), "float32"), 7, offset=0.0)
        keys, _ = pages.layer_pools()
        keys[...] = torch.randn(keys.shape, generator=torch.Generator().manual_seed(7))
        keys[..., 5] *= factor
        sent = pages.gather().keys
        _, found = assert_equals_reference(CODES[name], pages)
        others = [channel for channel in range(64) if channel != 5]
        errors.append((found.keys - sent)[..., others].square().mean().sqrt().item())
    assert errors[1] / errors[0] == pytest.approx(grows, rel=0.3)
