"""Latency, throughput and goodput of a whole cluster, as a client sees it, through router, prefill and decode workers.

    python -m benchmarks.serving --shape qwen3-8b --device cuda --streams 1,32
    python -m benchmarks.serving --shape qwen3-8b --device cuda --loads field --sampling sampled
    python -m benchmarks.serving --url http://127.0.0.1:8000 --model kvrail-demo --prompt-tokens 256
    python -m benchmarks.serving --shape qwen3-8b --trace conversation_trace.jsonl --speed 0.5,1 --longest 32768

With --shape it starts `kvrail up` with random weights of that shape, otherwise it asks the cluster at --url. The client
is that of `kvrail bench` (docs/benchmarking.md has what each figure means). Each row has prompts of its own, so that a
prefix cache helps only where a load shares prefixes. Correctness first: a repeated request must have the same output,
and each stream must bring as many tokens as asked for.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.facts import facts_of, output_of
from benchmarks.shapes import SHAPES, write_shape
from kvrail.cli.bench import add_load, add_trace, count, load_of, rate, tokens
from kvrail.errors import ConfigError
from kvrail.runtime import loops
from kvrail.tools.bench.answers import Answer, read
from kvrail.tools.bench.client import Client
from kvrail.tools.bench.load import SAMPLING, Load, Range, completion, requests_of
from kvrail.tools.bench.report import figures
from kvrail.tools.bench.run import measure

SHORT = {"prompt": Range(512, 1536), "output": Range(64, 192)}
FIELD: Sequence[dict[str, Any]] = (
    {**SHORT, "rate": 16.0, "requests": 240},
    {**SHORT, "rate": 24.0, "requests": 320},
    {**SHORT, "rate": 32.0, "requests": 320},
    {
        "prompt": Range(256, 256),
        "output": Range(128, 128),
        "prefixes": 8,
        "prefix_tokens": 3072,
        "rate": 16.0,
        "requests": 192,
    },
    {"prompt": Range(2400, 9600), "output": Range(102, 410), "rate": 3.0, "requests": 60},
)
"""Loads as the field makes them: open arrivals, mixed lengths, shared prefixes, long prompts."""
LIMITS = (("ttft", 300.0), ("tpot", 15.0))
COLUMNS = {
    "load": "load",
    "completed": "succeeded",
    "failed": "failed",
    "request_throughput": "requests/s",
    "request_goodput": "goodput/s",
    "output_throughput": "output tokens/s",
    "median_ttft_ms": "TTFT ms",
    "p99_ttft_ms": "TTFT p99",
    "median_tpot_ms": "TPOT ms",
    "median_itl_ms": "ITL ms",
    "p99_itl_ms": "ITL p99",
    "max_itl_ms": "ITL max",
    "median_first_gap_ms": "first gap ms",
    "median_e2el_ms": "E2EL ms",
}


def samplings(text: str) -> list[str]:
    """Keys of SAMPLING, with commas."""
    found = text.split(",")
    if unknown := set(found) - SAMPLING.keys():
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose of {', '.join(SAMPLING)}")
    return found


async def ask(
    client: Client, model: str, prompt: Sequence[int], max_tokens: int, *, sampling: str = "greedy"
) -> Answer:
    """One completion. Raises RuntimeError where it fails."""
    request = completion(model, prompt, max_tokens, seed=1, sampling=sampling)
    found = read(await client.ask(request.body), max_tokens)
    if not isinstance(found, Answer):
        raise RuntimeError(f"{found.kind}: {found.message}")
    return found


async def check(client: Client, model: str, load: Load) -> None:
    """The gate: the same request twice has the same output, however it is sampled; it also warms up every worker."""
    prompt = json.loads(next(requests_of(load, model)).body)["prompt"]
    for sampling in SAMPLING:
        first, second = [(await ask(client, model, prompt, 16, sampling=sampling)).text for _ in range(2)]
        if first != second:
            raise SystemExit(f"the same request gave {first!r} and {second!r}")
    client.close()


@contextmanager
def started(args: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """The cluster to measure: its address, its model's name and vocabulary."""
    if not args.shape:
        yield args.url, args.model, args.vocab
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_shape(args.shape, Path(scratch) / args.shape)
        url = f"http://127.0.0.1:{args.port}"
        command = [sys.executable, "-m", "kvrail", "up", "--model", str(folder), "--load-format", "dummy"]
        command += ["--device", args.device, "--port", str(args.port), *args.up]
        with Path(scratch, "log").open("w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                wait_healthy(url, process, log.name)
                yield url, args.shape, int(str(SHAPES[args.shape]["vocab_size"]))
            finally:
                process.terminate()
                process.wait(60)
                sys.stderr.write("".join(Path(log.name).read_text().splitlines(keepends=True)[-args.log_lines :]))


def wait_healthy(url: str, process: subprocess.Popen[bytes], log: str) -> None:
    """Wait until the router says ok, with every worker there; ends where the cluster does."""
    for _ in range(3000):
        if process.poll() is not None:
            raise SystemExit(f"the cluster ended:\n{Path(log).read_text()[-4000:]}")
        try:
            if httpx.get(f"{url}/health", timeout=2).json()["status"] == "ok":
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"the cluster is not healthy after 300 s:\n{Path(log).read_text()[-4000:]}")


def loads(args: argparse.Namespace, vocab: int) -> Iterator[Load]:
    """A load for each row, whose prompts no other row has."""
    if args.loads == "field":
        chosen = [load_of(args, **each) for each in FIELD]
    elif args.trace:
        whole = load_of(args)
        chosen = [replace(whole, speed=rate(each)) for each in (args.speed or "1").split(",")]
    elif args.rate:
        chosen = [load_of(args, rate=rate(each), requests=args.requests or 240) for each in args.rate.split(",")]
    else:
        chosen = [_closed(args, each) for each in args.streams.split(",")]
    for number, load in enumerate(chosen):
        for place, kind in enumerate(args.sampling):
            own = {"seed": load.seed + 1_000_000 * (1 + number * len(args.sampling) + place)}
            yield replace(load, vocab=vocab, sampling=kind, **own)


def _closed(args: argparse.Namespace, row: str) -> Load:
    """A closed loop: 8, or 8x8000 or 8x8000/64 for prompts and outputs of other lengths than the flags'."""
    streams, by, lengths = row.partition("x")
    texts = lengths.split("/", 1) if by else []
    own = {name: tokens(text) for name, text in zip(("prompt", "output"), texts, strict=False)}
    return load_of(args, streams=count(streams), requests=count(streams) * args.rounds, **own)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [
            f"{row[name]:.1f}" if isinstance(row[name], float) else "–" if row[name] is None else str(row[name])
            for name in COLUMNS
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def notes(rows: Sequence[dict[str, Any]]) -> str:
    """What a table has no room for: failures, cached tokens, what crossed, parts of a request."""
    lines = []
    for row in rows:
        for each in row["failures"]:
            lines.append(f"- {row['load']}: {each['count']} x {each['kind']}, for example: {each['example']}")
        lines += [f"- {row['load']}: warning: {each}" for each in row["warnings"]]
        parts = {name: round(value, 1) for name, value in row.get("stage_median_ms", {}).items()}
        lines.append(
            f"- {row['load']}: of {row['total_input_tokens']:,} prompt tokens {row['cached_input_tokens']:,} cached,"
            f" codecs {row.get('codecs', {})}, client {row['client_cpu_share']:.0%} of a core, median ms: {parts}"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), help="start a cluster with random weights of this shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="with --shape: where workers run")
    parser.add_argument("--port", type=int, default=8765, help="with --shape: the router's port")
    parser.add_argument("--up", nargs=argparse.REMAINDER, default=[], help="last: more flags of kvrail up")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="kvrail-demo")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--streams", default="1,8,32", help="numbers of streams, with commas; 8x8000/64: their lengths")
    kind.add_argument("--rate", help="requests a second as a Poisson process, with commas")
    kind.add_argument("--loads", choices=("field",), help="five loads as the field makes them, at 3 to 32 a second")
    add_trace(kind, parser)
    parser.add_argument("--speed", help="with --trace: how many times as fast, with commas (default 1)")
    parser.add_argument("--rounds", type=count, default=4, help="with --streams: requests of each stream")
    parser.add_argument(
        "--requests",
        type=count,
        help="with --rate: requests of each row (default 240); with --trace: the first N of it (default all)",
    )
    parser.add_argument(
        "--sampling", type=samplings, default="sampled,greedy", help=f"with commas, of {', '.join(SAMPLING)}"
    )
    parser.add_argument("--log-lines", type=int, default=5, help="lines of the cluster's log to show at the end")
    parser.add_argument("--out", type=Path, help="folder for the results")
    add_load(parser, vocab=8000)
    parser.set_defaults(goodput=LIMITS)
    args = parser.parse_args()
    if args.up and not args.shape:
        parser.error("--up needs --shape, for without it no cluster is started")
    return args


def machine_of(args: argparse.Namespace) -> str:
    """The hardware in words. GPUs are asked for by their own tool: a context of CUDA here would take their memory."""
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    if not args.shape:
        return f"the cluster at {args.url}; its client has {cores}"
    gpus = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") if args.device == "cuda" else []
    return "; ".join([*filter(None, [", ".join(gpus)]), cores])


def measured(args: argparse.Namespace, limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    """A row for each load, up to Ctrl-C."""
    with started(args) as (url, model, vocab):
        client = Client(url, timeout_s=args.timeout)
        rounds = list(loads(args, vocab))
        loops.run(check(client, model, replace(rounds[0], seed=args.seed)))
        for load in rounds:
            run = measure(client, load, model)
            yield {"load": str(load), "settings": load.settings(), **figures(run, limits)}
            if run.unfinished:
                return


def main() -> None:
    """Measure and print; with --out also write JSON and Markdown. The exit status is 1 if any request failed."""
    args = parse()
    facts, limits, rows = facts_of("benchmarks.serving", machine_of(args)), dict(args.goodput), []
    try:
        for row in measured(args, limits):
            rows.append(row)
            sys.stdout.write(f"{notes([row])}\n")
            sys.stdout.flush()
    except (ConfigError, argparse.ArgumentTypeError) as error:
        raise SystemExit(f"benchmarks.serving: {error}") from None
    within = " ".join(f"{name}:{limit:g}" for name, limit in limits.items())
    text = f"Goodput: requests/s within {within} (ms).\n\n{table(rows)}\n"
    sys.stdout.write(f"\n{text}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "serving.json").write_text(json.dumps({**facts, "goodput": limits, "rows": rows}, indent=1))
        head = "\n".join(f"- {name}: {value}" for name, value in facts.items())
        (args.out / "serving.md").write_text(f"# A cluster as a client sees it\n\n{head}\n\n{text}\n{notes(rows)}\n")
    if any(row["failed"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
