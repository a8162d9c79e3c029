"""Steps of the demo model on a CPU, and what parts of their design bring (docs/decisions/0008, 0012 and 0013).

    python -m benchmarks.cpu_step [--contexts 100,4096] [--rounds 15]

Each step as the engine computes it and with one part of it undone, in turn in one process; medians. Correctness first:
the last of many tokens computed at once must have the logits that it has alone, to the bit, and those of torch's
attention, nearly.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention

import kvrail.engine.step.runner
from benchmarks import codec_report
from benchmarks.codec_data import DEMO
from benchmarks.codec_tables import Table
from kvrail.engine.attention import cpu, reference
from kvrail.engine.attention.meta import StepMeta
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.batch import inputs
from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.kv.formats import LayerPages
from kvrail.engine.model.loader import LoadedModel, load_model
from kvrail.engine.step.runner import ModelRunner
from kvrail.runtime.tuning import tune_process

PAGE_SIZE, CHUNK = 64, 2048
MANY, SEQUENCES = 40, 8
STEPS = {
    "1 token": (1, 1),
    f"{SEQUENCES} sequences of 1 token": (1, SEQUENCES),
    f"{MANY} tokens": (MANY, 1),
    f"{CHUNK:,} tokens": (CHUNK, 1),
}
"""New tokens of a sequence, and sequences."""
WARM_UP = 2
TOLERANCE = 1e-3
"""Of logits, in their norm: now and then rounding moves an element of a bfloat16 page by its last bit."""
GATE = "A token among others had the logits, bit for bit, that it has alone, and nearly those of torch's attention."


def torch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerPages,
    meta: StepMeta,
    options: ScoreOptions,
) -> torch.Tensor:
    """As attention.cpu, by torch's own attention over copies of the pages in float32."""
    reference.write_pages(layer, key[: len(meta.slots)], value[: len(meta.slots)], meta.slots.long())
    out, begin = torch.zeros(*query.shape[:2], value.shape[-1]), 0
    for row, (new, total) in enumerate(meta.plan):
        pages = meta.page_tables[row, : -(-total // layer.page_size)].long()
        k, v = (each[:total].transpose(0, 1)[None] for each in reference.read_pages(layer, pages, query.dtype))
        q = query[begin : begin + new].transpose(0, 1)[None]
        seen = None if new == 1 else reference.causal_mask(new, total, options.window)
        found = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=options.scale, enable_gqa=True)
        out[begin : begin + new] = found[0].transpose(0, 1)
        begin += new
    return out


VARIANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "as it is": contextlib.nullcontext,
    "torch's attention": lambda: mock.patch.object(cpu, "paged_attention", torch_attention),
    "all cores in every step": lambda: mock.patch.object(kvrail.engine.step.runner, "_PRODUCTS_FOR_ALL_CORES", 0),
    "rows not padded": lambda: mock.patch.object(inputs, "ROWS", 1),
}


def slices(context: int, tokens: int, sequences: int, pages: int) -> list[SequenceSlice]:
    """A step over sequences that each hold `context` tokens in `pages` pages of their own."""
    tables = [range(number * pages, (number + 1) * pages) for number in range(sequences)]
    return [SequenceSlice([7] * tokens, context, table, tokens) for table in tables]


def check(runner: ModelRunner, context: int, pages: int) -> None:
    """Raise SystemExit unless the last of MANY tokens has the same logits among them and after them."""
    together = runner.execute(slices(context, MANY, 1, pages))[-1].clone()
    last = [SequenceSlice([7], context + MANY - 1, range(pages), 1)]
    if not torch.equal(together.view(torch.int32), runner.execute(last)[0].view(torch.int32)):
        raise SystemExit(f"a token {context} tokens on has other logits alone than among {MANY}; nothing was timed")
    with VARIANTS["torch's attention"]():
        other = runner.execute(last)[0]
    error = float((other - together).norm() / together.norm())
    if error > TOLERANCE:
        raise SystemExit(f"{context} tokens on logits are {error:.1e} away from torch's attention's; nothing was timed")


def seconds(call: Callable[[], object]) -> float:
    """Wall time of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(loaded: LoadedModel, context: int, rounds: int) -> list[list[str]]:
    """The rows of one length of context."""
    pages = loaded.layout.pages_for(context + CHUNK)
    runner = ModelRunner(loaded, SEQUENCES * pages, max_running=SEQUENCES, max_batch_tokens=CHUNK)
    for number in range(SEQUENCES):
        table = range(number * pages, (number + 1) * pages)
        for start in range(0, context, CHUNK):
            runner.execute([SequenceSlice([5] * min(CHUNK, context - start), start, table, 0)])
    check(runner, context, pages)
    rows = []
    for name, (tokens, sequences) in STEPS.items():
        step = slices(context, tokens, sequences, pages)
        times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(rounds + WARM_UP):
            for variant, undone in VARIANTS.items():
                with undone():
                    times[variant].append(seconds(lambda step=step: runner.execute(step)))
        middle = [f"{1e3 * statistics.median(each[WARM_UP:]):.1f}" for each in times.values()]
        rows.append([f"{context:,}", name, *middle])
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_step", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--contexts", default="100,4096", help="tokens before the step, with commas")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind and variant")
    parser.add_argument("--out", type=Path, default=codec_report.RESULTS)
    options = parser.parse_args(argv)
    tune_process()
    facts = codec_report.head(torch.device("cpu"), "benchmarks.cpu_step")
    loaded = load_model(
        str(DEMO), device="cpu", dtype="float32", kv_dtype="bfloat16", page_size=PAGE_SIZE, load_format="safetensors"
    )
    rows = [row for context in options.contexts.split(",") for row in measure(loaded, int(context), options.rounds)]
    header = ("tokens before", "step", *(f"{variant}, ms" for variant in VARIANTS))
    notes = f"Medians of {options.rounds} steps each, in turn; sequences of 1 token, or one of {MANY} or {CHUNK:,}."
    tables = [Table("Steps of the demo model", header, rows, notes)]
    text = codec_report.markdown(facts, "A step on a CPU", GATE, tables)
    codec_report.write(options.out, f"cpu-step-{facts['date']}-cpu", facts, text, tables)
    print(text)


if __name__ == "__main__":
    main()
