"""Speed of the engine on one device, beside what the device can do and what transformers' own batching does.

    python -m benchmarks.engine [--shape qwen3-8b | --model FOLDER] [--device cuda] [--peer] [--profile]

Correctness first: packed, chunked, captured steps are compared with the model's own dense forward pass; beyond a
relative difference of 0.1 nothing is timed, nor where a token's bits depend on its company. Then, each after a warm-up
and as medians: decode steps and prefills of the runner (model and sampler), the same through the engine (scheduling,
text-less output), and, with --peer, a workload of prompts and continuations beside `generate_batch` of transformers in
the same run. With --compare-invariant a second engine in the same run computes as it likes (--invariant off), in turns
with the first. --attention adds attention by itself, --profile the kernels of one decode step by time. Results go to
benchmarks/results as JSON and Markdown.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers

from benchmarks.engine_attention import attention_alone
from benchmarks.engine_parts import SPARE_TOKENS, Bench, Case, Measurement, measure_ceilings, profile_step
from benchmarks.facts import RESULTS, facts_of, hardware
from benchmarks.peers import generate_batch_seconds
from benchmarks.shapes import SHAPES, card_of, write_shape
from kvrail.engine.model.loader import LoadedModel, load_model

DECODES = "1x128,1x2048,8x128,8x2048,32x128,32x2048,64x128,64x2048"
PREFILLS = "1x2048,1x8000,8x2048,32x1024"
WORKLOAD = "32x1024"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.split("\n", 1)[0])
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b", help="random weights of this shape")
    source.add_argument("--model", help="model folder; its weights are random too, only its shape counts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--decode", default=DECODES, help="batch x context, comma-separated; empty: none")
    parser.add_argument("--prefill", default=PREFILLS, help="prompts x tokens, comma-separated; empty: none")
    parser.add_argument("--workload", default=WORKLOAD, help="prompts x tokens of the comparison with --peer")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens continued in the comparison")
    parser.add_argument("--steps", type=int, default=24, help="decode steps that are timed")
    parser.add_argument("--peer", action="store_true", help="run transformers' generate_batch too")
    parser.add_argument("--compare-invariant", action="store_true", help="time an engine with --invariant off beside")
    parser.add_argument("--attention", action="store_true", help="time one layer's attention by itself")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a decode step")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def pairs(text: str) -> list[tuple[int, int]]:
    """'8x128,1x2048' as [(8, 128), (1, 2048)]."""
    return [(int(a), int(b)) for a, b in (entry.split("x") for entry in text.split(",") if entry)]


def load(options: argparse.Namespace, folder: Path) -> LoadedModel:
    return load_model(
        str(folder),
        device=options.device,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        page_size=options.page_size,
        load_format="dummy",
    )


def measure(options: argparse.Namespace, folder: Path) -> Iterator[Measurement]:
    begin = time.perf_counter()
    loaded = load(options, folder)
    yield Measurement("load the model", time.perf_counter() - begin, "s")
    decodes, prefills = ([Case(*pair) for pair in pairs(text)] for text in (options.decode, options.prefill))
    work = pairs(options.workload)[0]
    profiled = [Case(1, 128), Case(64, 2048)] if options.profile else []
    bench = make_bench(options, loaded, [*decodes, *prefills, *profiled, Case(*work)], invariant=True)
    yield from warm_up(bench)
    yield from measure_ceilings(loaded.device)
    benches = [bench]
    if options.compare_invariant:
        benches.append(make_bench(options, loaded, [*decodes, *prefills], invariant=False))
        benches[1].runner.warm_up()
    for each in benches:
        each.fill_pages()
    for case in decodes:
        yield from in_turns("runner", case, benches, lambda each, case=case: each.decode_runner(case, options.steps))
        yield Measurement(f"decode {case}, engine", bench.decode_engine(case, options.steps) * 1e3, "ms a step")
    for case in prefills:
        yield from in_turns("runner", case, benches, lambda each, case=case: each.prefill_runner(case), prefill=True)
        yield Measurement(f"prefill {case}, engine", case.tokens / bench.prefill_engine(case), "tokens/s")
    if options.attention:
        yield from attention_alone(bench, decodes, prefills)
    if options.peer:
        yield from compare(options, bench, Case(*work), folder)
    if options.profile:
        for case in profiled:
            print(profile_step(bench, case, options.out))
        print(profile_step(bench, Case(1, 2048), options.out, prefill=True))


def warm_up(bench: Bench) -> Iterator[Measurement]:
    """Make an engine ready and try whether it computes what it should; ends the program where it does not."""
    reference = bench.dense_logits()
    begin = time.perf_counter()
    bench.runner.warm_up()
    yield Measurement("warm up", time.perf_counter() - begin, "s")
    for name, error in bench.gate(reference).items():
        yield Measurement(f"gate: {name}", error, "relative difference")
        if not error < 0.1:
            raise SystemExit(f"the gate failed: {name} differs by {error:.3g}; nothing was timed")
    if not bench.runner.finding.holds:
        raise SystemExit(f"the gate failed: {bench.runner.finding.reason}; nothing was timed")


def make_bench(options: argparse.Namespace, loaded: LoadedModel, cases: list[Case], *, invariant: bool) -> Bench:
    """An engine with room for any of `cases`, not warmed up yet."""
    grown = max(options.steps, options.new_tokens) + SPARE_TOKENS
    return Bench(
        loaded,
        max_tokens=max(case.batch * (case.length + grown) for case in cases),
        max_running=max([case.batch for case in cases] + [64]),
        max_batch_tokens=options.max_batch_tokens,
        graphs=not options.no_graphs,
        compile=not options.no_compile,
        invariant=invariant,
    )


def in_turns(
    what: str, case: Case, benches: list[Bench], run: Callable[[Bench], float], *, prefill: bool = False
) -> Iterator[Measurement]:
    """Seconds of `run` on each of `benches`, the median of several turns where there are two."""
    turns = [[run(bench) for bench in benches] for _ in range(1 if len(benches) == 1 else 3)]
    seconds = [statistics.median(each) for each in zip(*turns, strict=True)]
    kind = "prefill" if prefill else "decode"
    for number, taken in enumerate(seconds):
        name = f"{kind} {case}, {what}{', not invariant' if number else ''}"
        if prefill:
            yield Measurement(name, case.tokens / taken, "tokens/s")
        else:
            yield Measurement(name, taken * 1e3, "ms a step")
    if len(seconds) > 1:
        yield Measurement(f"{kind} {case}, time of invariant over not invariant", seconds[0] / seconds[1], "")


def compare(options: argparse.Namespace, bench: Bench, case: Case, folder: Path) -> Iterator[Measurement]:
    """The same prompts through our engine and through generate_batch.

    With one new token each, prefill is all there is; what more tokens take beyond that is decoding.
    """
    lengths = [1, options.new_tokens]
    ours = [statistics.median(bench.workload(case, length) for _ in range(3)) for length in lengths]
    theirs = generate_batch_seconds(folder, bench.loaded, bench.prompts(case), lengths)
    rates = {"engine": ours, "generate_batch": theirs}
    for name, (first, whole) in rates.items():
        yield Measurement(f"{case} prompts, prefill, {name}", case.tokens / first, "tokens/s")
        steps = options.new_tokens - 1
        yield Measurement(f"{case} prompts, decode, {name}", (whole - first) / steps * 1e3, "ms a step")
        made = case.batch * options.new_tokens
        yield Measurement(f"{case} prompts, {options.new_tokens} new each, {name}", made / whole, "new tokens/s")
    yield Measurement("prefill, engine over generate_batch", theirs[0] / ours[0], "times")
    yield Measurement("decode, engine over generate_batch", (theirs[1] - theirs[0]) / (ours[1] - ours[0]), "times")
    yield Measurement("in all, engine over generate_batch", theirs[1] / ours[1], "times")


def report(options: argparse.Namespace, facts: dict[str, str], found: list[Measurement]) -> None:
    """Write JSON and Markdown. facts: taken at the start."""
    head = {**facts, "transformers": transformers.__version__, "model": options.model or options.shape}
    cuda = torch.device(options.device).type == "cuda"
    kind = card_of(torch.cuda.get_device_name(options.device)) if cuda else "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"engine-{facts['date']}-{kind}"
    rows = [{"name": m.name, "value": m.value, "unit": m.unit} for m in found]
    stem.with_suffix(".json").write_text(json.dumps({**head, "measurements": rows}, indent=2) + "\n")
    lines = ["# Engine benchmark", ""] + [f"- {key}: `{value}`" for key, value in head.items()]
    lines += ["", "| measurement | value | unit |", "|---|---|---|"]
    lines += [f"| {m.name} | {m.value:,.4g} | {m.unit} |" for m in found]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main(argv: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if argv is None else argv)
    facts = facts_of("benchmarks.engine", hardware(options.device))
    random.seed(0)
    found: list[Measurement] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.model) if options.model else write_shape(options.shape, Path(scratch) / options.shape)
        for measurement in measure(options, folder):
            found.append(measurement)
            print(f"{measurement.name:70s} {measurement.value:12,.4g} {measurement.unit}", flush=True)
    report(options, facts, found)


if __name__ == "__main__":
    main()
