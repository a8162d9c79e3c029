"""Latency and throughput of a whole cluster, as a client sees them, through router, prefill and decode workers.

    python -m benchmarks.serving --shape qwen3-8b --device cuda --streams 1,32
    python -m benchmarks.serving --url http://127.0.0.1:8000 --model kvrail-demo --prompt-tokens 256

With --shape it starts `kvrail up` with random weights of that shape, otherwise it asks the cluster at --url. A closed
loop keeps so many streams open; every prompt is new, so that no prefix cache helps. Correctness first: a repeated
request must begin with the same token, and each stream must bring as many tokens as asked for.
"""

import argparse
import asyncio
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx

from benchmarks.shapes import SHAPES, write_shape


@dataclass(slots=True)
class Stream:
    """One answer: seconds from the request to its first token, and between its chunks."""

    first_token: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    text: str = ""
    stages: dict[str, float] = field(default_factory=dict)
    codec: str = ""


async def ask(client: httpx.AsyncClient, model: str, prompt: list[int], max_tokens: int) -> Stream:
    """Stream one completion."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    stream = Stream()
    last = begin = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            now = time.perf_counter()
            if chunk.get("usage"):
                stream.tokens = chunk["usage"]["completion_tokens"]
                told = chunk["usage"].get("kvrail", {})
                stream.stages, stream.codec = told.get("stage_seconds", {}), told.get("codec") or "none"
            elif chunk["choices"]:
                if not stream.first_token:
                    stream.first_token = now - begin
                else:
                    stream.gaps.append(now - last)
                last = now
                stream.text += chunk["choices"][0]["text"]
    if stream.tokens != max_tokens:
        raise RuntimeError(f"{stream.tokens} tokens came; {max_tokens} were asked for")
    return stream


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def measure(
    url: str, model: str, vocab: int, streams: int, prompt_tokens: int, args: argparse.Namespace
) -> dict[str, object]:
    """One row: `streams` at once until `rounds` times as many have been answered."""
    rng = random.Random(f"{streams} {prompt_tokens}")
    total = streams * args.rounds
    prompts = [[rng.randrange(vocab) for _ in range(prompt_tokens)] for _ in range(total)]
    gc.collect()
    gc.freeze()  # a collection that looks at all prompts would count as a gap in every stream
    limits = httpx.Limits(max_connections=streams + 8)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        todo = iter(prompts)
        done: list[Stream] = []

        async def worker() -> None:
            for prompt in todo:
                done.append(await ask(client, model, prompt, args.output_tokens))

        begin = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(streams)))
        seconds = time.perf_counter() - begin
    gaps = [gap for stream in done for gap in stream.gaps]
    per_token = [sum(stream.gaps) / (stream.tokens - 1) for stream in done]
    stages = {name for stream in done for name in stream.stages}
    return {
        "streams": streams,
        "prompt_tokens": prompt_tokens,
        "requests": total,
        "requests_per_s": total / seconds,
        "output_tokens_per_s": sum(stream.tokens for stream in done) / seconds,
        "ttft_median_ms": 1e3 * statistics.median(s.first_token for s in done),
        "ttft_p99_ms": 1e3 * percentile([s.first_token for s in done], 0.99),
        "tpot_median_ms": 1e3 * statistics.median(per_token),
        "gap_median_ms": 1e3 * statistics.median(gaps),
        "gap_p99_ms": 1e3 * percentile(gaps, 0.99),
        "gap_max_ms": 1e3 * max(gaps),
        "first_gap_median_ms": 1e3 * statistics.median(stream.gaps[0] for stream in done),
        "codecs": dict(Counter(stream.codec for stream in done)),
        "stage_median_ms": {
            name: 1e3 * statistics.median(stream.stages.get(name, 0.0) for stream in done) for name in sorted(stages)
        },
    }


async def check(url: str, model: str, vocab: int, args: argparse.Namespace) -> None:
    """The gate: the same request twice has the same output; it also warms up every worker."""
    rng = random.Random(0)
    prompt = [rng.randrange(vocab) for _ in range(args.prompt_tokens)]
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        first, second = [await ask(client, model, prompt, 16) for _ in range(2)]
    if first.text != second.text:
        raise SystemExit(f"the same request gave {first.text!r} and {second.text!r}")


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


def workloads(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Streams and tokens of each of their prompts, a pair for each row."""
    for each in args.streams.split(","):
        streams, _, tokens = each.partition("x")
        yield int(streams), int(tokens or args.prompt_tokens)


def table(rows: list[dict[str, object]]) -> str:
    """Rows as a Markdown table."""
    names = [name for name in rows[0] if name not in ("stage_median_ms", "codecs")]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = [f"{row[name]:.1f}" if isinstance(row[name], float) else str(row[name]) for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print; with --out also write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), help="start a cluster with random weights of this shape")
    parser.add_argument("--device", default="cuda", help="with --shape: where its workers run")
    parser.add_argument("--port", type=int, default=8765, help="with --shape: the router's port")
    parser.add_argument("--up", nargs=argparse.REMAINDER, default=[], help="last: more flags of kvrail up")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="kvrail-demo")
    parser.add_argument("--vocab", type=int, default=8000, help="token ids of prompts are below this")
    parser.add_argument("--streams", default="1,8,32", help="numbers of streams, with commas; 8x8000: of such prompts")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each stream")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of streams without a number of their own")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--log-lines", type=int, default=5, help="lines of the cluster's log to show at the end")
    parser.add_argument("--out", type=Path, help="folder for the results")
    args = parser.parse_args()
    with started(args) as (url, model, vocab):
        asyncio.run(check(url, model, vocab, args))
        rows = [asyncio.run(measure(url, model, vocab, *each, args)) for each in workloads(args)]
    text = f"{args.output_tokens} tokens out\n\n{table(rows)}\n"
    sys.stdout.write(text)
    for row in rows:
        of = f"{row['streams']} streams of {row['prompt_tokens']}"
        sys.stdout.write(f"{of}, codecs {row['codecs']}, median ms: {row['stage_median_ms']}\n")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        head = {"date": datetime.now(UTC).date().isoformat(), "command": " ".join(sys.argv[1:])}
        (args.out / "serving.json").write_text(json.dumps({**head, "rows": rows}, indent=1))
        (args.out / "serving.md").write_text(
            f"{head['date']}: `python -m benchmarks.serving {head['command']}`\n\n{text}"
        )


if __name__ == "__main__":
    main()
