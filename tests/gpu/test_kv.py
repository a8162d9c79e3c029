"""The door for other engines on a CUDA device: pools of both kinds, payloads through the host, every bit compared."""

import asyncio

import pytest
import torch

from kvrail.kv import KVEndpoint, KVLayout, KVPools

pytestmark = pytest.mark.gpu

LAYOUT = KVLayout(num_layers=4, num_kv_heads=8, key_dim=128, value_dim=128, page_size=16, dtype="bfloat16")
PAGES = 64
THERE, HERE = [7, 0, 33, 60, 12, 5], [1, 2, 50, 40, 63, 9]


def tensors(kind, fill):
    """A pool's tensors, on the device, and the keys and values of each layer as views of them."""
    page = (16, 8, 128)
    if kind == "whole":
        made = [torch.empty((4, PAGES, *page), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        views = list(zip(*made, strict=True))
        pools = KVPools.whole(*made)
    elif kind == "joined":
        made = [torch.empty((2, PAGES, *page), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        views, pools = [tuple(each) for each in made], KVPools.by_layer(made)
    else:  # keys and values of a page lie beside each other
        made = [torch.empty((PAGES, 2, *page), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        views = [(each[:, 0], each[:, 1]) for each in made]
        pools = KVPools.by_layer(views)
    for each in made:
        each.normal_() if fill else each.zero_()
    torch.cuda.synchronize()
    return pools, views


def bits(views, pages):
    return torch.stack([part[pages].view(torch.int16) for layer in views for part in layer]).cpu()


@pytest.mark.parametrize("codec", ["raw", "splitzip-channel", "splitzip-ans"])
@pytest.mark.parametrize("receiver", ["whole", "joined", "paired"])
@pytest.mark.parametrize("sender", ["whole", "joined", "paired"])
async def test_pages_cross_bit_for_bit(sender, receiver, codec):
    out, sent = tensors(sender, True)
    into, landed = tensors(receiver, False)
    options = {"transport": "tcp", "codecs": [codec], "max_frame_bytes": 1 << 20}
    there = await KVEndpoint.start(LAYOUT, out, host="127.0.0.1", receive_bytes=0, **options)
    here = await KVEndpoint.start(LAYOUT, into, receive_bytes=4 << 20, **options)
    async with asyncio.timeout(300):
        receiving = here.receive("r", HERE, host="127.0.0.1")
        there.send(receiving.offer, THERE, receiving.deliver)
        await receiving.done()
    torch.cuda.synchronize()
    assert torch.equal(bits(landed, HERE), bits(sent, THERE))
    around = [page for page in range(PAGES) if page not in HERE]
    assert not bits(landed, around).any()
    await there.aclose()
    await here.aclose()
