"""SplitZip's compiled kernels: payloads equal the CPU's byte for byte, and pages come back bit for bit."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "codec"))

from kv_blocks import SHAPES, bits_of, copy_of, random_block, scattered, spec_of  # noqa: E402

from kvrail.codec.base import Block, CodecError, PagedBlock  # noqa: E402
from kvrail.codec.splitzip.one_stage.codec import splitzip, splitzip_channel  # noqa: E402
from kvrail.codec.splitzip.one_stage.gpu_kernels import tiles_kernel  # noqa: E402
from kvrail.codec.splitzip.one_stage.gpu_launch import launch_encode  # noqa: E402
from kvrail.codec.splitzip.tiles import gpu_launch  # noqa: E402
from kvrail.codec.splitzip.tiles.format import FORMATS, WindowCode  # noqa: E402
from kvrail.codec.splitzip.tiles.gpu_pack_kernel import pack_kernel  # noqa: E402
from kvrail.codec.splitzip.tiles.plan import plans_of  # noqa: E402
from tests.reference import tiles as reference  # noqa: E402

CODECS = [splitzip, splitzip_channel]
LARGER = [(2, 9, 64, 8, 128, 128), (1, 3, 64, 8, 128, 64), (3, 2, 16, 4, 96, 80), (1, 4, 130, 2, 66, 34)]


def real_looking(spec, seed, spread=0.5):
    """Scattered pages on the GPU: channels of unequal scales, one value in 100 far below them, a few of random bits.

    One value of random bits is enough to make a tile's other channels escape.
    """
    pages = scattered(spec, seed, "cuda")
    generator = torch.Generator("cuda").manual_seed(seed)

    def uniform(tensor):
        return torch.rand(tensor.shape, generator=generator, device="cuda")

    for tensor in (pages.pools.keys, pages.pools.values):
        scales = torch.exp(spread * torch.randn(tensor.shape[-2:], generator=generator, device="cuda"))
        drawn = torch.randn(tensor.shape, generator=generator, device="cuda") * scales
        drawn = torch.where(uniform(tensor) < 0.01, drawn * torch.exp2(-40 * uniform(tensor)), drawn).to(tensor.dtype)
        as_bits = torch.uint8 if tensor.element_size() == 1 else torch.int16
        chosen = uniform(tensor) > 1 / 50_000
        tensor.view(as_bits)[chosen] = drawn.view(as_bits)[chosen]
    return pages


def on_cpu(pages):
    return PagedBlock(Block(*(tensor.cpu() for tensor in pages.pools.tensors())), pages.layers, pages.page_ids)


def check(codec, pages):
    """GPU and CPU make the same payload, each restores it; gives the payload and what it came to."""
    encoding = codec.encode(pages)
    payload = encoding.stages()[0]
    assert bytes(payload) == bytes(codec.encode(on_cpu(pages)).stages()[0])
    out = scattered(pages.spec, 99, "cuda")
    wanted = copy_of(out)
    wanted.scatter(pages.gather())
    codec.decode(0, [payload], out)
    torch.cuda.synchronize()
    assert bits_of(out.pools) == bits_of(wanted.pools)
    return payload, encoding.stats()


@pytest.mark.parametrize("chunk", [256, 4096, 16384])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("make", CODECS)
@pytest.mark.parametrize("shape", SHAPES + LARGER, ids=str)
def test_payload_equals_the_cpus(shape, make, dtype, chunk):
    for seed, spread in ((1, 0.5), (2, 3.0)):
        check(make(chunk=chunk), real_looking(spec_of(shape, dtype), seed, spread))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("make", CODECS)
def test_every_bit_pattern(make, dtype):
    """Exhaustive patterns, among enough plain values that the tensor does not travel raw."""
    pages = real_looking(spec_of((1, 64, 64, 4, 128, 128), dtype), 1, 0.1)
    bits = torch.uint8 if FORMATS[dtype].item_bytes == 1 else torch.int16
    count = 1 << 8 * FORMATS[dtype].item_bytes
    patterns = torch.arange(count, device="cuda").to(bits)
    for tensor in (pages.pools.keys, pages.pools.values):
        chosen = tensor[1, pages.page_ids[0]] if count == 256 else tensor[1]
        flat = chosen.view(bits).view(-1)
        flat[torch.randperm(flat.numel(), device="cuda")[:count]] = patterns
    check(make(), pages)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("make", CODECS)
def test_random_bits_fall_back_to_raw(make, dtype):
    spec = spec_of((2, 3, 64, 2, 64, 64), dtype)
    payload, stats = check(make(), scattered(spec, 1, "cuda"))
    assert payload.nbytes <= spec.raw_bytes + 64 + 16 * 3
    assert stats.raw_tensors == 2


@pytest.mark.parametrize("make", CODECS)
def test_one_tensor_raw_and_the_other_not(make):
    pages = real_looking(spec_of((2, 3, 64, 2, 64, 64), "bfloat16"), 1)
    noise = random_block(pages.pools.spec, 5, "cuda")
    for pools in (Block(noise.keys, pages.pools.values), Block(pages.pools.keys, noise.values)):
        _, stats = check(make(), PagedBlock(pools, pages.layers, pages.page_ids))
        assert stats.raw_tensors == 1


@pytest.mark.parametrize("make", CODECS)
def test_captured_graph_encodes_what_the_pages_hold_when_replayed(make):
    codec = make()
    pages = real_looking(spec_of((2, 9, 64, 8, 128, 128), "bfloat16"), 1)
    plans, tops = plans_of(pages.spec, codec._code(pages)), codec._tops(pages)
    table = gpu_launch.make_table(pages, tops)
    buffers = gpu_launch.EncodeBuffers.allocate(plans, 0, pages.device)
    launch_encode(pages, plans, table, buffers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_encode(pages, plans, table, buffers)
    for seed in (2, 3):
        others = real_looking(pages.spec, seed, 2.0)
        for ours, theirs in zip(pages.pools.tensors(), others.pools.tensors(), strict=True):
            ours.copy_(theirs)
        table.copy_(gpu_launch.make_table(PagedBlock(pages.pools, pages.layers, others.page_ids), tops))
        graph.replay()
        torch.cuda.synchronize()
        check_buffers(buffers, PagedBlock(pages.pools, pages.layers, others.page_ids), plans, tops)


def check_buffers(buffers, pages, plans, tops):
    for number, (pool, plan, top) in enumerate(zip(on_cpu(pages).layer_pools(), plans, tops, strict=False)):
        bits, dense = pool.flatten(3).view(torch.uint16).numpy(), np.zeros(plan.fixed_bytes, dtype=np.uint8)
        records, extensions = reference.encode_tensor(bits, np.array(pages.page_ids), plan, top, dense)
        ours, slots = buffers.dense(plans)[number].cpu().numpy(), buffers.slots[number]
        for name, where in plan.sections.items():
            assert ours[where.offset : where.end].tobytes() == dense[where.offset : where.end].tobytes(), name
        assert buffers.totals[number].tolist() == [records.size, extensions.size]
        assert slots.packed_records[: records.size].cpu().numpy().tobytes() == records.tobytes()
        assert slots.packed_extensions[: extensions.size].cpu().numpy().tobytes() == extensions.tobytes()


@pytest.mark.parametrize("make", CODECS)
def test_another_number_of_pages_or_layers_compiles_nothing(make):
    def kernels():
        return sum(len(k.device_caches[torch.cuda.current_device()][0]) for k in (tiles_kernel, pack_kernel))

    for count, (layers, pages) in enumerate([(1, 1), (1, 2), (3, 5), (2, 16), (1, 33), (4, 64), (16, 16)]):
        check(make(), real_looking(spec_of((layers, pages, 64, 2, 64, 64), "bfloat16"), 1))
        if count == 0:
            first = kernels()
            assert first >= 3
    assert kernels() == first


@pytest.mark.parametrize("make", CODECS)
def test_corrupt_payload_is_refused_and_pages_stay(make):
    codec = make()
    pages = real_looking(spec_of((2, 3, 64, 2, 64, 64), "bfloat16"), 1)
    payload = bytes(codec.encode(pages).stages()[0])
    plan = plans_of(pages.spec, codec._code(pages))[0]
    out = scattered(pages.spec, 2, "cuda")
    before = bits_of(out.pools)
    for at in (0, 5, 6, 7, 24, 64 + plan.sections["counts"].offset, 64 + plan.sections["groups"].offset):
        wrong = bytearray(payload)
        wrong[at] ^= 1
        with pytest.raises(CodecError):
            codec.decode(0, [memoryview(wrong)], out)
    torch.cuda.synchronize()
    assert bits_of(out.pools) == before


def test_more_elements_than_32_bits_count():
    """The pool and what is encoded both pass 2^31 bytes and elements; checked by decoding."""
    needed = 60 << 30
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory")
    keys = torch.empty((2, 16500, 64, 8, 128), dtype=torch.bfloat16, device="cuda").normal_()
    values = torch.ones((2, 16500, 64, 8, 1), dtype=torch.bfloat16, device="cuda")
    pages = PagedBlock.whole(Block(keys, values))
    assert keys.numel() > 1 << 31
    code = WindowCode(3, True)
    plans = plans_of(pages.spec, code)
    buffers = gpu_launch.EncodeBuffers.allocate(plans, 0, pages.device)
    launch_encode(pages, plans, gpu_launch.make_table(pages, (None, None)), buffers)
    last = PagedBlock(pages.pools, range(1, 2), [16499])
    small = plans_of(last.spec, code)
    expected = gpu_launch.EncodeBuffers.allocate(small, 0, pages.device)
    launch_encode(last, small, gpu_launch.make_table(last, (None, None)), expected)
    for name, where in small[0].sections.items():
        if name != "groups":
            end = plans[0].sections[name].end
            assert torch.equal(
                buffers.dense(plans)[0][end - where.size : end], expected.dense(small)[0][where.offset : where.end]
            ), name
    count = int(expected.totals[0, 0])
    total = int(buffers.totals[0, 0])
    assert count > 0
    ours = buffers.slots[0].packed_records.view(torch.int16)[total - count : total]
    assert torch.equal(ours, expected.slots[0].packed_records.view(torch.int16)[:count])
