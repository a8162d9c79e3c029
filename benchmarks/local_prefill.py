"""Short prompts: computed by the decode worker up to a fixed number of tokens, or as measured (--local-prefill-tokens).

    python -m benchmarks.local_prefill

Starts `kvrail up` with the demo model on this machine, once for each setting, all at the same time: what else the
machine does, it does to all of them. A closed loop keeps some streams open; prompts of 16 to 400 tokens, each new, in
rows that are repeated too.
Correctness first: the same tokens come whatever the setting.
"""

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.facts import say
from benchmarks.local_cluster import MODEL, local_cluster
from benchmarks.serving import ask
from kvrail.runtime import loops
from kvrail.tools.bench.answers import Answer
from kvrail.tools.bench.client import Client
from kvrail.tools.bench.report import P99, latencies

TOKENS = 24


async def loop(url: str, row: int, streams: int, count: int) -> list[Answer]:
    """`count` answers, `streams` at a time. row: of the table, each with prompts of its own."""
    waiting = list(range(count))
    answers: dict[int, Answer] = {}
    client = Client(url)

    async def one() -> None:
        while waiting:
            number = waiting.pop(0)
            draw = random.Random(f"{row} {number}")
            prompt = draw.choices(range(300, 4000), k=round(16 * 25 ** draw.random()))
            answers[number] = await ask(client, MODEL, prompt, TOKENS)

    await asyncio.gather(*(one() for _ in range(streams)))
    client.close()
    return [answers[number] for number in range(count)]


async def compared(settings: Sequence[str], streams: Sequence[int], count: int) -> None:
    """A row for each number of streams and each setting."""
    with ExitStack() as stack:
        flags = [("--local-prefill-tokens", setting) for setting in settings]
        urls = [stack.enter_context(local_cluster(*each)).url for each in flags]
        await asyncio.gather(*(loop(url, -1, 2, 12) for url in urls))  # both ways are measured, once they can be
        for row, number in enumerate(streams):
            found = await asyncio.gather(*(loop(url, row, number, count) for url in urls))
            for setting, answers in zip(settings, found, strict=True):
                if [answer.text for answer in answers] != [answer.text for answer in found[0]]:
                    raise SystemExit(f"with {setting} and {number} streams other answers came")
                times = latencies(answers)
                shown = [of(times[kind]) for kind in ("ttft", "itl") for of in (statistics.mean, P99)]
                cells = " | ".join(f"{1e3 * seconds:.1f}" for seconds in shown)
                print(f"| {setting} | {number} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default="64,-1")
    parser.add_argument("--streams", default="1,4,16,1,4,16")
    parser.add_argument("--requests", type=int, default=40, help="for each number of streams")
    arguments = parser.parse_args()
    say("benchmarks.local_prefill")
    print("| local tokens | streams | TTFT mean ms | TTFT p99 | ITL mean | ITL p99 |\n|---|---|---|---|---|---|")
    streams = [int(each) for each in arguments.streams.split(",")]
    loops.run(compared(arguments.settings.split(","), streams, arguments.requests))


if __name__ == "__main__":
    main()
