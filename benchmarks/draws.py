"""Draws of tokens as a captured step makes them: microseconds, on a GPU.

    python -m benchmarks.draws [--rows 1,32,64,256] [--vocab 151936] [--programs 264]

Each kind of request, as many of it as there are rows, and all kinds in turn. Tokens of 16 rows must be the CPU's.
Logits are random, three times a standard normal; launches are captured. --programs: among which rows are shared out.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import cycle, islice

import torch

from benchmarks.engine_attention import captured_s
from benchmarks.facts import say
from kvrail.engine.sampling.draw import DrawParams, draw_on_cpu, draw_words
from kvrail.engine.sampling.sampling_kernels import PROGRAMS, begin_draw, launch_draw

KINDS = {
    "greedy": (0.0, 0, 1.0),
    "temperature 1": (1.0, 0, 1.0),
    "top_p 0.95": (1.0, 0, 0.95),
    "top_k 20": (1.0, 20, 1.0),
    "0.6, top_k 20, top_p 0.95": (0.6, 20, 0.95),
}
"""temperature, top_k, top_p"""
_LAUNCHES = 20


def params_of(kinds: Sequence[str], rows: int) -> list[DrawParams]:
    """Parameters of each row, its kind being the next of `kinds`."""
    found = []
    for number, kind in enumerate(islice(cycle(kinds), rows)):
        temperature, top_k, top_p = KINDS[kind]
        key = (77 * number + 1, 991 * number + 3) if temperature else (0, 0)
        found.append(DrawParams(temperature, top_k, float(torch.tensor(top_p)), -math.inf, key))
    return found


def microseconds(logits: torch.Tensor, params: Sequence[DrawParams], programs: int) -> float:
    """Median of captured launches."""
    words = torch.from_numpy(draw_words(params)).cuda()
    out = torch.empty(len(params), dtype=torch.int64, device="cuda")

    def run() -> None:
        for _ in range(_LAUNCHES):
            launch_draw(logits, words, out, programs)

    return 1e6 * captured_s(run) / _LAUNCHES


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,32,64,256", help="with commas")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--programs", type=int, default=PROGRAMS)
    args = parser.parse_args()
    say("benchmarks.draws", "cuda")
    sizes = list(map(int, args.rows.split(",")))
    logits = 3 * torch.randn(
        max(*sizes, 16), args.vocab, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )
    mixed = params_of([*KINDS], 16)
    if begin_draw(logits[:16], mixed).tolist() != draw_on_cpu(logits[:16].cpu(), mixed):
        raise SystemExit("the CPU draws other tokens")
    sys.stdout.write(f"us of a draw from rows of {args.vocab:,} logits\n\n")
    sys.stdout.write("| | " + " | ".join(f"{rows} rows" for rows in sizes) + " |\n" + "|---" * (1 + len(sizes)) + "|\n")
    for name, kinds in (*((kind, [kind]) for kind in KINDS), ("all of these", [*KINDS])):
        cells = [f"{microseconds(logits[:rows], params_of(kinds, rows), args.programs):.0f}" for rows in sizes]
        sys.stdout.write(f"| {name} | " + " | ".join(cells) + " |\n")


if __name__ == "__main__":
    main()
