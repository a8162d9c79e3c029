"""One scenario of faults from beginning to end, inside the hub's namespace; prints a Report as JSON.

python -m tests.chaos.storm SCENARIO TRANSPORT --hub NAME --workers NAME,... --models FOLDER,FOLDER --folder FOLDER
"""

import argparse
import asyncio
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.cluster import Cluster
from tests.chaos.faults import BOTH, SCENARIOS, befall
from tests.chaos.ground import Ground
from tests.chaos.load import ask, bodies, storm

CLIENTS = 8
DISTINCT = 16
"""Requests that differ; a storm asks them again and again."""
FEWEST_FAULTS = int(os.environ.get("KVRAIL_CHAOS_FAULTS", "3"))
"""On a fast machine the requests would be answered before so many: then there are more."""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a storm.

    outcomes: requests of each kind (see load.Outcome). details: of those that were not answered in full. faults: what
    was done. held: open files and MiB of memory, before and after, of each process that was not replaced.
    """

    outcomes: dict[str, int]
    details: list[str]
    faults: list[str]
    held: dict[str, tuple[tuple[int, int], tuple[int, int]]]


async def weather(cluster: Cluster, scenario: str, requests: int, seed: int) -> Report:
    """Learn the answers undisturbed, ask again under faults, and wait until all is as it was."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        known = [(body, await ask(client, body)) for body in bodies(DISTINCT, seed)]
    await asyncio.to_thread(cluster.settled)
    before = cluster.holdings()
    faults: list[str] = []
    harm = asyncio.create_task(befall(cluster, scenario, seed, faults))

    def asking() -> Iterator[tuple[dict[str, Any], str]]:
        for number, request in enumerate(itertools.cycle(known)):
            if harm.done() or (number >= requests and len(faults) >= FEWEST_FAULTS):
                return
            yield request

    outcomes = await storm(cluster.url, asking(), CLIENTS)
    harm.cancel()
    await harm
    await asyncio.to_thread(cluster.settled)
    return Report(
        dict(Counter(outcome.kind for outcome in outcomes)),
        [f"{outcome.kind}: {outcome.detail}" for outcome in outcomes if outcome.kind != "full"],
        faults,
        {name: (before[name], after) for name, after in cluster.holdings().items() if name in before},
    )


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("transport", choices=("tcp", "ucx"))
    parser.add_argument("--hub", required=True)
    parser.add_argument("--workers", required=True)
    parser.add_argument("--models", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    ground = Ground(args.hub, tuple(args.workers.split(",")))
    models = [Path(model) for model in args.models.split(",")]
    cluster = Cluster(ground, args.folder, models, args.transport, args.scenario == BOTH)
    try:
        cluster.settled()
        report = asyncio.run(weather(cluster, args.scenario, args.requests, args.seed))
    finally:
        cluster.stop()
    print(json.dumps(asdict(report)))  # noqa: T201


if __name__ == "__main__":
    main()
