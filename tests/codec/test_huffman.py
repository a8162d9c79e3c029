"""The tensor codec huffman: every bit comes back, the kernels equal the reference, chunks can be had alone."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrail import codec
from kvrail.codec.base import CodecError
from kvrail.codec.huffman import cpu, payload
from kvrail.codec.huffman.codec import HuffmanCodec
from kvrail.codec.huffman.cpu_digest_kernels import SHORT, copied_digest, long_digest
from kvrail.codec.huffman.cpu_plane_kernels import gather_bits, gather_words, scatter_bits, scatter_words
from kvrail.codec.huffman.cpu_word_kernels import DEPOSITS
from kvrail.codec.huffman.format import FORMATS
from kvrail.codec.registry import UnknownCodecError
from tests.reference import huffman as reference

HUFFMAN = HuffmanCodec()
README = Path(codec.__file__).with_name("README.md")


def bits_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(first, second):
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(bits_of(first), bits_of(second))


def bytes_like(dtype, raw):
    """A flat tensor of `dtype` with these bytes, as many as make whole elements."""
    item = torch.empty((), dtype=dtype).element_size()
    raw = raw[: raw.numel() // item * item].clone()
    return (raw & 1 if dtype is torch.bool else raw).view(dtype)


def gaussian(count, seed=0, scale=0.02):
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(seed))


def planes(container):
    """Mode, coded bytes and size of each plane of the one chunk of a container."""
    data = np.frombuffer(container, np.uint8)
    layout, found = payload.parse(data), []
    at, size = layout.head_bytes, layout.raw_bytes // layout.format.word_bytes
    for word in layout.rows[0].tolist():
        length = word & ((1 << 28) - 1)
        found.append((word >> 28, data[at : at + length].tobytes(), size))
        at += length
    return layout, found


@pytest.mark.parametrize("name", FORMATS)
def test_every_type_and_shape_comes_back(name):
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(1)
    for count in (0, 8, 24, 1000 * 16, 300_000 * 16 // 8):
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        raw[: count // 2] //= 64
        tensor = bytes_like(dtype, raw)
        assert same(HUFFMAN.decode(HUFFMAN.encode(tensor)), tensor)
        base = bytes_like(dtype, raw.flip(0))
        assert same(codec.decode(codec.encode(tensor, base=base), base=base), tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_pattern_of_sixteen_bits(dtype):
    patterns = torch.arange(65536).to(torch.uint16).view(dtype)
    assert same(codec.decode(codec.encode(patterns)), patterns)
    commoner = torch.cat([patterns, gaussian(200_000).to(dtype)])  # so that the planes are coded
    assert same(codec.decode(codec.encode(commoner)), commoner)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_every_pattern_of_eight_bits(dtype):
    patterns = torch.arange(256).to(torch.uint8).repeat_interleave(torch.arange(256) ** 2 // 64 + 1).view(dtype)
    packed = codec.encode(patterns)
    assert len(packed) < 0.98 * patterns.nbytes
    assert same(codec.decode(packed), patterns)


def test_special_values():
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4e38])
    special = torch.cat([special, torch.tensor([0x7FC00001, -4194303], dtype=torch.int32).view(torch.float32)])
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        many = special.to(dtype).repeat(97)
        assert same(codec.decode(codec.encode(many)), many)
    assert same(codec.decode(codec.encode(special.repeat(33))), special.repeat(33))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 5), (7, 11, 13), (1, 1, 1, 1, 2), (262_143,), (262_145,)])
def test_awkward_shapes(shape):
    tensor = gaussian(math.prod(shape)).bfloat16().reshape(shape)
    assert same(codec.decode(codec.encode(tensor)), tensor)


def test_what_is_not_contiguous_is_coded_by_its_values():
    tensor = gaussian(60_000).bfloat16().reshape(200, 300)
    for view in (tensor.T, tensor[::3, ::7], tensor[:, :1].expand(200, 40)):
        assert same(codec.decode(codec.encode(view)), view.contiguous())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(FORMATS)),
    symbols=st.lists(st.tuples(st.integers(0, 255), st.integers(1, 4000)), min_size=0, max_size=12),
    seed=st.integers(0, 1 << 16),
    delta=st.booleans(),
)
def test_any_mixture_of_bytes_comes_back(name, symbols, seed, delta):
    raw = torch.tensor([symbol for symbol, count in symbols for _ in range(count)], dtype=torch.uint8)
    raw = raw[torch.randperm(raw.numel(), generator=torch.Generator().manual_seed(seed))]
    tensor = bytes_like(getattr(torch, name), raw)
    base = bytes_like(getattr(torch, name), raw.roll(1)) if delta else None
    packed = HUFFMAN.encode(tensor, base=base)
    assert same(HUFFMAN.decode(packed, base=base), tensor)
    assert len(packed) <= tensor.nbytes + 40 + 8 + 40 * (1 + tensor.nbytes // (1 << 18))


@pytest.mark.parametrize(
    "tensor",
    [
        gaussian(20_001).bfloat16(),
        gaussian(5_000),
        (30 * gaussian(20_001, scale=1)).to(torch.float8_e4m3fn),
        gaussian(20_001).bfloat16().float(),
        torch.zeros(300, dtype=torch.int16),
        (gaussian(20_003) > 0.038).to(torch.int32) * 77,
        gaussian(1).half(),
    ],
    ids=["bfloat16", "float32", "float8", "widened", "zeros", "sparse", "one"],
)
def test_kernels_equal_the_reference(tensor):
    raw = bits_of(tensor).numpy().tobytes()
    layout, coded = planes(codec.encode(tensor))
    plain = reference.planes_of(raw, b"", layout.format)
    assert reference.chunk_of(plain, b"", layout.format) == raw
    for (mode, data, size), plane in zip(coded, plain, strict=True):
        assert reference.encode_plane(plane) == (mode, data)
        assert reference.decode_plane(mode, data, size) == plane


def test_fields_are_cut_off_where_codes_are_long():
    float8, half, widened = (
        (30 * gaussian(20_001, scale=1)).to(torch.float8_e4m3fn),
        gaussian(20_001).half(),
        gaussian(1 << 17).bfloat16().float(),
    )
    for tensor, place, field in ((float8, 0, (0, 2)), (half, 1, (0, 1)), (widened, 0, (0, 1)), (widened, 2, (1, 7))):
        mode, data, _ = planes(codec.encode(tensor))[1][place]
        assert mode == reference.FIELDS and (data[0], data[1]) == field
    assert [mode for mode, _, _ in planes(codec.encode(gaussian(20_001).bfloat16()))[1]] == [
        reference.RAW,
        reference.HUFFMAN,
    ]


def test_a_sample_unlike_the_rest_is_not_trusted():
    lines = torch.randint(0, 16, (1000, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    lines[::5] = lines[::5] * lines[::5] // 15 * 15 // 16  # the sample: fewer high values
    lines[:, 0] = torch.arange(1000) % 16
    plane = lines.reshape(-1).numpy()
    ((mode, data, _),) = planes(codec.encode(lines.reshape(-1)))[1]
    assert (mode, data) == reference.encode_plane(plane.tobytes()) == reference.encode_block(plane.tobytes())


@pytest.mark.skipif(not DEPOSITS, reason="needs an instruction that this core lacks")
def test_marks_are_filled_word_by_word_as_bit_by_bit():
    rng = np.random.default_rng(0)
    marks, rest = rng.integers(0, 256, 500, dtype=np.uint8), rng.integers(0, 256, 8 * 500 + 8, dtype=np.uint8)
    first, second = np.zeros(4003, np.uint8), np.zeros(4003, np.uint8)
    assert scatter_bits(marks, rest, 7, first) == scatter_words(marks, rest, 7, second) == np.unpackbits(marks).sum()
    assert (first[:4000] == second[:4000]).all() and (second[4000:] == 0).all()
    again, left = np.zeros((2, 500), np.uint8), np.zeros((2, 4008), np.uint8)
    found = gather_bits(second, 7, again[0], left[0])
    assert found == gather_words(second, 7, again[1], left[1]) == (second[:4000] != 7).sum()
    assert (again[0] == again[1]).all() and (left[0, :found] == left[1, :found]).all()
    assert (np.unpackbits(again[1], bitorder="little") == (second[:4000] != 7)).all()


def test_the_reference_reads_deltas():
    tensor, base = gaussian(30_000).bfloat16(), gaussian(30_000, seed=2).bfloat16()
    raw, taken_off = bits_of(tensor).numpy().tobytes(), bits_of(base).numpy().tobytes()
    layout, coded = planes(HUFFMAN.encode(tensor, base=base))
    assert layout.head_bytes == payload.HEADER_BYTES + 8 + 16
    found = [reference.decode_plane(*each) for each in coded]
    assert reference.chunk_of(found, taken_off, layout.format) == raw


def test_a_damaged_chunk_is_named():
    packed = bytearray(HUFFMAN.encode(gaussian(3 * (1 << 18) + 77).bfloat16()))
    packed[-1] ^= 1
    with pytest.raises(CodecError, match="chunk 3 of 4"):
        HUFFMAN.decode(memoryview(packed))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_nothing(threads):
    tensor = gaussian(5 * (1 << 18) + 3).bfloat16()
    packed = HUFFMAN.encode(tensor, threads=threads)
    assert packed == codec.encode(tensor)
    assert same(HUFFMAN.decode(packed, threads=threads), tensor)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is no other core")
def test_a_helping_thread_runs_on_another_core():
    tensor = gaussian(6 * (1 << 17)).to(torch.float8_e4m3fn)
    packed = HUFFMAN.encode(tensor, threads=2)
    cores = os.sched_getaffinity(0)
    try:
        for core in sorted(cores)[:2]:
            os.sched_setaffinity(0, {core})
            os.sched_setaffinity(0, cores)  # it stays where it is for a while
            before = cpu._core()
            assert same(HUFFMAN.decode(packed, threads=2), tensor)
            if cpu._core() == before:
                helper = cpu._IDLE[-1]
                assert os.sched_getaffinity(helper.native_id) == cores - {before}
    finally:
        os.sched_setaffinity(0, cores)
    assert len(cpu._IDLE) == len(cpu._HELPERS)  # none is lost


def test_more_chunks_than_one_call_takes(monkeypatch):
    tensor = gaussian(5 * (1 << 18) + 3).bfloat16()
    packed = codec.encode(tensor)
    monkeypatch.setattr(cpu, "_CALL_BYTES", 1 << 20)
    for threads in (1, 2):
        assert same(HUFFMAN.decode(packed, threads=threads), tensor)
        assert packed == HUFFMAN.encode(tensor, threads=threads)


def test_the_digest_of_kernels_is_xxh3():
    data = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    for size in (*range(SHORT + 1, SHORT + 140), *range(1020, 1100), *range(2040, 2120), 5000):
        assert int(long_digest(data[:size])) == payload.digest(data[:size])
        for past_caches, offset in ((False, 0), (True, 0), (True, 16), (True, 5)):
            copy = np.zeros(size + 128, np.uint8)[offset:]
            assert int(copied_digest(data[:size], copy, past_caches)) == payload.digest(data[:size])
            assert np.array_equal(copy[:size], data[:size]) and not copy[size:].any()


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_too_much_for_the_caches_comes_back_as_it_was(threads):
    size = cpu._MUCH * threads + 12345
    tensor = torch.from_numpy(np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8))
    packed = bytearray(HUFFMAN.encode(tensor, threads=threads))
    assert same(HUFFMAN.decode(packed, threads=threads), tensor)
    packed[-7] ^= 1
    with pytest.raises(CodecError, match="checksum"):
        HUFFMAN.decode(packed, threads=threads)


def entropy_bytes(plane):
    counts = np.bincount(plane, minlength=256)
    share = counts[counts > 0] / plane.size
    return -(share * np.log2(share)).sum() * plane.size / 8


def test_exponents_are_near_their_entropy():
    layers = [gaussian(1 << 18, seed, scale) for seed, scale in enumerate((0.02, 0.05, 0.008, 0.03))]
    tensor = torch.cat(layers).bfloat16()
    packed = codec.encode(tensor)
    assert len(packed) <= 0.67 * tensor.nbytes
    exponents = (tensor.view(torch.uint16).numpy() >> 7 & 255).astype(np.uint8)
    bound = sum(entropy_bytes(part) for part in np.split(exponents, 4))
    assert bound / (len(packed) - tensor.numel()) >= 0.98
    scaled = torch.cat([layer / layer.abs().max() * 448 for layer in layers]).to(torch.float8_e4m3fn)
    assert len(codec.encode(scaled)) <= 0.83 * scaled.nbytes


def test_near_checkpoints_and_scales():
    before = gaussian(1 << 19)
    after = before + gaussian(1 << 19, seed=1, scale=0.02 * 0.01)
    delta = codec.encode(after.bfloat16(), base=before.bfloat16())
    assert len(delta) <= 0.40 * after.numel() * 2
    groups = torch.cat([gaussian(1 << 19, seed, 0.02) for seed in range(4)]).reshape(-1, 16).abs().amax(1) / 6
    scales = (groups / groups.max() * 448).to(torch.float8_e4m3fn)
    assert len(codec.encode(scales)) <= 0.60 * scales.nbytes


def test_the_front_door():
    assert HUFFMAN.dtypes == set(FORMATS)
    assert codec.names()[0] == codec.get("raw").name == "raw"
    with pytest.raises(UnknownCodecError, match="'lzma' is unknown; choose huffman"):
        codec.encode(torch.zeros(3), "lzma")
    with pytest.raises(CodecError, match=r"begins with b'else'"):
        codec.decode(memoryview(b"else" * 10))


def test_importing_the_package_costs_nothing():
    script = "import sys, kvrail.codec; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_readme_is_true():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})


def test_what_it_does_not_take_is_named():
    with pytest.raises(CodecError, match=r"not torch.float32 \[2, 2\] on cpu, torch.sparse_coo"):
        codec.encode(torch.eye(2).to_sparse())
    with pytest.raises(CodecError, match=r"not torch.float32 \[2\] on meta"):
        codec.encode(torch.empty(2, device="meta"))
    with pytest.raises(CodecError, match=r"the base is torch.float32 \[3\] on cpu, the tensor torch.float32 \[2\]"):
        codec.encode(torch.zeros(2), base=torch.zeros(3))


@pytest.mark.heavy
def test_more_than_2_to_the_31_elements():
    count = (1 << 31) + 12_345
    tensor = torch.zeros(count, dtype=torch.float8_e4m3fn)
    tensor.view(torch.uint8)[-20_000_000:] = torch.randint(0, 9, (20_000_000,), dtype=torch.uint8)
    packed = codec.encode(tensor)
    assert len(packed) < 10_000_000
    assert same(codec.decode(packed), tensor)
