"""Short prompts: computed by the decode worker up to a fixed number of tokens, or as measured (--local-prefill-tokens).

    python -m benchmarks.local_prefill

Starts `kvrail up` with the demo model on this machine for each setting in turn. A closed loop keeps so many streams
open; prompts of 16 to 400 tokens, each new. Correctness first: the same tokens come whatever the setting.
"""

import argparse
import asyncio
import random
import statistics

import httpx

from benchmarks.local_cluster import MODEL, local_cluster
from benchmarks.serving import Stream, ask

TOKENS = 24


async def loop(url: str, streams: int, count: int) -> list[Stream]:
    """`count` answers, so many at a time."""
    waiting = list(range(count))
    answers: dict[int, Stream] = {}
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:

        async def one() -> None:
            while waiting:
                number = waiting.pop(0)
                draw = random.Random(f"{streams} {number}")
                prompt = draw.choices(range(300, 4000), k=round(16 * 25 ** draw.random()))
                answers[number] = await ask(client, MODEL, prompt, TOKENS)

        await asyncio.gather(*(one() for _ in range(streams)))
    return [answers[number] for number in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default="64,-1,0,-1,64")
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--requests", type=int, default=40, help="for each number of streams")
    arguments = parser.parse_args()
    print("| local tokens | streams | TTFT mean ms | TTFT p99 | gap mean | gap p99 |\n|---|---|---|---|---|---|")
    texts: dict[int, list[str]] = {}
    for setting in arguments.settings.split(","):
        with local_cluster("--local-prefill-tokens", setting) as cluster:
            asyncio.run(loop(cluster.url, 2, 12))  # both ways are measured, once they can be
            for streams in map(int, arguments.streams.split(",")):
                answers = asyncio.run(loop(cluster.url, streams, arguments.requests))
                if texts.setdefault(streams, [a.text for a in answers]) != [a.text for a in answers]:
                    raise SystemExit(f"with {setting} and {streams} streams other answers came")
                firsts = sorted(answer.first_token for answer in answers)
                gaps = sorted(gap for answer in answers for gap in answer.gaps)
                shown = [statistics.mean(firsts), firsts[round(0.99 * (len(firsts) - 1))]]
                shown += [statistics.mean(gaps), gaps[round(0.99 * (len(gaps) - 1))]]
                row = " | ".join(f"{1e3 * seconds:.1f}" for seconds in shown)
                print(f"| {setting} | {streams} | {row} |", flush=True)


if __name__ == "__main__":
    main()
