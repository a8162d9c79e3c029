"""Overload of a whole cluster: who is lost, and how long others wait for one greedy client.

    python -m benchmarks.overload

Starts `kvrail up` with the demo model on this machine. First 600 requests at once through the official openai client as
it comes, two retries: each must be answered. Then one API key floods: a request of 128 prompts of 128 tokens each, and
as many sequences of one prompt; meanwhile another key asks one short question after the other. Correctness first: a
question's answer at temperature 0 must be the one that the idle cluster gave.
"""

import argparse
import asyncio
import math
import re
import statistics
import time
from collections import Counter
from typing import Any

import httpx
import openai

from benchmarks.facts import say
from benchmarks.local_cluster import MODEL, local_cluster
from kvrail.tools.bench.report import P99

QUESTION = {"model": MODEL, "prompt": "A socket is", "max_tokens": 8, "temperature": 0, "stream": True}


async def at_once(url: str, count: int, max_tokens: int) -> None:
    """Ask `count` questions at one moment, each its own."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="modest", timeout=600) as client:
        begin = time.perf_counter()
        asked = [
            client.completions.create(
                model=MODEL, prompt=f"{number} sockets are", max_tokens=max_tokens, extra_body={"ignore_eos": True}
            )
            for number in range(count)
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        seconds = time.perf_counter() - begin
    kinds = Counter(type(answer).__name__ for answer in answers)
    print(f"{count} at once, {max_tokens} tokens each: {dict(kinds)} in {seconds:.1f} s")
    if kinds.keys() != {"Completion"}:
        raise SystemExit("not every request was answered")


async def first_token(http: httpx.AsyncClient) -> tuple[float, str]:
    """Seconds to the first token of the question, and the answer."""
    begin, first, text = time.perf_counter(), 0.0, ""
    async with http.stream("POST", "/v1/completions", json=QUESTION) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - begin
                text += line
    return first, "".join(part.split('"text":"')[1].split('"')[0] for part in text.split("data: ")[1:])


async def ask_often(http: httpx.AsyncClient, count: int, right: str) -> list[float]:
    """Times to the first token of questions one after the other."""
    times = []
    for _ in range(count):
        first, answer = await first_token(http)
        if answer != right:
            raise RuntimeError(f"the answer was {answer!r}, not {right!r}")
        times.append(first)
    return times


def row_of(name: str, times: list[float]) -> str:
    """A row of the table."""
    shown = " | ".join(f"{1e3 * each:.0f}" for each in (statistics.median(times), P99(times), max(times)))
    return f"| {name} | {len(times)} | {shown} |"


async def longest_step(metrics: str, before: dict[float, float]) -> tuple[float, dict[float, float]]:
    """The bucket, in seconds, of the decode worker's longest step since `before`; and the buckets now."""
    async with httpx.AsyncClient() as http:
        text = (await http.get(metrics)).text
    found = re.findall(r'^kvrail_engine_step_seconds_bucket\{.*le="([^"]+)".*\} (\S+)$', text, re.MULTILINE)
    buckets = {float(bound): float(count) for bound, count in found}
    new = {bound: count - before.get(bound, 0.0) for bound, count in buckets.items()}
    return min(bound for bound, count in new.items() if count == new[math.inf]), buckets


async def queue_of(http: httpx.AsyncClient) -> str:
    """What the router says of its queue."""
    text = (await http.get("/metrics")).text
    return ", ".join(line for line in text.splitlines() if line.startswith(("kvrail_queue_prompts", "kvrail_queue_cl")))


async def flooded(url: str, body: dict[str, Any], count: int, right: str) -> tuple[list[float], str]:
    """Questions of one key while another one's flood is under way."""
    greedy = httpx.AsyncClient(base_url=url, timeout=None, headers={"Authorization": "Bearer greedy"})
    modest = httpx.AsyncClient(base_url=url, timeout=None, headers={"Authorization": "Bearer modest"})
    async with greedy, modest:
        flood = asyncio.create_task(greedy.post("/v1/completions", json={"model": MODEL, "ignore_eos": True} | body))
        await asyncio.sleep(1.0)
        times = await ask_often(modest, count, right)
        queue = await queue_of(modest)
        still = "still under way" if not flood.done() else f"over, {flood.result().status_code}"
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
        await asyncio.sleep(1.0)
    return times, f"{still}; {queue}"


async def main(arguments: argparse.Namespace) -> None:
    say("benchmarks.overload")
    with local_cluster("--api-keys", "greedy,modest", "--max-concurrent-requests", "16384") as cluster:
        url = cluster.url
        await at_once(url, 8, 8)
        await at_once(url, 600, arguments.tokens)
        headers = {"Authorization": "Bearer modest"}
        async with httpx.AsyncClient(base_url=url, timeout=None, headers=headers) as http:
            _, steps = await longest_step(cluster.metrics["decode-0"], {})
            right = (await first_token(http))[1]
            rows = [row_of("idle", await ask_often(http, arguments.questions, right)) + " |"]
        prompts = [f"{number} " + "The kernel copies the buffer. " * 20 for number in range(128)]
        floods = {
            "128 prompts of 128 tokens": {"prompt": prompts, "max_tokens": 128},
            "128 sequences of 128 tokens": {"prompt": "A kernel", "n": 128, "max_tokens": 128},
            "128 prompts of 64 sequences": {"prompt": prompts, "n": 64, "max_tokens": 128},
        }
        notes = []
        for name, body in floods.items():
            times, note = await flooded(url, body, arguments.questions, right)
            longest, steps = await longest_step(cluster.metrics["decode-0"], steps)
            rows.append(f"{row_of(name, times)} {1e3 * longest:.0f} |")
            notes.append(f"{name}: {note}")
    print("\n| beside | questions | p50 ms | p99 ms | longest ms | longest step below ms |\n|---|---|---|---|---|---|")
    print("\n".join([*rows, "", *notes]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each of the 600 answers")
    parser.add_argument("--questions", type=int, default=50, help="questions beside each flood")
    asyncio.run(main(parser.parse_args()))
