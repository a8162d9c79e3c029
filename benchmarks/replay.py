"""The simulator's two traces, scaled down, through a real cluster: do policies come out in the same order?

    python -m benchmarks.replay

Starts `kvrail up` with the demo model on this machine, 2 prefill and 2 decode workers, once for each policy, all at the
same time: each gets the same requests at the same moments, so whatever else the machine does, it does to all of them.
Prompts are random tokens; workers' caches hold half of the shared prefixes. Correctness first: the answers at
temperature 0 are the same under every policy.
"""

import argparse
import asyncio
import hashlib
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import httpx

from benchmarks.facts import say
from benchmarks.local_cluster import MODEL, local_cluster
from benchmarks.simulator.trace import Shape, generate
from kvrail.tools.bench.report import P99
from kvrail.tools.bench.trace import Request

FLAGS = ("--prefill-workers", "2", "--decode-workers", "2", "--page-size", "16")
PAGE_GIB = 2**-13
"""Memory of a page of the demo model."""
VOCABULARY = 4000


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a trace: seconds to first tokens, cached tokens of decode workers, a digest of all answers."""

    times: Sequence[float]
    cached: int
    answers: str


def prompt_of(request: Request, number: int) -> list[int]:
    """Token ids: the prefix's, then the request's own."""
    shared = random.Random(f"prefix {request.prefix}").choices(range(300, VOCABULARY), k=request.prefix_tokens)
    own = request.prompt_tokens - request.prefix_tokens
    return shared + random.Random(f"own {number}").choices(range(300, VOCABULARY), k=own)


async def ask(http: httpx.AsyncClient, request: Request, number: int) -> tuple[float, int, str]:
    """Seconds to the first token, the prompt's cached tokens, and the answer."""
    await asyncio.sleep(request.arrival)
    body = {
        "model": MODEL,
        "prompt": prompt_of(request, number),
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    begin = time.perf_counter()
    first, text, usage = 0.0, "", ""
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body | streamed) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - begin
                text += line.partition('"text":')[2].partition(',"')[0]
                usage = line
    return first, int(usage.partition('"cached_tokens":')[2].partition("}")[0]), text


async def replay(url: str, trace: Sequence[Request]) -> Result:
    """All of a trace, each request at its moment."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        for number in range(4):  # each worker has computed something
            await ask(http, Request(0.0, 200, 2), -1 - number)
        answers = await asyncio.gather(*(ask(http, request, number) for number, request in enumerate(trace)))
    digest = hashlib.sha256("\n".join(answer for _, _, answer in answers).encode()).hexdigest()
    return Result([first for first, _, _ in answers], sum(cached for _, cached, _ in answers), digest)


async def compared(policies: Sequence[str], trace: Sequence[Request], pages: int) -> dict[str, Result]:
    """The same trace through a cluster for each policy, at the same time."""
    with ExitStack() as stack:
        clusters = [
            stack.enter_context(local_cluster(*FLAGS, "--policy", policy, "--kv-memory-gib", str(pages * PAGE_GIB)))
            for policy in policies
        ]
        results = await asyncio.gather(*(replay(cluster.url, trace) for cluster in clusters))
    return dict(zip(policies, results, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="round-robin,prefix-aware")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, default=0.8, help="arrivals a second")
    parser.add_argument("--prefix-tokens", type=int, default=480)
    arguments = parser.parse_args()
    sizes = {"prefixes": 12, "prefix_tokens": arguments.prefix_tokens, "own_tokens": 30, "output_tokens": 4}
    pages = 16 + 12 * arguments.prefix_tokens // 16 // 2 + 4 * (arguments.prefix_tokens + 200) // 16
    say("benchmarks.replay")
    print("| trace | policy | TTFT mean ms | p50 | p99 | cached tokens |\n|---|---|---|---|---|---|")
    for name, share in (("shared prefixes", 0.8), ("nothing shared", 0.0)):
        trace = list(generate(Shape(arguments.requests, arguments.rate, share=share, **sizes)))
        results = asyncio.run(compared(arguments.policies.split(","), trace, pages))
        for policy, result in results.items():
            shown = (of(result.times) for of in (statistics.mean, statistics.median, P99))
            row = " | ".join(f"{1e3 * seconds:.0f}" for seconds in shown)
            print(f"| {name} | {policy} | {row} | {result.cached} |", flush=True)
        if len({result.answers for result in results.values()}) > 1:
            raise SystemExit(f"{name}: answers differ between policies")


if __name__ == "__main__":
    main()
