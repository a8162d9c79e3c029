"""raw's Triton kernel against torch's own indexing: in Triton's interpreter, or compiled where there is a GPU."""

from dataclasses import replace

import pytest
import torch
from kv_blocks import SHAPES, bits_of, copy_of, scattered, spec_of

pytest.importorskip("triton")

from kvrail.codec.base import Block, CodecError
from kvrail.codec.core.floats import FLOATS
from kvrail.codec.raw import gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
LARGER = [(2, 2, 64, 8, 128, 64), (1, 2, 16, 2, 24, 20)]


def buffer_of(spec, offset=0):
    """Room for a block and no more, poisoned, `offset` bytes behind an aligned address; and what lies around it."""
    around = torch.full((spec.raw_bytes + 128,), 0xA5, dtype=torch.uint8, device=DEVICE)
    return around[64 + offset :][: spec.raw_bytes], around


@pytest.mark.parametrize("offset", [0, 4, 1])
@pytest.mark.parametrize("shape", SHAPES + LARGER, ids=str)
@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_pages_go_to_the_buffer_and_back_and_nothing_else_is_touched(dtype, shape, offset):
    spec = spec_of(shape, dtype)
    pages, out = scattered(spec, 1, DEVICE), scattered(spec, 2, DEVICE)
    (buffer, around), before = buffer_of(spec, offset), bits_of(pages.pools)
    gpu.gather(pages, buffer)
    assert buffer.cpu().numpy().tobytes() == bits_of(pages.gather())
    rest = torch.cat([around[: 64 + offset], around[64 + offset + spec.raw_bytes :]])
    assert (rest == 0xA5).all()
    wanted = copy_of(out)
    wanted.scatter(pages.gather())
    gpu.scatter(buffer, out)
    assert bits_of(out.pools) == bits_of(wanted.pools)
    assert bits_of(pages.pools) == before


def test_pages_of_a_pool_whose_tokens_lie_apart_are_refused():
    pages = scattered(spec_of((1, 1, 4, 2, 8, 8), "bfloat16"), 1, DEVICE)
    turned = replace(pages, pools=Block(pages.pools.keys.transpose(2, 3), pages.pools.values.transpose(2, 3)))
    buffer, around = buffer_of(pages.spec)
    for move in (lambda: gpu.gather(turned, buffer), lambda: gpu.scatter(buffer, turned)):
        with pytest.raises(CodecError, match="contiguous"):
            move()
    assert (around == 0xA5).all()
