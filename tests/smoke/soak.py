"""`make soak`: random traffic on small pools for minutes. Each answer is that of the request alone, nothing grows.

Clients send requests of a crowd (mix.py) in any order, so that prompts are cached, preempted and computed again. One in
four leaves in the middle. At the end no page is held, and all processes have the memory of the first quarter's end.
"""

import argparse
import asyncio
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from tests.smoke.cases import BOTH, CASES, SMALL_POOL_GIB, Case
from tests.smoke.client import Answer, FailedRequestError, ask, difference
from tests.smoke.mix import Asked, crowd
from tests.smoke.models import write_model
from tests.smoke.run import REQUEST_S, cluster

POOL = ("--kv-memory-gib", str(float(SMALL_POOL_GIB) / 2), "--max-model-len", "1024")
KINDS = (
    Case("plain pages", "llama", POOL),
    *(
        replace(case, architecture="llama", flags=(*case.flags[:2], *POOL))
        for case in CASES
        if case.name in ("lossless pages", "int4 pages", "kvcomp pages", "rot3 pages")
    ),
    Case("int8 pages, workers of both roles", "llama", ("--kv-cache", "int8", *BOTH, *POOL)),
)
REQUESTS, LONGEST, LONGER = 48, 700, 8
COUNTED = {
    "preemptions": "kvrail_engine_preemptions_total",
    "prompt tokens cached": "kvrail_engine_prefix_cache_hit_tokens_total",
    "drafts": "kvrail_engine_drafts_proposed_total",
    "closed pages": "kvrail_engine_closed_pages",
}
LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=1)
"""A connection is not used again when the router may just be closing it."""
GROWTH, GROWTH_BYTES = 1.1, 64 << 20
"""What the memory of all processes may grow by behind the first quarter: caches of an allocator settle late."""


@dataclass(slots=True)
class Soak:
    """What came of one kind of pages.

    bytes: of all processes, after a quarter of the time and at the end. counts: of COUNTED, over all workers.
    """

    case: str
    requests: int = 0
    left: int = 0
    bytes: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


async def soak(case: Case, model: Path, args: argparse.Namespace) -> Soak:
    """Run one kind; whatever goes wrong is in its faults."""
    found = Soak(case.name)
    try:
        async with (
            cluster(case, model, args.device, found.faults) as (url, pid),
            httpx.AsyncClient(base_url=url, timeout=REQUEST_S, limits=LIMITS) as client,
        ):
            asked = [_longer(each) for each in crowd(REQUESTS, args.seed, LONGEST)]
            alone = [await ask(client, each) for each in asked]
            until = time.monotonic() + args.seconds
            draws = random.Random(args.seed)
            clients = [_client(client, asked, alone, draws, until, found) for _ in range(args.clients)]
            await asyncio.gather(_weigh(pid, args.seconds / 4, found), *clients)
            found.faults += await _held(client)
            await _weigh(pid, 0, found)
            found.counts = await _counts(client)
    except (RuntimeError, FailedRequestError, TimeoutError) as error:
        found.faults.append(f"{type(error).__name__}: {error}")
    if len(found.bytes) > 1 and found.bytes[1] > GROWTH * found.bytes[0] + GROWTH_BYTES:
        found.faults.append(f"memory grew from {found.bytes[0] >> 20} to {found.bytes[1] >> 20} MiB")
    return found


def _longer(asked: Asked) -> Asked:
    """With more output, so that sequences outgrow the pool; its client stays."""
    return replace(asked, body={**asked.body, "max_tokens": LONGER * asked.body["max_tokens"]}, leaves=0)


async def _client(
    client: httpx.AsyncClient,
    asked: Sequence[Asked],
    alone: Sequence[Answer | None],
    draws: random.Random,
    until: float,
    found: Soak,
) -> None:
    """One request after the other, until then or until much has failed."""
    while time.monotonic() < until and len(found.faults) < 20:
        number = draws.randrange(len(asked))
        each, expected = asked[number], alone[number]
        if each.body["stream"] and draws.random() < 0.25:
            each = replace(each, leaves=draws.randint(1, 12))
        found.requests += 1
        try:
            answer = await ask(client, each)
        except FailedRequestError as error:
            found.faults.append(f"{each.kind}: {error}")
            continue
        if answer is None:
            found.left += 1
        elif expected is not None and (differs := difference(answer, expected)) is not None:
            found.faults.append(f"{each.kind}, {len(each.body['prompt'])} tokens: in company and alone: {differs}")


async def _held(client: httpx.AsyncClient) -> list[str]:
    """What workers still hold once all clients are gone."""
    for _ in range(100):
        health = (await client.get("/health")).json()
        workers = {
            address: worker
            for role in ("decode_workers", "prefill_workers", "workers")
            for address, worker in (health.get(role) or {}).items()
        }
        held = [
            f"{address} holds pages or requests: {worker}"
            for address, worker in workers.items()
            if worker["running"] + worker["waiting"]
            or worker["pages_free"] + worker["pages_cached"] != worker["pages_total"]
        ]
        if workers and not held:
            return []
        await asyncio.sleep(0.1)
    return held or ["no worker is known"]


async def _counts(client: httpx.AsyncClient) -> Counter[str]:
    counts: Counter[str] = Counter()
    for group in (await client.get("/metrics/targets")).json():
        for address in group["targets"]:
            text = (await client.get(f"http://{address}/metrics")).text
            for name, metric in COUNTED.items():
                counts[name] += sum(int(float(each)) for each in re.findall(rf"^{metric}(?:{{.*}})? (\S+)", text, re.M))
    return counts


async def _weigh(pid: int, after_s: float, found: Soak) -> None:
    await asyncio.sleep(after_s)
    found.bytes.append(_resident_bytes(pid))


def _resident_bytes(pid: int) -> int:
    """Of a process and its children."""
    status = Path(f"/proc/{pid}/statm").read_text().split()
    children = (child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split())
    return int(status[1]) * 4096 + sum(_resident_bytes(int(child)) for child in children)


async def run_all(args: argparse.Namespace) -> list[Soak]:
    """All kinds, side by side."""
    with tempfile.TemporaryDirectory() as scratch:
        cases = [case for case in KINDS if any(part in case.name for part in args.cases.split(","))]
        models = [write_model(case.architecture, Path(scratch, str(n), "model")) for n, case in enumerate(cases)]
        return await asyncio.gather(*(soak(*each, args) for each in zip(cases, models, strict=True)))


def main() -> int:
    """Returns 1 where anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=32, help="at once, for each kind of pages")
    parser.add_argument("--cases", default="", help="only kinds whose name has this in it; with commas: any of these")
    parser.add_argument("--seed", type=int, default=1)
    found = asyncio.run(run_all(parser.parse_args()))
    for each in found:
        memory = " and ".join(f"{size >> 20:,}" for size in each.bytes)
        said = "; ".join(fault[:400] for fault in each.faults[:5]) or "ok"
        counts = ", ".join(f"{count:,} {name}" for name, count in each.counts.items())
        sys.stdout.write(f"{each.case}: {each.requests} requests, {each.left} left, {counts}, {memory} MiB: {said}\n")
    return any(each.faults for each in found)


if __name__ == "__main__":
    sys.exit(main())
