"""Workers of both roles beside fixed splits, under a load that steps from prefill-heavy to decode-heavy and back.

    python -m benchmarks.simulator.roles                 100 workers, phases of 60 s
    python -m benchmarks.simulator.roles --workers 16

Goodput is the share of requests that keep both limits: the time to the first token, and the mean time between tokens.
It is counted for arrivals after the first --settle-s seconds of a phase. Splits that cannot keep up with a phase are
left out of it.
"""

import argparse
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from statistics import mean, pstdev

from benchmarks.facts import say
from benchmarks.simulator.cluster import MAX_RUNNING, PREFILL_WAIT_S, Simulation
from benchmarks.simulator.workers import Job, SimBoth, Speed
from kvrail.services.router.fleet.ways import APART, Slo
from kvrail.tools.bench.trace import Request

PAGES = 20_000


@dataclass(frozen=True, slots=True)
class Phase:
    """A load: requests a second for each worker, tokens of prompts and of output."""

    name: str
    rate: float
    prompt_tokens: int
    output_tokens: int


PREFILL_HEAVY = Phase("prefill-heavy", 7.0, 4000, 60)
DECODE_HEAVY = Phase("decode-heavy", 11.0, 300, 500)


def phases(parts: Iterable[Phase], workers: int, seconds: float, seed: int = 0) -> list[Request]:
    """Poisson arrivals, one phase after the other; lengths vary by a half to either side."""
    draws, requests, now = random.Random(seed), list[Request](), 0.0
    for number, part in enumerate(parts):
        end = (number + 1) * seconds
        while (now := now + draws.expovariate(part.rate * workers)) < end:
            lengths = [round(mean * draws.uniform(0.5, 1.5)) for mean in (part.prompt_tokens, part.output_tokens)]
            requests.append(Request(now, *lengths, key=str(draws.randrange(64))))
        now = end
    return requests


class RolesSimulation(Simulation):
    """Workers that can do both. prefill: how many only prefill, the others only decode; None: all do both."""

    def __init__(
        self,
        workers: int,
        prefill: int | None = None,
        *,
        speed: Speed | None = None,
        max_running: int = MAX_RUNNING,
        prefill_wait_s: float = PREFILL_WAIT_S,
    ) -> None:
        super().__init__(
            "prefix-aware", 0, pages=PAGES, prefill_wait_s=prefill_wait_s, speed=speed, max_running=max_running
        )
        made = [SimBoth(f"w{number}", *self._kind) for number in range(workers)]
        self._prefill = {each.name: each for each in (made if prefill is None else made[:prefill])}
        self._decode = {each.name: each for each in (made if prefill is None else made[prefill:])}


def keeps(job: Job, slo: Slo) -> bool:
    """Whether a request kept both limits."""
    gap_s = (job.end - job.first_token) / max(1, job.output - 1)
    return job.first_token - job.arrival <= slo.ttft_s and gap_s <= slo.gap_s


def goodput(jobs: Sequence[Job], begin: float, end: float, slo: Slo | None = None) -> float:
    """The share of requests that kept the limits, of those that came from `begin` to `end`."""
    limits = slo or Slo()
    came = [keeps(job, limits) for job in jobs if begin <= job.arrival < end]
    return sum(came) / len(came)


def settled_s(jobs: Sequence[Job], begin: float, end: float, least: float, window_s: float = 3.0) -> float:
    """Seconds from `begin` until every later window has at least this goodput."""
    windows = [begin + number * window_s for number in range(int((end - begin) / window_s))]
    late = [each for each in windows if goodput(jobs, each, each + window_s) < least]
    return max(late, default=begin - window_s) + window_s - begin


def turns(ways: Sequence[tuple[float, str, str]], begin: float, end: float, window_s: float = 1.0) -> list[float]:
    """The share of prompts that were computed apart, by window."""
    counts: dict[int, list[bool]] = {}
    for when, way, _ in ways:
        if begin <= when < end:
            counts.setdefault(int(when / window_s), []).append(way == APART)
    return [sum(each) / len(each) for _, each in sorted(counts.items())]


def sustains(step: Phase, share: float, speed: Speed | None = None) -> bool:
    """Whether workers keep up with a phase if this share of them prefill. If not, queues grow without end."""
    speed = speed or Speed()
    full_s = speed.step_s + MAX_RUNNING * speed.each_s
    decodes = step.rate * step.output_tokens * full_s <= MAX_RUNNING * (1 - share)
    return decodes and step.rate * step.prompt_tokens * speed.prefill_s <= share


def _both(workers: int, steps: Sequence[Phase], seconds: float) -> tuple[list[Job], list[tuple[float, str, str]]]:
    simulation = RolesSimulation(workers)
    return simulation.run(phases(steps, workers, seconds)).jobs, simulation.ways


def _fixed(workers: int, share: float, step: Phase, seconds: float, settle_s: float) -> float:
    jobs = RolesSimulation(workers, round(share * workers)).run(phases([step], workers, seconds)).jobs
    return goodput(jobs, settle_s, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--phase-s", type=float, default=60.0)
    parser.add_argument("--settle-s", type=float, default=30.0)
    parser.add_argument("--splits", default="0.2,0.3,0.4,0.5,0.6,0.7,0.8", help="shares of workers that prefill")
    arguments = parser.parse_args()
    say("benchmarks.simulator.roles")
    count, seconds, settle_s = arguments.workers, arguments.phase_s, arguments.settle_s
    steps = (PREFILL_HEAVY, DECODE_HEAVY, PREFILL_HEAVY)
    splits = [float(share) for share in arguments.splits.split(",")]
    if unserved := [step.name for step in dict.fromkeys(steps) if not any(sustains(step, share) for share in splits)]:
        parser.error(f"--splits has none that serves {' or '.join(unserved)}")
    with ProcessPoolExecutor() as pool:
        both = pool.submit(_both, count, steps, seconds)
        fixed = {
            (step, share): pool.submit(_fixed, count, share, step, seconds, settle_s)
            for step in dict.fromkeys(steps)
            for share in splits
            if sustains(step, share)
        }
        jobs, ways = both.result()
        alone = {which: each.result() for which, each in fixed.items()}
    heads = "phase", "requests/s", "both roles", "95 % of the best split after", "computed apart (sd)", "best split"
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for number, step in enumerate(steps):
        begin, end = number * seconds + settle_s, (number + 1) * seconds
        shares = turns(ways, begin, end)
        best, most = max(((share, each) for (of, share), each in alone.items() if of == step), key=itemgetter(1))
        after = settled_s(jobs, number * seconds, end, 0.95 * most)
        print(f"| {step.name} | {step.rate * count:.0f} | {goodput(jobs, begin, end):.1%} | {after:.0f} s", end=" | ")
        print(f"{mean(shares):.0%} ({pstdev(shares):.2f})", end=" | ")
        print(f"{most:.1%} ({best:.0%} prefill) |", flush=True)


if __name__ == "__main__":
    main()
