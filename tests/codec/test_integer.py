"""`int8` and `int4` equal a reference in plain numpy bit for bit, and keep half a step."""

import dataclasses
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integer_cases import coded
from kv_blocks import bits_of, copy_of, random_block, scattered, spec_of
from lynx_cases import kv_pages
from test_lynx import golden_pages

from kvrail.codec import registry
from kvrail.codec.base import Block, CodecError, PagedBlock
from kvrail.codec.core.floats import WIDE

GOLDEN = Path(__file__).parent / "golden"
PROPERTY = settings(max_examples=100 if os.environ.get("CI") == "true" else 25, deadline=None)
NAMES = ("int8", "int4")
TOPS = {"int8": 255, "int4": 15}
HEADER = struct.Struct("<5I")
SHAPES = [  # layers, pages, page_size, kv_heads, key_dim, value_dim
    (1, 1, 1, 1, 1, 1),
    (2, 3, 7, 1, 5, 33),
    (1, 2, 16, 2, 24, 8),
    (2, 1, 63, 2, 9, 17),
    (1, 1, 64, 1, 32, 40),
]


def assert_equals_reference(name, pages):
    """Encode and decode `pages`; give the encoding's stats and the pages as they arrive."""
    codec, before = registry.get(name), copy_of(pages)
    encoding = codec.encode(pages)
    (payload,) = encoding.stages()
    expected, restored = coded(pages.gather(), name)
    assert bytes(payload) == expected
    assert bits_of(pages.pools) == bits_of(before.pools)
    out = scattered(pages.spec, 99)  # poisoned: random bits everywhere
    around = copy_of(out)
    codec.decode(0, [payload], out)
    found = out.gather()
    assert bits_of(found) == b"".join(restored)
    around.scatter(found)
    assert bits_of(out.pools) == bits_of(around.pools)
    return encoding.stats(), found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference(name, dtype, shape):
    assert_equals_reference(name, kv_pages(spec_of(shape, dtype), 1))


@PROPERTY
@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(sorted(WIDE)),
    shape=st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 20), st.integers(1, 2), *[st.integers(1, 9)] * 2),
    noise=st.sampled_from([0.0, 0.002, 1.0]),
    offset=st.sampled_from([0.0, 1.0, 1000.0]),
    seed=st.integers(0, 2**32),
)
def test_equals_the_reference_on_any_pages(name, dtype, shape, noise, offset, seed):
    assert_equals_reference(name, kv_pages(spec_of(shape, dtype), seed, noise, offset))


def grouped(tensor, name, number):
    """A group a row: of keys (0) or values (1)."""
    by_channel = name == "int4" and number == 0
    return tensor.double().transpose(2, 4).flatten(0, 3) if by_channel else tensor.double().flatten(0, 3)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", NAMES)
def test_errors_stay_within_half_a_step(name, dtype):
    """Half of what the group's range gives, rounded up to the scale's type, and what is rounded to the element's."""
    pages = kv_pages(spec_of((2, 3, 64, 2, 32, 40), dtype), 7, offset=0.5)
    codec, out = registry.get(name), scattered(pages.spec, 8)
    codec.decode(0, [codec.encode(pages).stages()[0]], out)
    digits = 10 if dtype == "float16" else 7
    for number, (sent, got) in enumerate(zip(pages.gather().tensors(), out.gather().tensors(), strict=True)):
        exact, found = grouped(sent, name, number), grouped(got, name, number)
        step = (exact.amax(1) - exact.amin(1)) / TOPS[name] * (1 + 2.0**-digits) + 2.0**-24
        rounding = (exact.abs() + step[:, None]) * 2.0 ** -(WIDE[dtype].mantissa_bits + 1)
        error, bound = (found - exact).abs(), step[:, None] / 2 + rounding * (1 + 2.0**-6)
        assert (error <= bound).all()
        assert (error > bound * 0.9).any()  # the bound is not generous


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", NAMES)
def test_the_largest_ranges_stay_finite(name, dtype):
    """A range of twice the largest number overflows neither on the way nor at the top."""
    spec = spec_of((1, 1, 48, 1, 48, 48), dtype)
    largest = WIDE[dtype].largest
    ramp = torch.linspace(-1, 1, 48, dtype=torch.float64) * largest
    keys = (ramp.view(1, 1, 48, 1, 1) + torch.zeros(1, 1, 48, 1, 48)).to(getattr(torch, dtype))
    block = Block(keys, keys.transpose(2, 4).contiguous())
    _, found = assert_equals_reference(name, PagedBlock.whole(block))
    assert block.spec == spec and found.keys.isfinite().all() and found.values.isfinite().all()
    step = 2 * largest / TOPS[name] * (1 + 2.0**-7)
    assert (found.values.double() - block.values.double()).abs().max() <= step * 0.51 + largest * 2.0**-8


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", NAMES)
def test_smallest_numbers_and_both_zeros(name, dtype):
    bits = torch.int32 if dtype == "float32" else torch.int16
    spec = spec_of((1, 1, 32, 1, 32, 32), dtype)
    tiny = torch.randint(0, 6, (1, 1, 32, 1, 32), generator=torch.Generator().manual_seed(2)).to(bits)
    keys, zeros = tiny.view(getattr(torch, dtype)), torch.zeros_like(tiny).view(getattr(torch, dtype))
    _, found = assert_equals_reference(name, PagedBlock.whole(Block(keys, -zeros)))
    assert (
        found.spec == spec and not found.values.view(bits).any()
    )  # of two zeros the one without a sign is the minimum


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", NAMES)
def test_groups_of_one_number_are_exact(name, dtype):
    keys = torch.randn(1, 3, 1, 2, 1, generator=torch.Generator().manual_seed(1))
    block = Block(
        keys.expand(1, 3, 16, 2, 16).to(getattr(torch, dtype)).contiguous(),
        -keys.expand(1, 3, 16, 2, 16).to(getattr(torch, dtype)).contiguous(),
    )
    _, found = assert_equals_reference(name, PagedBlock.whole(block))
    assert bits_of(found) == bits_of(block)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", NAMES)
def test_pages_that_are_not_finite_travel_as_they_are_and_change_no_other(name, dtype, odd):
    """Page 2 of layer 0 of the keys, and page 4 of layer 1 of the values."""
    pages = kv_pages(spec_of((2, 7, 8, 2, 16, 17), dtype), 3)
    _, calm = assert_equals_reference(name, pages)
    keys, values = pages.layer_pools()
    keys[0, pages.page_ids[2], 5, 1, 3] = odd
    values[1, pages.page_ids[4], 7, 0, 16] = odd
    exact = pages.gather()
    stats, found = assert_equals_reference(name, pages)
    expected = Block(calm.keys.clone(), calm.values.clone())
    expected.keys[0, 2], expected.values[1, 4] = exact.keys[0, 2], exact.values[1, 4]
    assert bits_of(found) == bits_of(expected)
    assert (stats.escapes, stats.raw_tensors) == (8 * 2 * (16 + 17), 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_whose_raw_pages_do_not_pay_off_travels_as_it_is(name):
    pages = kv_pages(spec_of((1, 4, 16, 1, 32, 32), "bfloat16"), 4)
    pages.layer_pools()[0][:, pages.page_ids, 0, 0, 0] = torch.nan
    stats, found = assert_equals_reference(name, pages)
    assert (stats.escapes, stats.raw_tensors) == (0, 1)
    assert torch.equal(found.keys.view(torch.int16), pages.gather().keys.view(torch.int16))


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_codes_make_no_smaller_travels_as_it_is(name):
    pages = kv_pages(spec_of((1, 3, 2, 1, 4, 3), "bfloat16"), 5)
    stats, found = assert_equals_reference(name, pages)
    assert stats.raw_tensors == 2 and bits_of(found) == bits_of(pages.gather())


def test_sizes():
    """Bits a value of bfloat16 pages of 64 tokens and heads of 128 channels, but for header, flags and padding."""
    pages = kv_pages(spec_of((1, 4, 64, 2, 128, 128), "bfloat16"), 6)
    for name, bits in (("int8", 8 + 32 / 128), ("int4", 4 + (32 / 64 + 32 / 128) / 2)):
        (payload,) = registry.get(name).encode(pages).stages()
        assert 0 <= 8 * payload.nbytes - bits * 2 * 4 * 64 * 2 * 128 <= 8 * (32 + 2 * 16)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_eight_bit_types_are_refused(name, dtype):
    codec, pages = registry.get(name), scattered(spec_of((1, 1, 4, 1, 8, 8), dtype))
    with pytest.raises(CodecError, match=f"{name} does not take dtype {dtype}; it takes bfloat16, float16, float32"):
        codec.encode(pages)
    with pytest.raises(CodecError, match=dtype):
        codec.decode(0, [memoryview(b"")], pages)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("noise", [0.0, 1e-5])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_writes_and_restores_the_same_bytes(name, dtype, noise):
    codec, pages = registry.get(name), kv_pages(spec_of((3, 7, 61, 3, 64, 33), dtype), 9, noise)
    on_gpu = dataclasses.replace(pages, pools=Block(*(pool.cuda() for pool in pages.pools.tensors())))
    (payload,), (theirs,) = codec.encode(pages).stages(), codec.encode(on_gpu).stages()
    assert bytes(theirs) == bytes(payload)
    outs = [scattered(pages.spec, 10, device) for device in ("cpu", "cuda")]
    for out in outs:
        codec.decode(0, [payload], out)
    assert bits_of(outs[0].pools) == bits_of(outs[1].pools)


@pytest.mark.parametrize("name", NAMES)
def test_they_are_lossy_in_one_stage(name):
    codec = registry.get(name)
    assert (codec.exact, codec.num_stages, codec.parameters_id) == (False, 1, 0)


def golden_cases(kind):
    """golden_pages, in `plain` as they are, in `raw_page` with an infinity in one page of the keys."""
    pages = golden_pages()
    keys = torch.cat([pages.pools.keys] * 2, dim=1)
    if kind == "raw_page":
        keys[1, 0, 3, 1, 2] = torch.inf
    block = Block(keys, torch.cat([pages.pools.values] * 2, dim=1))
    return PagedBlock(block, range(2), (2, 0, 4, 5))


@pytest.mark.parametrize("kind", ["plain", "raw_page"])
@pytest.mark.parametrize("name", NAMES)
def test_golden_payloads(name, kind):
    pages, codec = golden_cases(kind), registry.get(name)
    golden = (GOLDEN / f"{name}_{kind}_bf16.bin").read_bytes()
    assert [bytes(payload) for payload in codec.encode(pages).stages()] == [golden]
    assert HEADER.unpack_from(golden)[1::2] == ((1, 0) if kind == "raw_page" else (0, 0))
    out = dataclasses.replace(pages, pools=random_block(pages.pools.spec, 13))
    codec.decode(0, [memoryview(golden)], out)
    for sent, got in zip(pages.gather().tensors(), out.gather().tensors(), strict=True):
        sent, got = sent.double().nan_to_num(), got.double().nan_to_num()
        assert np.allclose(sent, got, rtol=2.0**-8, atol=251 / TOPS[name])
