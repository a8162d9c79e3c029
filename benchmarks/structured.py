"""What a JSON schema costs: tokens/s of a whole cluster with one and without, in turns.

    python -m benchmarks.structured [--streams 32] [--rounds 5]
    python -m benchmarks.structured --shape qwen3-8b --device cuda

Each round sends new prompts with the schema, and as many without; the order changes with every round. All outputs are
cut at the same number of tokens: the schema wants more records than fit. Correctness first: outputs of a schema
that fits must be valid, and every output must have its tokens. CPU time is the cluster's, and shows the same on a
machine that others use too. Without --shape the cluster has the model that ships, on the CPU.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import psutil

from benchmarks.facts import facts_of, hardware, paragraph
from benchmarks.local_cluster import MODEL, local_cluster
from benchmarks.serving import machine_of
from benchmarks.serving import started as shape_started
from benchmarks.shapes import SHAPES

RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["file", "process", "socket", "user"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 1_000_000},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 4},
        "owner": {"anyOf": [{"type": "object", "properties": {"id": {"type": "number"}}}, {"type": "null"}]},
    },
    "required": ["name", "kind", "size", "tags", "owner"],
    "additionalProperties": False,
}
LONG = {"type": "array", "items": RECORD, "minItems": 10_000}


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """One completion, whole."""
    answer = await client.post("/v1/completions", json=body)
    if answer.status_code != 200:
        raise RuntimeError(f"{answer.status_code}: {answer.text}")
    return dict(answer.json())


async def check(client: httpx.AsyncClient, model: str) -> None:
    """The gate: whatever ends is valid."""
    bodies = [
        {"model": model, "prompt": "A record:", "json_schema": RECORD, "seed": seed, "max_tokens": 400}
        for seed in range(8)
    ]
    ended = 0
    for answer in await asyncio.gather(*(ask(client, body) for body in bodies)):
        (choice,) = answer["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), RECORD)
            ended += 1
    if not ended:
        raise SystemExit("no output came to its end, so that none was checked")


def cpu_seconds() -> float:
    """CPU time that the cluster's processes, this one's children, have taken."""
    times = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return float(sum(each.user + each.system for each in times))


async def measure(
    url: str, model: str, vocab: int, args: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens/s of each round, with the schema and without, and CPU milliseconds a token."""
    rates: dict[str, list[float]] = {"free": [], "schema": []}
    costs: dict[str, list[float]] = {"free": [], "schema": []}
    limits = httpx.Limits(max_connections=args.streams + 8)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await check(client, model)
        for number in range(args.rounds + 1):
            for kind in sorted(rates, reverse=bool(number % 2)):
                draws = random.Random(f"{number} {kind}")
                prompts = [draws.choices(range(vocab), k=args.prompt_tokens) for _ in range(args.streams)]
                form: dict[str, Any] = {"json_schema": LONG} if kind == "schema" else {"ignore_eos": True}
                common = {"model": model, "max_tokens": args.output_tokens, "temperature": args.temperature, **form}
                begin, before = time.perf_counter(), cpu_seconds()
                answers = await asyncio.gather(
                    *(ask(client, {**common, "prompt": prompt, "seed": i}) for i, prompt in enumerate(prompts))
                )
                seconds = time.perf_counter() - begin
                tokens = [answer["usage"]["completion_tokens"] for answer in answers]
                if any(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers):
                    raise SystemExit(f"{kind}: the cluster knew a prompt of round {number}")
                if set(tokens) != {args.output_tokens}:
                    raise SystemExit(f"{kind}: outputs have {sorted(set(tokens))} tokens, not {args.output_tokens}")
                if number:  # the first round warms up
                    rates[kind].append(sum(tokens) / seconds)
                    costs[kind].append(1e3 * (cpu_seconds() - before) / sum(tokens))
    return rates, costs


@contextmanager
def started(args: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """The cluster to measure: its address, its model's name and vocabulary."""
    if args.shape:
        with shape_started(args) as found:
            yield found
        return
    with local_cluster("--port", str(args.port), *args.up) as cluster:
        yield cluster.url, MODEL, 8000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="random weights of this shape, not the model that ships"
    )
    parser.add_argument("--device", default="cuda", help="with --shape: where its workers run")
    parser.add_argument("--port", type=int, default=8766, help="the router's port")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--log-lines", type=int, default=5, help="lines of the cluster's log to show at the end")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    parser.add_argument("--up", nargs=argparse.REMAINDER, default=[], help="last: more flags of kvrail up")
    args = parser.parse_args()
    facts = facts_of("benchmarks.structured", machine_of(args) if args.shape else hardware("cpu"))
    sys.stdout.write(f"{paragraph(facts)}\n")
    with started(args) as (url, model, vocab):
        rates, costs = asyncio.run(measure(url, model, vocab, args))
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    for kind, values in rates.items():
        sys.stdout.write(f"{kind:7} {medians[kind]:8.1f} tokens/s   rounds {[round(value, 1) for value in values]}\n")
    for name, found in (("tokens/s", rates), ("CPU time a token", costs)):
        pairs = [with_schema / free for with_schema, free in zip(found["schema"], found["free"], strict=True)]
        sys.stdout.write(f"{name}, with a schema / without: {statistics.median(pairs):.3f} (median of the rounds)\n")
    if args.out:
        args.out.write_text(json.dumps({**facts, "tokens_per_s": rates, "cpu_ms_a_token": costs}, indent=1))


if __name__ == "__main__":
    main()
