"""A cluster whose pages lie on one device: the CPU with all tests, a GPU with those that are marked `gpu`."""

import asyncio

import pytest
import torch

from kvrail.codec import registry
from kvrail.transport.ucx import UcxTransport
from tests.cluster.cluster import TRANSPORTS, cluster
from tests.cluster.staged import held_bytes

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])
DEVICES = ["cpu", CUDA]
CARRIED = TRANSPORTS[1:]
"""Transports between processes."""
PATIENCE_S = 60
PAGE = 16
LEAN = {
    "dtype": "float32",  # no two tokens of the tiny models are nearly tied: rounding changes none
    "page_size": PAGE,
    "max_batch_tokens": 256,
    "max_frame_bytes": 1 << 13,  # so that a transfer has many
    "max_running": 8,
    "transfer_memory_mib": 8,
    "eager": True,
}
"""What starts at once and computes exactly."""
EXACT = [name for name in registry.names() if registry.get(name).exact]


def lean_cluster(folder, transport, device, **options):
    """A cluster whose workers share one device."""
    return cluster(folder, transport, **{"kv_dtype": "bfloat16", **LEAN, "device": device, **options})


def forget(*workers):
    """Empty the prefix caches of workers at rest, so that a prompt is computed and sent again."""
    for worker in workers:
        with worker.engine._changed:
            pool = worker.engine._scheduler.pool
            pages = pool.allocate(pool.available())
            pool.release(pages)


def landed(device):
    """Wait for all that is enqueued."""
    if device == "cuda":
        torch.cuda.synchronize()


def _kept(c):
    """Memory of transfers that is not back in its place."""
    yield held_bytes(c)
    for transport in c.fetcher.parts.transports.all:
        ucx = isinstance(transport, UcxTransport)
        for pool in (transport.pools.host, transport.pools.device) if ucx else (transport.pool,):
            yield 0 if pool is None else pool.buffer.numel() - pool.free_bytes
        yield transport.retired_bytes if ucx else 0


async def at_rest(c):
    """Wait until no request runs; then every page is back and no transfer's memory is kept."""
    await c.settled()
    async with asyncio.timeout(PATIENCE_S):
        while any(_kept(c)):
            await asyncio.sleep(0.01)
