"""Moves KV pages between pools of two processes, compressed, and checks every bit: python examples/move_pages.py."""

import asyncio
import multiprocessing as mp
from multiprocessing.connection import Connection

import torch

from kvrail.kv import KVEndpoint, KVLayout, KVPools

LAYOUT = KVLayout(num_layers=4, num_kv_heads=8, key_dim=64, value_dim=64, page_size=64, dtype="bfloat16")
SHAPE = (2, 32, LAYOUT.page_size, LAYOUT.num_kv_heads, LAYOUT.key_dim)  # keys and values of 32 pages of one layer
HERE, THERE = [3, 1, 4, 15, 9, 26], [27, 18, 2, 8, 0, 5]  # the request's pages in the sender's and the receiver's pool


def filled() -> list[torch.Tensor]:
    """One tensor a layer; real KV has few exponents, as these have."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(SHAPE, generator=generator).bfloat16() for _ in range(LAYOUT.num_layers)]


async def send(channel: Connection) -> None:
    """Send from the other process, whose pools are one tensor for each layer, as vLLM's are."""
    endpoint = await KVEndpoint.start(LAYOUT, KVPools.by_layer(filled()), host="127.0.0.1", receive_bytes=0)
    offer = await asyncio.to_thread(channel.recv_bytes)
    sending = endpoint.send(offer, HERE, channel.send_bytes)
    await sending.done()
    print(f"sent {sending.counts.raw_bytes} bytes of KV as {sending.counts.payload_bytes}")
    await endpoint.aclose()


async def receive(channel: Connection) -> None:
    """Receive here, into one tensor over all layers."""
    keys, values = (torch.zeros(LAYOUT.num_layers, *SHAPE[1:], dtype=torch.bfloat16) for _ in range(2))
    endpoint = await KVEndpoint.start(LAYOUT, KVPools.whole(keys, values))
    receiving = endpoint.receive("request-1", THERE, host="127.0.0.1")
    channel.send_bytes(receiving.offer)
    asyncio.get_running_loop().add_reader(channel.fileno(), lambda: receiving.deliver(channel.recv_bytes()))
    await receiving.done()
    asyncio.get_running_loop().remove_reader(channel.fileno())
    for layer, source in enumerate(filled()):
        for pool, sent in ((keys, source[0]), (values, source[1])):
            assert torch.equal(pool[layer, THERE].view(torch.int16), sent[HERE].view(torch.int16))
    print("received: every bit is there")
    await endpoint.aclose()


def other_process(channel: Connection) -> None:
    """Run the sender."""
    asyncio.run(send(channel))


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=other_process, args=(there,))
    process.start()
    asyncio.run(receive(here))
    process.join()
