"""Weights in fewer bytes in a GPU's memory, compact and TCA-TBE, beside cuBLAS and the memory's limit.

    python -m benchmarks.weights_gpu [--shape qwen3-8b] [--skip-steps] [--out FOLDER]

Correctness first: the weight that comes back and every product are compared with torch's, bit for bit; nothing is
timed where one bit differs, nor where a model held so draws another token than the plain one. Products: layer shapes
of 8B- and 70B-class models with weights from a normal distribution, enough copies that none stays in the L2 cache,
captured into CUDA graphs, plain and other forms in turns, medians. cuBLAS is timed as torch uses it by default, and
with the tokens and the settings that the engine gives it (at least 32 tokens, sums not split). Steps: an engine of a
model with random weights, plain and in each form, one after the other. Results go to benchmarks/results as JSON and
Markdown.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch.nn.functional import linear, pad

from benchmarks.engine_parts import SPARE_TOKENS, Bench, Case
from benchmarks.facts import RESULTS, facts_of, hardware, paragraph
from benchmarks.shapes import SHAPES, card_of, write_shape
from kvrail.codec.compact import gpu as compact_gpu
from kvrail.codec.compact.format import CompactWeight
from kvrail.codec.compact.torch_ops import compress as compact
from kvrail.codec.papers.tbe import cpu as tbe_cpu
from kvrail.codec.papers.tbe import gpu as tbe_gpu
from kvrail.codec.papers.tbe.format import TbeWeight
from kvrail.engine.batch.batch import SampleRow, SequenceSlice
from kvrail.engine.model.loader import LoadedModel, load_model
from kvrail.engine.sampling.sampler import Sampler
from kvrail.engine.step.invariance import choose_products
from kvrail.values.sampling import SamplingParams
from kvrail.worker.weights import METHODS, hold

LAYERS = {
    "8B query, key, value": (6144, 4096),
    "8B attention's output": (4096, 4096),
    "8B gate and up": (24576, 4096),
    "8B down": (4096, 12288),
    "8B head": (151936, 4096),
    "70B query, key, value": (10240, 8192),
    "70B attention's output": (8192, 8192),
    "70B gate and up": (57344, 8192),
    "70B down": (8192, 28672),
}
"""Rows and columns; projections of one input joined, as the engine has them."""
TOKENS = (1, 4, 8, 16, 32, 64)
DECODES = (1, 4, 8, 16, 32)
CONTEXT, NEW_TOKENS = 128, 48
PREFILLS = (512, 2048)
COPIES_BYTES = 400 << 20

Held = CompactWeight | TbeWeight
FORMS: dict[str, tuple[Callable, Callable, Callable]] = {
    "compact": (compact, compact_gpu.multiply, compact_gpu.unpack),
    "tbe": (lambda weight: tbe_cpu.compress(weight).to(weight.device), tbe_gpu.multiply, tbe_gpu.unpack),
}
"""A weight to the form, a product with it, and the weight back."""


def graph_of(run: Callable[[int], object], count: int) -> torch.cuda.CUDAGraph:
    """`run(0)` to `run(count - 1)`, captured."""
    for number in range(min(count, 3)):
        run(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            run(number)
    return graph


def in_turns(graphs: dict[str, torch.cuda.CUDAGraph], count: int, rounds: int) -> dict[str, float]:
    """Microseconds of one run of each, the median of the rounds."""
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds + 1):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken[name].append(1e3 * begin.elapsed_time(end) / count)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def copy_of(held: Held) -> Held:
    """A copy in memory of its own."""
    parts = {field.name: getattr(held, field.name) for field in fields(held)}
    return replace(held, **{name: part.clone() for name, part in parts.items() if isinstance(part, torch.Tensor)})


def memory_gb_per_s(rounds: int) -> float:
    """What memory gives to a copy of 1 GiB, bytes read and written."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    taken = in_turns({"copy": graph_of(lambda _: target.copy_(source), 4)}, 4, rounds)["copy"]
    return 2 * source.nbytes / taken / 1e3


def layer(name: str, rows: int, columns: int, rounds: int) -> list[dict[str, object]]:
    """Rows of the table of products for one weight."""
    torch.manual_seed(0)
    weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02
    count = max(4, min(16, COPIES_BYTES // weight.nbytes + 1))
    plains = [weight, *(weight.clone() for _ in range(count - 1))]
    found: list[dict[str, object]] = []
    copies: dict[str, list[Held]] = {}
    for form, (compress, _, unpack) in FORMS.items():
        begin = time.perf_counter()
        held = compress(weight)
        torch.cuda.synchronize()
        compressed = weight.nbytes / (time.perf_counter() - begin) / 1e9
        if not torch.equal(unpack(held).view(torch.int16), weight.view(torch.int16)):
            raise RuntimeError(f"{name}: the weight that comes back from {form} differs")
        copies[form] = [held, *(copy_of(held) for _ in range(count - 1))]
        graph = graph_of(lambda i, form=form, unpack=unpack: unpack(copies[form][i]), count)
        taken = in_turns({"unpack": graph}, count, rounds)["unpack"]
        found.append(
            {
                "layer": name,
                "shape": [rows, columns],
                "form": form,
                "bytes": held.nbytes,
                "size": held.nbytes / weight.nbytes,
                "compress_gb_per_s": compressed,
                "unpack_gb_per_s": weight.nbytes / taken / 1e3,
            }
        )
    for tokens in TOKENS:
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        padded = pad(x, (0, 0, 0, max(0, 32 - tokens)))
        choose_products(invariant=True)
        graphs = {"engine": graph_of(lambda i, x=padded: linear(x, plains[i]), count)}
        for form, (_, multiply, _) in FORMS.items():
            if not torch.equal(multiply(x, copies[form][0]), linear(padded, weight)[:tokens]):
                raise RuntimeError(f"{name}, {tokens} tokens: the product of {form} differs from cuBLASLt's")
            graphs[form] = graph_of(lambda i, x=x, form=form, by=multiply: by(x, copies[form][i]), count)
        choose_products(invariant=False)
        graphs["default"] = graph_of(lambda i, x=x: linear(x, plains[i]), count)
        found.append({"layer": name, "shape": [rows, columns], "tokens": tokens} | in_turns(graphs, count, rounds))
    return found


def bench_of(loaded: LoadedModel) -> Bench:
    room = max(DECODES) * (CONTEXT + 2 * SPARE_TOKENS) + 2 * max(PREFILLS)
    made = Bench(
        loaded,
        max_tokens=room,
        max_running=max(DECODES),
        max_batch_tokens=max(PREFILLS),
        graphs=True,
        compile=True,
    )
    made.runner.warm_up()
    if not made.runner.finding.holds:
        raise RuntimeError(f"tokens depend on their company: {made.runner.finding.reason}")
    return made


def tokens_of(bench: Bench, batch: int) -> list[list[int]]:
    """Greedy continuations of prompts that are computed together."""
    random.seed(batch)
    sampler = Sampler(bench.loaded.vocab_size, bench.loaded.device)
    greedy = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    case = Case(batch, CONTEXT)
    tables, prompts = bench.tables(case, CONTEXT + NEW_TOKENS), bench.prompts(case)
    prefilled = [
        bench.runner.execute([SequenceSlice(p, 0, t, 1)]).clone() for p, t in zip(prompts, tables, strict=True)
    ]
    logits = torch.cat(prefilled)
    drawn: list[list[int]] = [[] for _ in prompts]
    for step in range(NEW_TOKENS):
        at = CONTEXT + step
        rows = [SampleRow(greedy, 0, at, (), ()) for _ in prompts]
        tokens = [each.token_id for each in sampler.sample(logits, rows)]
        for own, token in zip(drawn, tokens, strict=True):
            own.append(token)
        slices = [SequenceSlice([token], at, table, 1) for token, table in zip(tokens, tables, strict=True)]
        logits = bench.runner.execute(slices)
    return drawn


def steps_of(form: str, shape: str, rounds: int) -> dict[str, object]:
    """Memory, numerics, drawn tokens and milliseconds of a model's steps with its weights in one form."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(write_shape(shape, Path(scratch) / shape))
        free = torch.cuda.mem_get_info()[0]
        loaded = load_model(folder, device="cuda", dtype="auto", kv_dtype="bfloat16", page_size=64, load_format="dummy")
    if form != "plain":
        loaded = hold(loaded, METHODS[form], join=True)
    torch.cuda.empty_cache()
    taken = free - torch.cuda.mem_get_info()[0]
    bench = bench_of(loaded)
    drawn = {batch: tokens_of(bench, batch) for batch in DECODES}

    def milliseconds(run: Callable[[], float]) -> float:
        return 1e3 * statistics.median(run() for _ in range(rounds))

    times = {
        f"decode, {batch} sequences": milliseconds(lambda batch=batch: bench.decode_engine(Case(batch, CONTEXT), 24))
        for batch in DECODES
    }
    for length in PREFILLS:
        times[f"prefill of {length} tokens"] = milliseconds(lambda length=length: bench.prefill_engine(Case(1, length)))
    return {
        "bytes": taken,
        "page_bytes": loaded.layout.page_bytes,
        "numerics": bench.runner.finding.numerics,
        "tokens": drawn,
        "milliseconds": times,
    }


def steps(shape: str, rounds: int) -> list[dict[str, object]]:
    """Rows of the table of steps; each form in a process of its own, for compiled layers are the process's."""
    found = {}
    for form in ("plain", *FORMS):
        command = [sys.executable, "-m", "benchmarks.weights_gpu", "--steps-of", form, "--shape", shape]
        printed = subprocess.run([*command, "--rounds", str(rounds)], check=True, stdout=subprocess.PIPE).stdout
        found[form] = json.loads(printed.splitlines()[-1])
    plain = found["plain"]
    rows: list[dict[str, object]] = []
    for form in FORMS:
        for name in ("numerics", "tokens"):
            if plain[name] != found[form][name]:
                raise RuntimeError(f"the {name} of a model held as {form} are not the plain one's")
        saved = plain["bytes"] - found[form]["bytes"]
        rows.append(
            {
                "form": form,
                "plain_gib": plain["bytes"] / 2**30,
                "held_gib": found[form]["bytes"] / 2**30,
                "more_pages_of_64_tokens": int(0.85 * saved / plain["page_bytes"]),
                "equal_tokens": sum(len(own) for drawn in plain["tokens"].values() for own in drawn),
            }
        )
    for name in plain["milliseconds"]:
        rows.append({"step": name} | {form: found[form]["milliseconds"][name] for form in ("plain", *FORMS)})
    return rows


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table."""
    return ["", *(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])]


def markdown(facts: dict[str, str], shape: str, memory: float, products: list[dict], stepped: list[dict]) -> str:
    """The results file."""
    sizes = [row for row in products if "form" in row]
    held = {(row["layer"], row["form"]): row["bytes"] for row in sizes}
    lines = [f"# Weights in a GPU's memory, {facts['date']}", "", paragraph(facts)]
    lines += [
        "Microseconds of a product, medians in turns; bits compared first. `cuBLAS`: torch's default; `engine`: sums"
        " not split, at least 32 tokens, as the engine has it; in brackets cuBLAS's time over the form's. The last"
        f" columns: what reading the weight alone takes at the {memory:,.0f} GB/s that memory gives to a copy."
    ]
    rows = []
    for row in (row for row in products if "tokens" in row):
        bf16 = 2 * row["shape"][0] * row["shape"][1]
        times = [f"{row[form]:.1f} ({row['default'] / row[form]:.2f})" for form in FORMS]
        least = [f"{read / memory / 1e3:.1f}" for read in (bf16, *(held[row["layer"], form] for form in FORMS))]
        rows.append([row["layer"], str(row["tokens"]), f"{row['default']:.1f}", f"{row['engine']:.1f}", *times, *least])
    heads = ["layer", "tokens", "cuBLAS", "engine", *FORMS, *(f"reading {name}" for name in ("bfloat16", *FORMS))]
    lines += table(heads, rows)
    lines += table(
        ["layer", "shape", "form", "size of bfloat16", "compressed, GB/s", "unpacked, GB/s of bfloat16"],
        [
            [row["layer"], str(row["shape"]), row["form"], f"{row['size']:.4f}"]
            + [f"{row[name]:,.2f}" for name in ("compress_gb_per_s", "unpack_gb_per_s")]
            for row in sizes
        ],
    )
    for row in (row for row in stepped if "form" in row):
        lines += [
            "",
            f"{shape} in memory: {row['plain_gib']:.2f} GiB plain, {row['held_gib']:.2f} as {row['form']}"
            f" ({row['held_gib'] / row['plain_gib']:.3f}); room for {row['more_pages_of_64_tokens']:,} more"
            f" pages of 64 tokens. {row['equal_tokens']:,} tokens drawn with either are equal.",
        ]
    if stepped:
        lines += ["", "Steps through the engine, milliseconds, over the plain one's in brackets."]
        lines += table(
            ["step", "plain", *FORMS],
            [
                [row["step"], f"{row['plain']:.2f}", *(f"{row[f]:.2f} ({row[f] / row['plain']:.3f})" for f in FORMS)]
                for row in stepped
                if "step" in row
            ],
        )
    return "\n".join(lines) + "\n"


def write(
    arguments: argparse.Namespace, facts: dict[str, str], memory: float, products: list[dict], stepped: list[dict]
) -> None:
    """Print the tables, and keep them with the numbers."""
    text = markdown(facts, arguments.shape, memory, products, stepped)
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"weights-gpu-{facts['date']}-{card_of(torch.cuda.get_device_name())}"
    found = {**facts, "memory_gb_per_s": memory, "products": products, "steps": stepped}
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="qwen3-8b", help="of the model whose steps are timed"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps-of", choices=("plain", *FORMS), help="time one form's steps and print them as JSON")
    parser.add_argument("--skip-steps", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    facts = facts_of("benchmarks.weights_gpu", hardware("cuda"))
    torch.set_grad_enabled(False)
    if arguments.steps_of:
        print(json.dumps(steps_of(arguments.steps_of, arguments.shape, arguments.rounds)))
        return
    memory = memory_gb_per_s(arguments.rounds)
    products: list[dict] = []
    for name, (rows, columns) in LAYERS.items():
        products += layer(name, rows, columns, arguments.rounds)
        torch.cuda.empty_cache()
    write(arguments, facts, memory, products, [])  # kept, should a model's steps not come to their end
    if not arguments.skip_steps:
        write(arguments, facts, memory, products, steps(arguments.shape, min(arguments.rounds, 3)))


if __name__ == "__main__":
    main()
