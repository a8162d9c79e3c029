"""What holds for every codec that is registered."""

import gc
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_blocks import SHAPES, bits_of, copy_of, decode_stages, random_block, scattered, spec_of

from kvrail.codec import registry
from kvrail.codec.base import CodecError, PagedBlock
from kvrail.codec.core.floats import FLOATS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
FORKS = """
import os, signal, torch
from kvrail.codec import registry
from kvrail.codec.base import Block, PagedBlock
block = Block(*(torch.randn(1, 32, 64, 8, 128).bfloat16() for _ in range(2)))
stages = [bytes(each) for each in registry.get("splitzip").encode(PagedBlock.whole(block)).stages()]
if child := os.fork():
    raise SystemExit(os.waitpid(child, 0)[1] != 0)
signal.alarm(60)
again = registry.get("splitzip").encode(PagedBlock.whole(block)).stages()
os._exit([bytes(each) for each in again] != stages)
"""
EXACT = [name for name in registry.names() if registry.get(name).exact]


def dtypes_of(names):
    return [(name, dtype) for name in names for dtype in sorted(registry.get(name).dtypes)]


def encode(codec, block):
    return codec.encode(PagedBlock.whole(block)).stages()


@pytest.mark.parametrize("name", registry.names())
def test_codec_describes_itself(name):
    codec = registry.get(name)
    assert codec.name == name and codec.num_stages >= 1 and codec.dtypes <= set(FLOATS)
    assert 0 <= codec.parameters_id < 2**64
    assert codec.exact == registry.info(name).exact


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "dtype"), dtypes_of(EXACT))
def test_exact_codec_restores_every_bit(name, dtype, shape, device):
    codec, spec = registry.get(name), spec_of(shape, dtype)
    block, out = random_block(spec, 1, device), random_block(spec, 2, device)
    payloads = encode(codec, block)
    assert len(payloads) == codec.num_stages
    decode_stages(codec, payloads, PagedBlock.whole(out))
    assert bits_of(out) == bits_of(block)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "dtype"), dtypes_of(EXACT))
def test_exact_codec_moves_pages_of_a_pool_and_touches_no_others(name, dtype, shape, device):
    codec, spec = registry.get(name), spec_of(shape, dtype)
    source, out = scattered(spec, 1, device), scattered(spec, 2, device)
    before, expected = bits_of(source.pools), copy_of(out)
    expected.scatter(source.gather())
    decode_stages(codec, codec.encode(source).stages(), out)
    assert bits_of(out.pools) == bits_of(expected.pools)
    assert bits_of(source.pools) == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "dtype"), dtypes_of(registry.names()))
def test_every_stage_leaves_the_same_wherever_pages_lie_and_touches_no_others(name, dtype, shape, device):
    codec, spec = registry.get(name), spec_of(shape, dtype)
    source, out, plain = scattered(spec, 1, device), scattered(spec, 2, device), random_block(spec, 3, device)
    scattered_stages = codec.encode(source).stages()
    payloads = encode(codec, source.gather())
    assert [bytes(payload) for payload in scattered_stages] == [bytes(payload) for payload in payloads]
    for stage in range(codec.num_stages):
        expected = copy_of(out)
        codec.decode(stage, payloads[: stage + 1], PagedBlock.whole(plain))
        codec.decode(stage, payloads[: stage + 1], out)
        expected.scatter(plain)
        assert bits_of(out.pools) == bits_of(expected.pools)


@settings(max_examples=60)
@given(
    pick=st.sampled_from(dtypes_of(EXACT)),
    shape=st.tuples(*[st.integers(1, 4)] * 4, st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 2**32),
)
def test_exact_codec_restores_any_shape(pick, shape, seed):
    codec, spec = registry.get(pick[0]), spec_of(shape, pick[1])
    block, out = random_block(spec, seed), random_block(spec, seed + 1)
    decode_stages(codec, encode(codec, block), PagedBlock.whole(out))
    assert bits_of(out) == bits_of(block)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype"), dtypes_of(registry.names()))
def test_payload_that_does_not_fit_leaves_the_block_alone(name, dtype, device):
    codec, spec = registry.get(name), spec_of((2, 3, 4, 2, 5, 7), dtype)
    out = scattered(spec, 2, device)
    payloads = [bytes(payload) for payload in codec.encode(scattered(spec, 1, device)).stages()]
    for stage, payload in enumerate(payloads):
        before, earlier = bits_of(out.pools), [memoryview(each) for each in payloads[:stage]]
        for wrong in (b"", payload[:-1], payload[: len(payload) // 2], payload + b"\0"):
            with pytest.raises(CodecError):
                codec.decode(stage, [*earlier, memoryview(wrong)], out)
        for no_stage in (-1, codec.num_stages):
            with pytest.raises(CodecError, match=f"not {no_stage}"):
                codec.decode(no_stage, [memoryview(payload)] * max(0, no_stage + 1), out)
        assert bits_of(out.pools) == before
        codec.decode(stage, [*earlier, memoryview(payload)], out)


@pytest.mark.parametrize("name", registry.names())
def test_payloads_stay_on_a_device_only_where_codec_and_pages_allow_it(name):
    codec = registry.get(name)
    pages = scattered(spec_of((1, 1, 16, 2, 8, 8), sorted(codec.dtypes)[0]), 1)
    with pytest.raises(ValueError, match="lie on cpu" if codec.device_payloads else "host memory alone"):
        codec.encode(pages, on_device=True)


@pytest.mark.parametrize("name", registry.names())
def test_a_tensor_in_host_memory_is_no_payload(name):
    codec = registry.get(name)
    out = scattered(spec_of((1, 1, 16, 2, 8, 8), sorted(codec.dtypes)[0]), 1)
    before = bits_of(out.pools)
    with pytest.raises(CodecError, match="host memory"):
        codec.decode(0, [torch.zeros(out.spec.raw_bytes, dtype=torch.uint8)], out)
    assert bits_of(out.pools) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "dtype"), dtypes_of(n for n in registry.names() if registry.get(n).device_payloads))
def test_device_payloads_are_the_hosts_and_restore_pages(name, dtype, shape):
    codec, spec = registry.get(name), spec_of(shape, dtype)
    source, out = scattered(spec, 1, "cuda"), scattered(spec, 2, "cuda")
    expected = copy_of(out)
    expected.scatter(source.gather())
    with torch.cuda.stream(torch.cuda.Stream()):
        payloads = codec.encode(source, on_device=True).stages()
        assert all(payload.is_cuda and payload.dtype == torch.uint8 for payload in payloads)
        hosts = [bytes(payload) for payload in codec.encode(source).stages()]
        assert [payload.cpu().numpy().tobytes() for payload in payloads] == hosts
        before = bits_of(out.pools)
        for wrong in (payloads[0][:-1], payloads[0].cpu(), payloads[0].view(torch.int8)):
            with pytest.raises(CodecError):
                codec.decode(0, [wrong], out)
        assert bits_of(out.pools) == before
        decode_stages(codec, payloads, out)
        torch.cuda.synchronize()
    assert bits_of(out.pools) == bits_of(expected.pools)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT)
def test_payloads_decode_from_pinned_memory_whatever_is_enqueued_before(name):
    """From the same region one payload after the other, each put there when the work that reads the last is done."""
    codec, spec = registry.get(name), spec_of((2, 9, 64, 8, 128, 128), "bfloat16")
    region = torch.empty(2 * codec.num_stages * spec.raw_bytes, dtype=torch.uint8, pin_memory=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        for seed in range(3):
            source, out = scattered(spec, seed, "cuda"), scattered(spec, seed + 9, "cuda")
            placed, begin = [], 0
            for payload in codec.encode(source).stages():
                place = region[begin : begin + payload.nbytes].numpy()
                place[:] = memoryview(payload)
                placed.append(place.data)
                begin += payload.nbytes + 16
            torch.cuda._sleep(20_000_000)
            decode_stages(codec, placed, out)
            torch.cuda.current_stream().synchronize()
            region.fill_(0xA5)
            assert bits_of(out.gather()) == bits_of(source.gather())


@pytest.mark.parametrize("name", registry.names())
def test_payloads_of_too_few_or_too_many_stages_are_refused(name):
    codec = registry.get(name)
    spec = spec_of((2, 3, 4, 2, 5, 7), sorted(codec.dtypes)[0])
    out, payloads = scattered(spec, 2), codec.encode(scattered(spec, 1)).stages()
    for stage in range(codec.num_stages):
        before = bits_of(out.pools)
        wrongs = [[], payloads[1 : stage + 1], [*payloads[: stage + 1], payloads[stage]]]
        for wrong in wrongs if codec.reads_earlier_payloads or not stage else wrongs[::2]:  # its own alone will do then
            with pytest.raises(CodecError, match=rf"stages 0 to {stage}: {stage + 1}, not {len(wrong)}"):
                codec.decode(stage, wrong, out)
        assert bits_of(out.pools) == before
        codec.decode(stage, payloads[: stage + 1], out)


@pytest.mark.parametrize("name", [name for name in registry.names() if not registry.get(name).reads_earlier_payloads])
def test_a_stage_s_own_payload_will_do_where_earlier_ones_are_not_read(name):
    codec = registry.get(name)
    spec = spec_of((2, 3, 16, 2, 32, 32), sorted(codec.dtypes)[0])
    payloads = codec.encode(scattered(spec, 1)).stages()
    out, other = scattered(spec, 2), scattered(spec, 2)
    for stage in range(codec.num_stages):
        codec.decode(stage, payloads[stage : stage + 1], out)
        codec.decode(stage, payloads[: stage + 1], other)
        assert bits_of(out.pools) == bits_of(other.pools)


@pytest.mark.parametrize("name", registry.names())
def test_dtype_that_a_codec_does_not_take_is_refused(name):
    block = random_block(spec_of((1, 1, 4, 1, 8, 8), "float32"))
    as_double = type(block)(block.keys.double(), block.values.double())
    with pytest.raises(CodecError, match="float64"):
        encode(registry.get(name), as_double)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype"), dtypes_of(registry.names()))
def test_encoding_says_what_it_came_to(name, dtype, device):
    spec = spec_of((2, 3, 4, 2, 5, 7), dtype)
    encoding = registry.get(name).encode(scattered(spec, 1, device))
    encoding.stages()
    stats = encoding.stats()
    assert stats.values == 2 * 3 * 4 * 2 * (5 + 7)
    assert 0 <= stats.escapes <= stats.values and 0 <= stats.raw_tensors <= 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", registry.names())
def test_payloads_outlive_their_encoding_and_its_block(name, device):
    codec = registry.get(name)
    spec = spec_of((2, 3, 16, 2, 64, 64), sorted(codec.dtypes)[0])
    payloads, copies = [], []
    for seed in range(3):
        encoding = codec.encode(scattered(spec, seed, device))
        payloads.append(encoding.stages())
        copies.append([bytes(payload) for payload in payloads[-1]])
        del encoding
    gc.collect(1)  # the young objects, of which the encodings are some: all would take a second
    assert [[bytes(payload) for payload in stages] for stages in payloads] == copies
    assert len({copy[0] for copy in copies}) == 3


def test_a_forked_child_encodes_though_it_has_none_of_its_parent_s_threads():
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    assert subprocess.run([sys.executable, "-c", FORKS], env=environment, timeout=120).returncode == 0


def test_unknown_codec_lists_the_known_ones():
    with pytest.raises(registry.UnknownCodecError, match=r"zip.*raw"):
        registry.get("zip")
