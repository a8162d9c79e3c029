"""What it costs that on a CPU a token's results do not depend on its company (docs/decisions/0008-batch-invariance.md).

    python -m benchmarks.batch_invariance [--contexts 100,4096] [--rounds 15]

Steps of the demo model, with rows and keys padded as the engine does it and without, in turn in one process; medians.
Correctness first: padded, the last of many tokens computed at once must have the logits that it has alone, to the bit.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from benchmarks import codec_report
from benchmarks.codec_data import DEMO
from benchmarks.codec_tables import Table
from kvrail.engine import inputs
from kvrail.engine.attention import cpu
from kvrail.engine.batch import SequenceSlice
from kvrail.engine.loader import LoadedModel, load_model
from kvrail.engine.runner import ModelRunner
from kvrail.tuning import tune_process

PAGE_SIZE, CHUNK = 64, 2048
MANY, SEQUENCES = 40, 8
STEPS = {"1 token": (1, 1), f"{SEQUENCES} sequences of 1 token": (1, SEQUENCES), f"{MANY} tokens": (MANY, 1)}
"""New tokens of a sequence, and sequences."""
WARM_UP = 2
GATE = "Padded, a token among others had the logits, bit for bit, that it has alone."


@contextmanager
def unpadded() -> Iterator[None]:
    """Rows and keys as many as there are."""
    with (
        mock.patch.object(cpu, "QUERY_ROWS", 1),
        mock.patch.object(inputs, "QUERY_ROWS", 1),
        mock.patch.object(cpu, "KEY_ROWS", 1),
    ):
        yield


def slices(context: int, tokens: int, sequences: int, pages: int) -> list[SequenceSlice]:
    """A step over sequences that each hold `context` tokens in `pages` pages of their own."""
    tables = [range(number * pages, (number + 1) * pages) for number in range(sequences)]
    return [SequenceSlice([7] * tokens, context, table, tokens) for table in tables]


def check(runner: ModelRunner, context: int, pages: int) -> None:
    """Raise SystemExit unless the last of MANY tokens has the same logits among them and after them."""
    together = runner.execute(slices(context, MANY, 1, pages))[-1].clone()
    alone = runner.execute([SequenceSlice([7], context + MANY - 1, range(pages), 1)])[0]
    if not torch.equal(together.view(torch.int32), alone.view(torch.int32)):
        raise SystemExit(f"a token {context} tokens on has other logits alone than among {MANY}; nothing was timed")


def seconds(call: Callable[[], object]) -> float:
    """Wall time of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(loaded: LoadedModel, context: int, rounds: int) -> list[list[str]]:
    """The rows of one length of context."""
    pages = loaded.layout.pages_for(context + MANY)
    runner = ModelRunner(loaded, SEQUENCES * pages, max_running=SEQUENCES, max_batch_tokens=CHUNK)
    for number in range(SEQUENCES):
        table = range(number * pages, (number + 1) * pages)
        for start in range(0, context, CHUNK):
            runner.execute([SequenceSlice([5] * min(CHUNK, context - start), start, table, 0)])
    check(runner, context, pages)
    rows = []
    for name, (tokens, sequences) in STEPS.items():
        step = slices(context, tokens, sequences, pages)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds + WARM_UP):
            with unpadded():
                times[0].append(seconds(lambda step=step: runner.execute(step)))
            times[1].append(seconds(lambda step=step: runner.execute(step)))
        plain, padded = (1e3 * statistics.median(each[WARM_UP:]) for each in times)
        rows.append([f"{context:,}", name, f"{plain:.1f}", f"{padded:.1f}", f"{padded / plain:.2f}"])
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batch_invariance", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--contexts", default="100,4096", help="tokens before the step, with commas")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind, padded and not")
    parser.add_argument("--out", type=Path, default=codec_report.RESULTS)
    options = parser.parse_args(argv)
    tune_process()
    facts = codec_report.head(torch.device("cpu"), "benchmarks.batch_invariance")
    loaded = load_model(
        str(DEMO), device="cpu", dtype="float32", kv_dtype="bfloat16", page_size=PAGE_SIZE, load_format="safetensors"
    )
    rows = [row for context in options.contexts.split(",") for row in measure(loaded, int(context), options.rounds)]
    header = ("tokens before", "step", "as they are, ms", "padded, ms", "padded over not")
    notes = f"Medians of {options.rounds} steps each, in turn; sequences of 1 token, or one of {MANY}."
    tables = [Table("Steps of the demo model", header, rows, notes)]
    text = codec_report.markdown(facts, "Batch invariance on a CPU", GATE, tables)
    codec_report.write(options.out, f"batch-invariance-{facts['date']}-cpu", facts, text, tables)
    print(text)


if __name__ == "__main__":
    main()
