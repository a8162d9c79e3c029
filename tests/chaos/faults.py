"""What befalls the workers of a cluster, again and again, while clients ask."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable

from tests.chaos.cluster import DECODE, PREFILL, Cluster

PAUSE_S = (2.0, 5.0)
"""Between one fault and the next."""
SPELL_S = (3.0, 14.0)
"""Of a fault that passes; what is silent for longer than ten seconds is given up."""

Fault = Callable[[Cluster, int, random.Random], Awaitable[None]]


async def killed(cluster: Cluster, worker: int, rng: random.Random) -> None:
    """SIGKILL; a second later the worker is started anew at its address."""
    await asyncio.to_thread(cluster.kill, worker)
    await asyncio.sleep(1)
    cluster.start(worker)


async def stopped(cluster: Cluster, worker: int, rng: random.Random) -> None:
    """SIGSTOP, and SIGCONT after a while."""
    cluster.signal(worker, signal.SIGSTOP)
    await asyncio.sleep(rng.uniform(*SPELL_S))
    cluster.signal(worker, signal.SIGCONT)


async def cut_off(cluster: Cluster, worker: int, rng: random.Random) -> None:
    """Every packet from and to the worker is lost for a while."""
    cluster.ground.cut(worker)
    await asyncio.sleep(rng.uniform(*SPELL_S))
    cluster.ground.mend(worker)


async def slowed(cluster: Cluster, worker: int, rng: random.Random) -> None:
    """A link of a thousandth of a data centre's, for a while."""
    cluster.ground.slow(worker, "10mbit")
    await asyncio.sleep(rng.uniform(*SPELL_S))
    cluster.ground.mend(worker)


async def replaced(cluster: Cluster, worker: int, rng: random.Random) -> None:
    """SIGTERM, as an upgrade does it: the worker finishes what it has and ends; its successor has its address."""
    await asyncio.to_thread(cluster.terminate, worker)
    cluster.start(worker)


async def bewitched(cluster: Cluster, worker: int, rng: random.Random) -> None:
    """Killed, and for a while a worker of other weights answers at its address."""
    await asyncio.to_thread(cluster.kill, worker)
    cluster.start(worker, other_weights=True)
    await asyncio.sleep(20)
    await asyncio.to_thread(cluster.kill, worker)
    cluster.start(worker)


ALL = (*PREFILL, *DECODE)
SCENARIOS: dict[str, tuple[tuple[int, ...], tuple[Fault, ...]]] = {
    "everything": (ALL, (killed, stopped, cut_off, slowed, replaced, bewitched)),
    "kills": (ALL, (killed,)),
    "prefill kills": (PREFILL, (killed,)),
    "stops": (ALL, (stopped,)),
    "partitions": (ALL, (cut_off,)),
    "slow links": (ALL, (slowed,)),
    "upgrades": (ALL, (replaced,)),
    "other weights": (ALL, (bewitched,)),
    "both roles": (ALL, (killed, stopped, replaced)),
}
"""Whom a scenario befalls, and what. In the last one every worker prefills and decodes."""
BOTH = "both roles"


async def befall(cluster: Cluster, scenario: str, seed: int, done: list[str]) -> None:
    """Do harm until cancelled, then mend it all. done: gets what was done, in order.

    One decode worker is always left alone: a cluster without any cannot answer. So is a worker that has not come back.
    """
    victims, faults = SCENARIOS[scenario]
    rng, under_way = random.Random(seed), {}
    try:
        while True:
            await asyncio.sleep(rng.uniform(*PAUSE_S))
            healthy = await asyncio.to_thread(cluster.healthy)
            able = healthy - {worker for worker, task in under_way.items() if not task.done()}
            spare = able & set(cluster.decodes)
            choice = [w for w in victims if w in able and (w not in cluster.decodes or len(spare) > 1)]
            if choice:
                worker, fault = rng.choice(choice), rng.choice(faults)
                done.append(f"{fault.__name__} {worker}")
                under_way[worker] = asyncio.create_task(fault(cluster, worker, rng))
    except asyncio.CancelledError:
        await asyncio.gather(*under_way.values())
