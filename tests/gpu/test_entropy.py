"""splitzip-ans: bits come back, codes get smaller than any code of fixed width, corrupt pieces are refused."""

import struct
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "codec"))

from kv_blocks import bits_of, copy_of, random_block, scattered, spec_of  # noqa: E402

from kvrail.codec import registry  # noqa: E402
from kvrail.codec.base import Block, CodecError, PagedBlock  # noqa: E402
from kvrail.codec.splitzip.tiles.format import FORMATS  # noqa: E402

if "splitzip-ans" not in registry.names():
    pytest.skip("nvCOMP is not installed", allow_module_level=True)

HEADER_BYTES, LENGTHS = 64, struct.Struct("<5Q")
SHAPES = [(2, 3, 64, 8, 128, 128), (1, 33, 64, 8, 128, 64), (3, 2, 16, 4, 96, 80), (1, 1, 1, 1, 1, 1)]


@pytest.fixture(scope="module")
def codec():
    return registry.get("splitzip-ans")


def log_normal(spec, device="cuda"):
    """Scattered pages whose channels have log-normal scales."""
    pages = scattered(spec, 1, device)
    generator = torch.Generator().manual_seed(1)
    for tensor in (pages.pools.keys, pages.pools.values):
        scales = torch.exp(0.5 * torch.randn(tensor.shape[-2:], generator=generator))
        tensor.copy_((torch.randn(tensor.shape, generator=generator) * scales).to(tensor.dtype))
    return pages


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_come_back(codec, shape, dtype, device):
    pages = log_normal(spec_of(shape, dtype), device)
    (payload,) = codec.encode(pages).stages()
    out = scattered(pages.spec, 99, device)
    wanted = copy_of(out)
    wanted.scatter(pages.gather())
    codec.decode(0, [payload], out)
    torch.cuda.synchronize()
    assert bits_of(out.pools) == bits_of(wanted.pools)


def test_it_is_smaller_than_any_fixed_width(codec):
    pages = log_normal(spec_of(SHAPES[1], "bfloat16"))
    sizes = {
        name: registry.get(name).encode(pages).stages()[0].nbytes
        for name in ("splitzip", "splitzip-channel", "splitzip-zstd", "splitzip-ans")
    }
    assert sizes["splitzip-ans"] < 0.97 * sizes["splitzip-channel"]
    assert sizes["splitzip-ans"] < 1.02 * sizes["splitzip-zstd"]


def test_random_bits_grow_by_the_lengths_alone(codec):
    spec = spec_of(SHAPES[0], "bfloat16")
    (payload,) = codec.encode(PagedBlock.whole(random_block(spec, 1, "cuda"))).stages()
    assert payload.nbytes <= spec.raw_bytes + HEADER_BYTES + LENGTHS.size + 16 * 3


def test_corrupt_pieces_are_refused_and_pages_stay(codec):
    pages = log_normal(spec_of(SHAPES[0], "bfloat16"))
    payload = bytes(codec.encode(pages).stages()[0])
    lengths = LENGTHS.unpack_from(payload, HEADER_BYTES)
    start = HEADER_BYTES + LENGTHS.size + lengths[0]
    assert lengths[1] < Block(pages.pools.keys, pages.pools.values).spec.raw_bytes // 8
    out = scattered(pages.spec, 2, "cuda")
    before = bits_of(out.pools)
    for at in (start, start + lengths[1] // 3, start + lengths[1] // 2, start + lengths[1] - 1):
        wrong = bytearray(payload)
        wrong[at] ^= 0x55
        with pytest.raises(CodecError, match="coded piece"):
            codec.decode(0, [memoryview(wrong)], out)
    torch.cuda.synchronize()
    assert bits_of(out.pools) == before
    codec.decode(0, [memoryview(payload)], out)  # nothing stays broken
