"""Many requests at once over every codec, half of them cancelled: no leaked page, no changed answer, flat memory."""

import asyncio
import gc
import os
import random

import psutil

from kvrail.codec import registry
from tests.cluster.cluster import cluster
from tests.models import tiny_model

ROUNDS = int(os.environ.get("KVRAIL_LOAD_ROUNDS", "7"))
CONCURRENT = 32
EXACT = [name for name in registry.names() if registry.get(name).exact]


def requests(seed):
    rng = random.Random(seed)
    for number in range(CONCURRENT):
        prompt = [rng.randrange(256) for _ in range(rng.choice([rng.randint(1, 100), rng.randint(1, 1000)]))]
        yield (
            prompt,
            {
                "max_tokens": rng.randint(1, 64),
                "temperature": rng.choice([0.0, 0.8]),
                "seed": number,
                "n": rng.choice([1, 1, 1, 2]),
                "local": rng.random() < 0.2,
                "codec": rng.choice(EXACT),
            },
        )


async def one_round(c, asked, rng):
    async def ask(number, prompt, params):
        task = asyncio.create_task(c.ask(prompt, **params))
        if number % 2:
            await asyncio.wait([task], timeout=rng.random() * 2)
            task.cancel()
            await asyncio.wait([task])
            return None
        return (await task).tokens

    return await asyncio.gather(*(ask(number, *each) for number, each in enumerate(asked)))


def short():
    """All of them are begun at once, and each grows by four pages: some must give way."""
    rng = random.Random(2)
    for number in range(CONCURRENT):
        prompt = [rng.randrange(256) for _ in range(20)]
        yield prompt, {"max_tokens": 64, "temperature": 0.8, "seed": number, "local": True}


async def test_thirty_two_mixed_requests_again_and_again():
    asked = list(requests(1))
    folder, shared = tiny_model("llama"), {"kv_dtype": "bfloat16", "page_size": 16, "max_batch_tokens": 512}
    async with cluster(folder, num_pages=300, prefix_cache=False, **shared) as c:
        alone = [
            (await c.ask(prompt, **params)).tokens if n % 2 == 0 else None for n, (prompt, params) in enumerate(asked)
        ]
        shorts_alone = [(await c.ask(prompt, **params)).tokens for prompt, params in short()]
    process, sizes = psutil.Process(), []
    async with cluster(folder, num_pages=70, **shared) as c:  # too few pages: preemption
        for number in range(ROUNDS):
            together = await one_round(c, asked, random.Random(number))
            await c.settled()
            assert together == alone
            gc.collect()
            sizes.append(process.memory_info().rss)
        found = await asyncio.gather(*(c.ask(prompt, **params) for prompt, params in short()))
        assert [each.tokens for each in found] == shorts_alone
        await c.settled()
        assert c.decode.engine._scheduler.preemptions > 0
    steady = sizes[ROUNDS // 2 :]  # buffers of the allocator and of gRPC have grown by then
    assert max(steady) - min(steady) < 32 << 20, [size >> 20 for size in sizes]
