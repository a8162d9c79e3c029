"""SplitZip on the CPU equals the reference bit for bit, payloads and pages."""

import dataclasses
import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_blocks import bits_of, copy_of, random_block, scattered, spec_of
from splitzip_cases import codebook, int_type, kv_block, reference_decode, reference_payload

from kvrail.codec.base import Block, BlockSpec, CodecError, PagedBlock
from kvrail.codec.core import buffers
from kvrail.codec.core import cpu as core_cpu
from kvrail.codec.core.sections import HEADER_BYTES, aligned
from kvrail.codec.splitzip.one_stage.codec import WindowCodec, splitzip, splitzip_channel
from kvrail.codec.splitzip.tiles.format import FORMATS, WindowCode
from kvrail.codec.splitzip.tiles.payload import parse
from kvrail.codec.splitzip.tiles.plan import plans_of

GOLDEN = Path(__file__).parent / "golden"
BOOK = codebook()
PROPERTY = settings(max_examples=250 if os.environ.get("CI") == "true" else 60)
CODES = [(per_channel, bits) for per_channel in (False, True) for bits in (3, 4)]
SHAPES = [  # layers, pages, page_size, kv_heads, key_dim, value_dim
    (1, 1, 1, 1, 1, 1),
    (2, 3, 7, 1, 5, 33),
    (1, 2, 16, 2, 24, 8),
    (2, 1, 63, 2, 9, 17),
    (1, 2, 64, 2, 64, 40),
    (1, 1, 500, 1, 3, 11),
]


def codec_of(dtype, per_channel, bits, chunk=4096):
    return WindowCodec("test", {dtype: WindowCode(bits, per_channel, chunk)}, None if per_channel else BOOK)


def tops_of(pages, per_channel):
    if per_channel:
        return None, None
    return tuple(BOOK.tops(pages.spec.dtype, kind, pages.layers) for kind in ("keys", "values"))


def kv_pages(spec, seed=0, outliers=0.01):
    """Scattered pages of a pool of real-looking KV, with layers before and after."""
    layout = scattered(spec, seed)
    pool = kv_block(layout.pools.spec, seed, outliers)
    return dataclasses.replace(layout, pools=pool)


def assert_equals_reference(pages, dtype, per_channel, bits, chunk=4096):
    """Encode and decode `pages`; give the stats."""
    codec, code, before = (
        codec_of(dtype, per_channel, bits, chunk),
        WindowCode(bits, per_channel, chunk),
        copy_of(pages),
    )
    encoding = codec.encode(pages)
    (payload,) = encoding.stages()
    tops = tops_of(pages, per_channel)
    assert bytes(payload) == reference_payload(pages, code, tops)
    assert bits_of(pages.pools) == bits_of(before.pools)
    out = scattered(pages.spec, 99)  # poisoned: random bits everywhere
    expected = copy_of(out)
    expected.scatter(pages.gather())
    codec.decode(0, [payload], out)
    assert bits_of(out.pools) == bits_of(expected.pools)
    return encoding.stats()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("per_channel", "bits"), CODES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_equals_the_reference(dtype, per_channel, bits, shape):
    pages = kv_pages(spec_of(shape, dtype), 1)
    assert_equals_reference(pages, dtype, per_channel, bits)


@pytest.mark.parametrize("chunk", [256, 512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_equals_the_reference_at_any_chunk_size(dtype, per_channel, chunk):
    for shape in ((1, 1, 64, 2, 70, 66), (1, 2, 17, 3, 20, 4)):
        assert_equals_reference(kv_pages(spec_of(shape, dtype), 2), dtype, per_channel, 3, chunk)


@PROPERTY
@given(
    dtype=st.sampled_from(sorted(FORMATS)),
    code=st.sampled_from(CODES),
    chunk=st.sampled_from([256, 1024, 4096]),
    shape=st.tuples(
        st.integers(1, 2), st.integers(0, 3), st.integers(1, 20), *[st.integers(1, 3)], *[st.integers(1, 9)] * 2
    ),
    outliers=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_equals_the_reference_on_any_pages(dtype, code, chunk, shape, outliers, seed):
    assert_equals_reference(kv_pages(spec_of(shape, dtype), seed, outliers), dtype, *code, chunk)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
def test_every_bit_pattern_survives(dtype, per_channel):
    """All patterns, NaNs with payloads, infinities, subnormals and -0 among them, as codes and as escapes.

    With a fixed window each is hidden among ordinary values; per channel they come in the order of their exponents.
    """
    form = FORMATS[dtype]
    patterns = torch.arange(1 << 8 * form.item_bytes)
    spec = BlockSpec(dtype, 1, patterns.numel() // 32, 32, 1, 64, 64, scaled=form.item_bytes == 1)
    block, out = kv_block(spec, 3, outliers=0), random_block(spec, 4)
    for tensor in (block.keys, block.values):
        bits = tensor.view(int_type(tensor)).view(-1)
        if per_channel:
            by_exponent = torch.argsort(patterns >> form.mantissa_bits & form.exponents - 1, stable=True)
            bits[:] = by_exponent.repeat_interleave(bits.numel() // patterns.numel()).to(bits.dtype)
        else:
            bits[:: bits.numel() // patterns.numel()] = patterns.to(bits.dtype)
    codec = codec_of(dtype, per_channel, 3 if dtype == "float8_e4m3fn" else 4)
    encoding = codec.encode(PagedBlock.whole(block))
    codec.decode(0, [encoding.stages()[0]], PagedBlock.whole(out))
    assert bits_of(out) == bits_of(block)
    assert encoding.stats().raw_tensors == (2 if dtype == "float8_e4m3fn" and not per_channel else 0)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
def test_random_bits_travel_raw(dtype, per_channel):
    spec = spec_of((2, 3, 64, 2, 64, 64), dtype)
    encoding = codec_of(dtype, per_channel, 3).encode(scattered(spec, 5))
    (payload,) = encoding.stages()
    assert payload.nbytes <= spec.raw_bytes + HEADER_BYTES + 3 * 16
    assert encoding.stats().raw_tensors == 2 and encoding.stats().escapes == 0


@pytest.mark.parametrize("raw", ["keys", "values"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_one_tensor_raw_the_other_coded(dtype, per_channel, raw):
    pages = kv_pages(spec_of((2, 2, 64, 2, 32, 48), dtype), 6, outliers=0)
    noise = random_block(pages.pools.spec, 7)
    pages = dataclasses.replace(pages, pools=dataclasses.replace(pages.pools, **{raw: getattr(noise, raw)}))
    assert assert_equals_reference(pages, dtype, per_channel, 3 if per_channel else 4).raw_tensors == 1


def test_wide_tiles_have_extensions():
    pages = kv_pages(spec_of((1, 2, 64, 1, 64, 64), "bfloat16"), 8, outliers=0.01)
    codec = codec_of("bfloat16", False, 4)
    payload = np.frombuffer(codec.encode(pages).stages()[0], dtype=np.uint8)
    layout = parse(payload, pages.spec, plans_of(pages.spec, WindowCode(4, False)))
    assert 0 < layout.parts[0].extensions <= layout.parts[0].records
    out = scattered(pages.spec, 9)
    reference_decode(payload, layout, tops_of(pages, False), out)
    assert bits_of(out.gather()) == bits_of(pages.gather())


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
def test_many_threads_give_the_same_payload(dtype, per_channel, monkeypatch):
    pages = kv_pages(spec_of((3, 5, 48, 2, 40, 24), dtype), 10, outliers=0.003)
    codec = codec_of(dtype, per_channel, 3 if per_channel else 4, 1024)
    one = bytes(codec.encode(pages).stages()[0])
    monkeypatch.setattr(core_cpu, "BYTES_PER_THREAD", 1)
    monkeypatch.setattr(core_cpu, "MAX_THREADS", 3)
    out = scattered(pages.spec, 11)
    expected = copy_of(out)
    expected.scatter(pages.gather())
    assert bytes(codec.encode(pages).stages()[0]) == one
    codec.decode(0, [memoryview(one)], out)
    assert bits_of(out.pools) == bits_of(expected.pools)


def test_pages_too_long_for_a_tile_travel_raw():
    pages = kv_pages(spec_of((1, 1, 300, 1, 4, 4), "bfloat16"), 12)
    assert assert_equals_reference(pages, "bfloat16", True, 3, 256).raw_tensors == 2


def test_pool_that_is_not_contiguous_is_refused():
    block = random_block(spec_of((1, 2, 8, 2, 16, 16), "bfloat16"))
    pages = PagedBlock.whole(Block(block.keys.transpose(2, 3), block.values.transpose(2, 3)))
    with pytest.raises(CodecError, match="not contiguous"):
        splitzip().encode(pages)


def test_stats_count_escapes():
    spec = spec_of((1, 1, 64, 1, 64, 64), "bfloat16")
    block = Block(torch.ones(1, 1, 64, 1, 64).bfloat16(), torch.ones(1, 1, 64, 1, 64).bfloat16())
    block.keys[0, 0, :7] = 0
    stats = splitzip_channel().encode(PagedBlock.whole(block)).stats()
    assert (stats.values, stats.escapes, stats.raw_tensors) == (2 * 64 * 64, 7 * 64, 0)
    assert splitzip().dtypes == splitzip_channel().dtypes == set(FORMATS)
    assert spec.raw_bytes == 4 * 64 * 64


def test_payload_memory_is_used_again_only_when_no_view_is_left():
    first = buffers.take(1 << 22)
    address, view = first.ctypes.data, first.data[:100]
    del first
    gc.collect()
    second = buffers.take(1 << 22)
    assert second.ctypes.data != address
    alias = np.frombuffer(view, dtype=np.uint8)
    del view
    gc.collect()
    third = buffers.take(1 << 22)
    assert address not in (second.ctypes.data, third.ctypes.data)
    del alias
    gc.collect()
    assert buffers.take(1 << 22).ctypes.data == address


def golden_pages(dtype, octaves=8):
    """Pages whose bits come from integer arithmetic alone: a Weyl sequence, with some smaller values every 97.

    octaves: over how many, at most eight, the others spread.
    """
    spec = BlockSpec(dtype, 2, 3, 24, 2, 20, 12, scaled=FORMATS[dtype].item_bytes == 1)
    block = random_block(spec)
    form = FORMATS[dtype]
    for tensor in block.tensors():
        n = torch.arange(tensor.numel(), dtype=torch.int64)
        weyl = n * 2654435761 % (1 << 32)
        bits = weyl >> 16
        if tensor.dim() == 5:
            exponent = (
                form.exponents // 2 + 2 - (weyl >> 29) % octaves - (n % 97 == 0) * (weyl >> 20) % 40
            ) % form.exponents
            fraction = 1 << form.mantissa_bits
            bits = ((weyl >> 28) % 2 * form.exponents + exponent) * fraction + (weyl >> 12) % fraction
            tensor.view(int_type(tensor)).view(-1).copy_(bits.to(int_type(tensor)))
        else:
            tensor.view(torch.int32).view(-1).copy_(bits.to(torch.int32))
    return PagedBlock(block, range(2), (2, 0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("name", ["splitzip", "splitzip-channel"])
def test_golden_payloads(name, dtype):
    pages = golden_pages(dtype)
    codec = splitzip(BOOK) if name == "splitzip" else splitzip_channel()
    golden = (GOLDEN / f"{name}_{dtype}.bin".replace("-", "_")).read_bytes()
    assert bytes(codec.encode(pages).stages()[0]) == golden
    assert codec.encode(pages).stats().raw_tensors < 2
    out = dataclasses.replace(pages, pools=random_block(pages.pools.spec, 13))
    codec.decode(0, [memoryview(golden)], out)
    assert bits_of(out.gather()) == bits_of(pages.gather())


def test_plans_cover_the_payload():
    pages = kv_pages(spec_of((2, 3, 16, 2, 24, 8), "float8_e5m2"), 14)
    (payload,) = codec_of("float8_e5m2", False, 4).encode(pages).stages()
    layout = parse(np.frombuffer(payload, dtype=np.uint8), pages.spec, plans_of(pages.spec, WindowCode(4, False)))
    plans = plans_of(pages.spec, WindowCode(4, False))
    assert payload.nbytes == layout.size < HEADER_BYTES + sum(aligned(plan.raw_bytes) for plan in plans) + 2**12
