"""Compares the router's policies on traces of requests, on a simulated clock.

    python -m benchmarks.simulator                                    the two traces of docs/scheduling.md, 8 workers
    python -m benchmarks.simulator --workers 1000 --requests 10000
    python -m benchmarks.simulator --trace mine.jsonl --workers 16    your own trace: see docs/scheduling.md
    python -m benchmarks.simulator --write traces/                    the two traces as files

There are as many decode workers as prefill workers. Queue, policies, page index and prefix cache are the code that
serves. Time is simulated: a prefill worker computes one prompt after another at a fixed rate, and a decode step
takes longer with more sequences. --load is the rate of prompt tokens as a share of what the prefill workers could
compute without any cache.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.facts import say
from benchmarks.simulator.cluster import PREFILL_WAIT_S, Outcome, Simulation
from benchmarks.simulator.trace import Shape, generate, write_trace
from benchmarks.simulator.workers import Speed
from kvrail.services.router.fleet.policy import POLICIES
from kvrail.tools.bench.trace import Request, read_trace

HEADER = (
    "| policy | TTFT mean ms | p50 | p99 | tokens/s | cache hits | imbalance | of decode workers | to round-robin |"
)


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each policy."""
    reference = next((each.mean for each in outcomes if each.policy == "round-robin"), 0.0)
    rows = [HEADER, "|---" * 9 + "|"]
    for each in outcomes:
        change = f"{each.mean / reference - 1:+.1%}" if reference else ""
        times = " | ".join(f"{1e3 * seconds:.1f}" for seconds in (each.mean, each.quantile(0.5), each.quantile(0.99)))
        rates = f"{each.tokens_per_s:,.0f} | {each.hit_rate:.1%} | {each.imbalance:.2f} | {each.helped}"
        rows.append(f"| {each.policy} | {times} | {rates} | {change} |")
    return "\n".join(rows)


def traces(arguments: argparse.Namespace) -> dict[str, list[Request]]:
    """What to compare on, by name."""
    if arguments.trace:
        return {path.name: read_trace(path) for path in arguments.trace}
    tokens_per_s = arguments.workers / Speed().prefill_s
    rate = arguments.load * tokens_per_s / 2200
    shapes = {
        "80 % of requests begin with one of 200 prefixes of 2,000 tokens": Shape(arguments.requests, rate),
        "nothing shared, prompts as long": Shape(arguments.requests, rate, share=0.0),
    }
    return {name: list(generate(shape)) for name, shape in shapes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8, help="prefill workers, and as many decode workers")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--load", type=float, default=0.7, help="share of the prefill workers' rate, caches left out")
    parser.add_argument("--pages", type=int, default=5300, help="pages of 64 tokens a worker: its prefix cache")
    parser.add_argument("--prefill-wait-s", type=float, default=PREFILL_WAIT_S, help="as the router's; 0: any time")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--trace", type=Path, nargs="*", help="files of traces")
    parser.add_argument("--write", type=Path, help="a folder to write the traces to, instead of simulating")
    arguments = parser.parse_args()
    say("benchmarks.simulator")
    for number, (name, trace) in enumerate(traces(arguments).items()):
        if arguments.write:
            arguments.write.mkdir(parents=True, exist_ok=True)
            write_trace(arguments.write / f"trace-{number}.jsonl", trace)
            continue
        begin, outcomes = time.perf_counter(), []
        for policy in arguments.policies.split(","):
            simulation = Simulation(
                policy, arguments.workers, pages=arguments.pages, prefill_wait_s=arguments.prefill_wait_s
            )
            outcomes.append(simulation.run(trace))
        print(f"\n{name}: {len(trace):,} requests, {arguments.workers} + {arguments.workers} workers of", end=" ")
        print(f"{arguments.pages:,} pages, load {arguments.load:g} ({time.perf_counter() - begin:.0f} s)\n")
        print(table(outcomes))


if __name__ == "__main__":
    main()
