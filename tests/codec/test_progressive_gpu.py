"""The progressive codec's compiled kernels: payloads equal the CPU's byte for byte, pages come back stage by stage."""

import pytest
import torch
from kv_blocks import SHAPES, bits_of, copy_of, scattered, spec_of
from progressive_cases import every_pattern, kv_pages, middles, plans_of

from kvrail.codec.base import Block, PagedBlock
from kvrail.codec.splitzip.progressive.codec import ProgressiveCodec
from kvrail.codec.splitzip.progressive.format import Cut
from kvrail.codec.splitzip.tiles.format import FORMATS

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

LARGER = [(2, 9, 64, 8, 128, 128), (1, 3, 64, 8, 128, 64), (3, 2, 16, 4, 96, 80), (1, 4, 130, 2, 66, 34)]


def on(pages, device):
    pools = Block(*(tensor.to(device) for tensor in pages.pools.tensors()))
    return PagedBlock(pools, pages.layers, pages.page_ids)


def check(codec, pages, plans):
    """GPU and CPU make the same payloads, and each stage gives its values; pages: on the CPU."""
    encoding = codec.encode(on(pages, "cuda"))
    stages = encoding.stages()
    assert [bytes(stage) for stage in stages] == [bytes(stage) for stage in codec.encode(pages).stages()]
    out = on(scattered(pages.spec, 99), "cuda")
    wanted, raw = copy_of(out), (bool(stages[1][5] & 1), bool(stages[1][5] & 2))
    for stage, block in enumerate((middles(pages.gather(), plans, raw), pages.gather())):
        wanted.scatter(Block(*(tensor.cuda() for tensor in block.tensors())))
        codec.decode(stage, stages[: stage + 1], out)
        torch.cuda.synchronize()
        assert bits_of(out.pools) == bits_of(wanted.pools)
    return encoding.stats()


@pytest.mark.parametrize("chunk", [256, 4096, 16384])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES + LARGER, ids=str)
def test_both_stages_equal_the_cpus(shape, dtype, chunk):
    for cut, outliers in ((Cut(), 0.001), (Cut(3, 2), 0.02), (Cut(1, 3), 0.0)):
        pages = kv_pages(spec_of(shape, dtype), 1, outliers)
        check(ProgressiveCodec(cut, chunk), pages, plans_of(pages.spec, cut, chunk))


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_bit_pattern(dtype):
    pages = PagedBlock.whole(every_pattern(dtype))
    assert check(ProgressiveCodec(), pages, plans_of(pages.spec)).raw_tensors == 0


@pytest.mark.parametrize("dtype", FORMATS)
def test_random_bits_travel_raw(dtype):
    pages = scattered(spec_of((2, 3, 64, 2, 64, 64), dtype), 1)
    assert check(ProgressiveCodec(), pages, plans_of(pages.spec)).raw_tensors == 2


def test_one_tensor_raw_and_the_other_not():
    pages, noise = (kv_pages(spec_of((2, 3, 64, 2, 64, 64), "bfloat16"), 1, outliers) for outliers in (0.0, 1.0))
    for keys, values in ((noise, pages), (pages, noise)):
        mixed = PagedBlock(Block(keys.pools.keys, values.pools.values), pages.layers, pages.page_ids)
        assert check(ProgressiveCodec(), mixed, plans_of(mixed.spec)).raw_tensors == 1
