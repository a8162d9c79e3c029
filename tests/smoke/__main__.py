"""`make gpu-smoke`: all cases, some at a time on each GPU; writes benchmarks/results/gpu-smoke.json.

`python -m tests.smoke --state` says in a line whether that result is green and of the code at hand.
"""

import argparse
import asyncio
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from kvrail.cli.cluster.gpus import visible_gpus
from tests.smoke.cases import CASES, Case
from tests.smoke.models import write_model
from tests.smoke.run import Outcome, run
from tests.smoke.state import RESULT, ROOT, state, trees


async def run_all(cases: list[Case], args: argparse.Namespace, ended: Callable[[Outcome], None]) -> None:
    """So many cases at a time on each GPU; each is told of when it ends."""
    turns: asyncio.Queue[str | None] = asyncio.Queue()
    for gpu in args.at_once * (visible_gpus() if args.device == "cuda" else [None]):
        turns.put_nowait(gpu)
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: write_model(name, Path(scratch, name, "model")) for name in {c.architecture for c in cases}}

        async def one(case: Case) -> Outcome:
            gpu = await turns.get()
            outcome = await run(case, folders[case.architecture], args.device, args.requests, args.longest, gpu)
            turns.put_nowait(gpu)
            said = "; ".join(fault[:400] for fault in outcome.faults[:3]) or "ok"
            told = f"{case.name}: {outcome.requests} requests, {outcome.crossed} crossed {outcome.codecs}"
            sys.stdout.write(f"{told}, {outcome.seconds} s: {said}\n")
            sys.stdout.flush()
            ended(outcome)

        await asyncio.gather(*map(one, cases))


def report(outcomes: list[Outcome], seconds: float, commit: str, kept: Sequence[Outcome] = ()) -> dict[str, object]:
    """What is written. kept: of an earlier run of the same code."""
    again = f", {len(outcomes)} of them run again" if kept else ""
    order = [case.name for case in CASES]
    outcomes = sorted([*kept, *outcomes], key=lambda outcome: order.index(outcome.case))
    green = [outcome.case for outcome in outcomes if not outcome.faults]
    requests = sum(outcome.requests for outcome in outcomes)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "card": card,
        "torch": torch.__version__,
        "commit": commit,
        "trees": trees(),
        "green": set(green) == {case.name for case in CASES},
        "summary": f"{len(green)} of {len(CASES)} cases green, {requests} requests, {seconds:.0f} s{again}",
        "cases": [asdict(outcome) for outcome in outcomes],
    }


def green_before(path: Path) -> list[Outcome]:
    """The green cases of the result at `path`. Raises ValueError where it is of other code."""
    found = json.loads(path.read_text())
    if found["trees"] != trees():
        raise ValueError(f"{path} is of other code than that at hand; run all cases")
    return [Outcome(**case) for case in found["cases"] if not case["faults"]]


def commit_at_hand() -> str:
    """The checkout's commit; empty outside of git."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def main() -> int:
    """Returns 1 where a case has faults, or with --state where not all are green by the code at hand."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", action="store_true", help="say of which code the result is; run nothing")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", default="", help="only cases whose name has this in it; with commas: any of these")
    parser.add_argument("--requests", type=int, default=60, help="at once, in each case")
    parser.add_argument("--longest", type=int, default=3000, help="tokens of a prompt at most")
    parser.add_argument("--at-once", type=int, default=5, help="clusters at a time on each GPU")
    parser.add_argument("--commit", default=commit_at_hand(), help="to write down; default: what git says")
    parser.add_argument("--again", type=Path, help="a result of this code: run only the cases that it lacks as green")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.state:
        green, line = state()
        sys.stdout.write(f"{line}\n")
        return not green
    wanted = args.cases.split(",")
    kept = green_before(args.again) if args.again else []
    done = {outcome.case for outcome in kept}
    cases = [case for case in CASES if case.name not in done and any(part in case.name for part in wanted)]
    begin, outcomes = time.monotonic(), list[Outcome]()

    def ended(outcome: Outcome) -> None:
        """Write down what there is: a run that is cut off can be gone on with, see --again."""
        outcomes.append(outcome)
        found = report(outcomes, time.monotonic() - begin, args.commit, kept)
        args.out.write_text(json.dumps(found, indent=1) + "\n")

    asyncio.run(run_all(cases[::-1], args, ended))  # forms of pages take longest
    faulty = sum(bool(outcome.faults) for outcome in outcomes)
    sys.stdout.write(f"{len(outcomes)} cases, {faulty} with faults, {time.monotonic() - begin:.0f} s\n")
    return bool(faulty)


if __name__ == "__main__":
    sys.exit(main())
