"""splitzip-progressive-ans' compiled kernels: payloads are the CPU's byte for byte, stages leave the same pages."""

import pytest
import torch
from kv_blocks import SHAPES, bits_of, copy_of, scattered, spec_of
from progressive_ans_cases import KEPT, coarse, every_pattern, kv_pages, pages_with_escapes

from kvrail.codec.base import Block, PagedBlock
from kvrail.codec.splitzip.progressive_ans.codec import ProgressiveAnsCodec
from kvrail.codec.splitzip.tiles.format import FORMATS

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


LARGER = [(2, 9, 64, 8, 128, 128), (1, 3, 64, 8, 128, 64), (3, 2, 16, 4, 96, 80), (1, 4, 130, 2, 66, 34)]


def on(pages, device):
    pools = Block(*(tensor.to(device) for tensor in pages.pools.tensors()))
    return PagedBlock(pools, pages.layers, pages.page_ids)


def check(pages, kept=(3, 1), chunk=4096):
    """GPU and CPU make the same payloads, and each stage gives its values; pages: on the CPU."""
    codec = ProgressiveAnsCodec(kept, chunk)
    encoding, expected = codec.encode(on(pages, "cuda")), codec.encode(pages)
    payloads = encoding.stages()
    assert [bytes(payload) for payload in payloads] == [bytes(payload) for payload in expected.stages()]
    assert encoding.stats() == expected.stats()
    out = on(scattered(pages.spec, 99), "cuda")
    wanted = copy_of(out)
    for stage, block in enumerate((coarse(pages.gather(), kept, payloads[1]), pages.gather())):
        wanted.scatter(Block(*(tensor.cuda() for tensor in block.tensors())))
        codec.decode(stage, [payloads[stage]], out)
        torch.cuda.synchronize()
        assert bits_of(out.pools) == bits_of(wanted.pools)


@pytest.mark.parametrize("chunk", [256, 4096])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES + LARGER, ids=str)
def test_payloads_are_the_cpus_and_stages_leave_their_values(shape, dtype, chunk):
    for kept in KEPT:
        check(pages_with_escapes(spec_of(shape, dtype), 1), kept, chunk)


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_bit_pattern(dtype):
    check(PagedBlock.whole(every_pattern(dtype)))


@pytest.mark.parametrize("dtype", FORMATS)
def test_random_bits_travel_raw(dtype):
    check(scattered(spec_of((2, 3, 64, 2, 64, 64), dtype), 1))


def test_one_tensor_raw_and_the_other_not():
    pages, noise = (kv_pages(spec_of((2, 3, 64, 2, 64, 64), "bfloat16"), 1, outliers) for outliers in (0.0, 1.0))
    for keys, values in ((noise, pages), (pages, noise)):
        check(PagedBlock(Block(keys.pools.keys, values.pools.values), pages.layers, pages.page_ids))
