"""What prompts of every length leave in the memory of a router, a prefill and a decode worker.

python -m tests.chaos.growth COUNT asks so many and prints MiB of each process on the way.
"""

import asyncio
import itertools
import random
import sys

import httpx

from tests.chaos.load import WORDS, bodies
from tests.chaos.surroundings import Processes
from tests.models import tiny_model

CLIENTS = 8
EVERY = 400


async def ask(processes: Processes, count: int) -> None:
    """Ask, and print."""
    rng, numbers = random.Random(1), itertools.count(1)

    async def one_after_another(http: httpx.AsyncClient) -> None:
        while (number := next(numbers)) <= count:
            if number % EVERY == 0:
                print(number, processes.memory(), flush=True)  # noqa: T201
            words = rng.choice([rng.randint(1, 6), rng.randint(60, 160), rng.randint(160, 400)])
            (body,) = bodies(1, number)
            body |= {"prompt": f"{number} " + " ".join(rng.choices(WORDS, k=words)), "stream": False, "max_tokens": 8}
            (await http.post("/v1/completions", json=body)).raise_for_status()

    async with httpx.AsyncClient(base_url=processes.url, timeout=300) as http:
        await asyncio.gather(*(one_after_another(http) for _ in range(CLIENTS)))


if __name__ == "__main__":
    started = Processes(tiny_model("llama"), {})
    try:
        started.wait()
        asyncio.run(ask(started, int(sys.argv[1])))
    finally:
        started.kill()
