"""What a scrape of the router's /metrics costs, HTTP included, while streams run through it.

    python -m benchmarks.scrape [--streams 50] [--step-ms 20] [--scrape-ms 50] [--rounds 8] [--seconds 5]

A stub worker gives each stream a token a step (benchmarks/token_path.py); the router's CPU time is taken in windows
with scrapes and without, in turns, and the difference is divided by the number of scrapes. Correctness first: each
scrape must have more tokens than the last.
"""

import argparse
import asyncio
import multiprocessing
import re
import statistics
import time
import urllib.request

import psutil

from benchmarks.token_path import Reader, cpu_of, process, router

GENERATED = re.compile(rb"^kvrail_generation_tokens_total\S* (\S+)$", re.MULTILINE)


def read_streams(port: int, streams: int, tokens: int) -> None:
    """Read answers to their end, one for each stream."""

    async def read() -> None:
        loop = asyncio.get_running_loop()
        pairs = [await loop.create_connection(lambda: Reader(port, tokens), "127.0.0.1", port) for _ in range(streams)]
        await asyncio.gather(*(reader.done for _, reader in pairs))

    asyncio.run(read())


def generated(port: int) -> float:
    """Scrape; gives the tokens that the router has counted."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        found = GENERATED.search(answer.read())
    if found is None:
        raise RuntimeError("/metrics does not say how many tokens were generated")
    return float(found[1])


def window(routing: psutil.Process, port: int, seconds: float, scrape_s: float) -> tuple[float, float]:
    """CPU seconds of the router, and scrapes, for each second of such a window; scrape_s 0: none."""
    before, begin, scrapes, tokens = cpu_of(routing), time.perf_counter(), 0, -1.0
    while time.perf_counter() - begin < seconds:
        if scrape_s:
            last, tokens = tokens, generated(port)
            scrapes += 1
            if tokens <= last:
                raise RuntimeError(f"two scrapes in a row say that {tokens:.0f} tokens were generated")
        time.sleep(scrape_s or seconds)
    passed = time.perf_counter() - begin
    return (cpu_of(routing) - before) / passed, scrapes / passed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=50, help="streams at once")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a step in milliseconds")
    parser.add_argument("--scrape-ms", type=float, default=50.0, help="milliseconds between scrapes")
    parser.add_argument("--rounds", type=int, default=8, help="windows of each kind")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a window")
    asked = parser.parse_args()
    tokens = int((2 * asked.rounds + 4) * asked.seconds * 1e3 / asked.step_ms)
    with process("worker", step_ms=asked.step_ms) as (_, worker_port), router(worker_port) as (routing, port):
        reading = multiprocessing.Process(target=read_streams, args=(port, asked.streams, tokens), daemon=True)
        reading.start()
        time.sleep(asked.seconds)
        costs = []
        for _ in range(asked.rounds):
            still, _ = window(routing, port, asked.seconds, 0)
            busy, rate = window(routing, port, asked.seconds, asked.scrape_ms / 1e3)
            costs.append((busy - still) / rate * 1e3)
        reading.terminate()
        reading.join()
    shown = ", ".join(f"{cost:.2f}" for cost in costs)
    print(f"a scrape costs {statistics.median(costs):.2f} ms of the router's CPU (median of {shown})")


if __name__ == "__main__":
    main()
