"""Two workers as a pair, as two whole workers and as two of both roles, under loads as a benchmark of GPUs has them.

    python -m benchmarks.simulator.layouts [--speed h200] [--streams 1,32,64x4000/64] [--rounds 10] [--rate 28,36,44]

Closed streams: 1,024 tokens in and 128 out, or as a row says, one row after the other on the same workers, each with
this many rounds; a stream asks again when its request has ended. Poisson arrivals: 512 to 1,536 tokens in and 64 to 192
out, for a minute; what keeps 300 ms to the first token and 15 ms a token, of those that came after the first quarter.
"""

import argparse
import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from benchmarks.facts import say
from benchmarks.simulator.cluster import PREFILL_WAIT_S
from benchmarks.simulator.roles import RolesSimulation, goodput, turns
from benchmarks.simulator.workers import Job, Speed
from kvrail.services.router.fleet.ways import Slo
from kvrail.tools.bench.trace import Request

SPEEDS = {
    "h200": Speed(prefill_s=25.6e-6, attend_s=2.5e-9, step_s=4.95e-3, each_s=4e-5, mixed=0.79),
    "h100": Speed(prefill_s=27.5e-6, attend_s=2.5e-9, step_s=6.6e-3, each_s=5e-5),
}
"""Qwen3-8B's shape. benchmarks/results: roles-2026-11-29-2xh200.md, roles-2026-11-28-2xh100.md; prompts of the H200:
what a prefill worker did that sent them, roles-2026-11-30-2xh200.md."""
LAYOUTS = {"pair": 1, "two whole": 0, "both roles": None}
"""How many of two workers only prefill; none of both roles: either may."""
PROMPT, OUTPUT = 1024, 128
POISSON_S = 60.0
BETWEEN_S = 1.0
"""From the end of a row to the next."""


class Layout:
    """Two workers, and the requests that they have been asked."""

    def __init__(self, name: str, speed: Speed, prefill_wait_s: float = PREFILL_WAIT_S) -> None:
        self.simulation = RolesSimulation(2, LAYOUTS[name], speed=speed, max_running=256, prefill_wait_s=prefill_wait_s)
        self.jobs: list[Job] = []

    def ask(self, when: float, prompt: int, output: int) -> None:
        """Let a request arrive then; to the router all are one client's, as a benchmark's are."""
        self.jobs.append(self.simulation.ask(Request(when, prompt, output), len(self.jobs)))

    def closed(self, rows: Sequence[tuple[int, int, int]], rounds: int) -> list[list[Job]]:
        """The requests of each row, one after the other; rows: streams, tokens in and out."""
        begun, left, alive = [0], 0, 0
        lengths: list[int] = []

        def begin(when: float) -> None:
            nonlocal left, alive, lengths
            streams, *lengths = rows[len(begun) - 1]
            left, alive = streams * (rounds - 1), streams
            for stream in range(streams):
                self.ask(when + 1e-5 * stream, *lengths)

        def on_end(job: Job) -> None:
            nonlocal left, alive
            if left:
                left -= 1
                self.ask(job.end + 1e-3, *lengths)
                return
            alive -= 1
            if not alive:
                begun.append(len(self.jobs))
                if len(begun) <= len(rows):
                    begin(job.end + BETWEEN_S)

        self.simulation.on_end = on_end
        begin(0.0)
        self.simulation.finish()
        return [self.jobs[start:end] for start, end in pairwise(begun)]

    def poisson(self, rate: float) -> list[Job]:
        """Requests at random times."""
        draws, now = random.Random(1), 0.0
        while (now := now + draws.expovariate(rate)) < POISSON_S:
            self.ask(now, draws.randrange(512, 1537), draws.randrange(64, 193))
        self.simulation.finish()
        return self.jobs

    def figures(self, jobs: Sequence[Job]) -> tuple[float, float, float, float]:
        """Requests/s, medians of TTFT and TPOT in ms, and the share of prompts that crossed, with both roles."""
        begin, end = min(job.arrival for job in jobs), max(job.end for job in jobs)
        ttft = median(job.first_token - job.arrival for job in jobs)
        tpot = median((job.end - job.first_token) / (job.output - 1) for job in jobs)
        crossed = turns(self.simulation.ways, begin, end, window_s=end)
        return len(jobs) / (end - begin), 1e3 * ttft, 1e3 * tpot, crossed[0] if crossed else 0.0


def row_of(text: str) -> tuple[int, int, int]:
    """Streams, tokens in and out: 64, 8x8000 or 64x256/512."""
    streams, _, lengths = text.partition("x")
    prompt, _, output = lengths.partition("/")
    return int(streams), int(prompt or PROMPT), int(output or OUTPUT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", choices=SPEEDS, default="h200")
    parser.add_argument("--streams", default="8,16,32,64,128")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rate", default="24,28,32,36,40,44,48")
    parser.add_argument("--prefill-wait-s", type=float, default=PREFILL_WAIT_S, help="as the router's")
    arguments = parser.parse_args()
    say("benchmarks.simulator.layouts")
    made = {name: (SPEEDS[arguments.speed], arguments.prefill_wait_s) for name in LAYOUTS}
    streams = [row_of(text) for text in arguments.streams.split(",")]
    print("requests/s; TTFT, TPOT medians in ms; share that crossed")
    heads = "\n| {} | " + " | ".join(LAYOUTS) + " |\n" + "|---" * 4 + "|"
    print(heads.format("closed streams"))
    rows = {
        name: (layout := Layout(name, *how), layout.closed(streams, arguments.rounds)) for name, how in made.items()
    }
    for number, text in enumerate(arguments.streams.split(",")):
        found = (layout.figures(jobs[number]) for layout, jobs in rows.values())
        print(f"| {text} |", " | ".join("{:.1f}; {:.0f}, {:.1f}; {:.2f}".format(*each) for each in found), "|")
    print(heads.format("requests/s, at random"))
    for rate in map(float, arguments.rate.split(",")):
        cells = []
        for name, how in made.items():
            layout = Layout(name, *how)
            late = [job for job in layout.poisson(rate) if job.arrival >= POISSON_S / 4]
            kept = goodput(late, 0, POISSON_S, Slo(0.3, 0.015))
            cells.append("{:.1%} kept; {:.0f}, {:.1f}; {:.2f}".format(kept, *layout.figures(late)[1:]))
        print(f"| {rate:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
