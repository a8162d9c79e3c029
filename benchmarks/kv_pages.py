"""What a form of KV pages gives an engine: tokens that fit, prefills, decode steps, most long requests at once.

    python -m benchmarks.kv_pages [--forms plain,lossless,int4,plain] [--shape qwen3-8b] [--device cuda]
        [--decode 1x128,32x8192] [--prefill 1x8000] [--long 8192] [--kv-memory-gib G] [--out FILE.json]

One process loads the weights, random ones of that shape, and gives one form after the other the memory that a worker
would give it: `plain` first and last shows how far the machine drifts. Steps go through the engine: scheduling, closing
of pages, sampling. A rate is that of the median step of as many requests of --long tokens as fit at once.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from benchmarks.engine import pairs
from benchmarks.facts import facts_of, hardware, paragraph
from benchmarks.shapes import SHAPES, write_shape
from kvrail.engine.engine import Engine
from kvrail.engine.model.loader import LoadedModel, load_model
from kvrail.engine.request.events import Delivery, Output
from kvrail.engine.request.requests import EngineRequest, ModelLimits
from kvrail.engine.sampling.sampler import Sampler
from kvrail.engine.schedule.scheduler import Scheduler
from kvrail.engine.step.runner import ModelRunner
from kvrail.offline.settings import LLMSettings
from kvrail.telemetry.worker import EngineMetrics
from kvrail.values.sampling import SamplingParams
from kvrail.worker.budgets import limits_of
from kvrail.worker.kv_cache import page_pool, pages_for

_STEPS = 96
"""Decode steps that are timed: pages of 64 tokens are filled in each of them somewhere."""


class Bench:
    """An engine whose pages have the form that `settings` name."""

    def __init__(self, settings: LLMSettings, loaded: LoadedModel) -> None:
        pages, running = pages_for(settings, loaded)
        self.runner = ModelRunner(loaded, pages, max_running=running, max_batch_tokens=settings.max_batch_tokens)
        self.runner.warm_up()
        self.places = running
        # Prompts are computed in whole steps, so that the first request does not put out much until the last begins.
        self._budget = replace(limits_of(settings, loaded.vocab_size, running), mixed_batch_tokens=0)
        pool, closer = page_pool(settings, self.runner.cache)
        self._begun: set[str] = set()
        self._vocab = loaded.vocab_size
        self._random = np.random.default_rng(0)
        self._engine = Engine(
            self.runner,
            Sampler(loaded.vocab_size, loaded.device),
            Scheduler(pool, self._budget),
            ModelLimits(loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids),
            None,
            EngineMetrics(CollectorRegistry(), "benchmark"),
            self._take,
            closer=closer,
        )

    @property
    def tokens(self) -> int:
        """Tokens that fit."""
        return self.runner.cache.num_pages * self.runner.cache.layout.page_size

    def prefill(self, batch: int, length: int) -> float:
        """Seconds until each of `batch` prompts has its first token."""
        names, seconds = self._start(batch, length)
        self._end(names)
        return seconds

    def decode(self, batch: int, length: int) -> float:
        """Median seconds of a step of `batch` requests behind prompts of `length` tokens."""
        names, _ = self._start(batch, length)
        taken = []
        for _ in range(_STEPS):
            begin = time.perf_counter()
            self._engine.step()
            taken.append(time.perf_counter() - begin)
        running = self._engine.status().running
        if running != batch:
            raise SystemExit(f"{running} of {batch} requests of {length} tokens ran to the end of what was timed")
        self._end(names)
        return statistics.median(taken[8:])

    def most(self, length: int) -> int:
        """Requests of `length` tokens that fit at once, with what they have put out once steps have been timed.

        The first has put out the most, the last next to nothing.
        """
        size = self.runner.cache.layout.page_size

        def fit(batch: int) -> bool:
            return batch * -(-(length + self._output(batch, length) // 2) // size) <= self.tokens // size

        return next((batch for batch in range(self.places, 1, -1) if fit(batch)), 1)

    def _output(self, batch: int, length: int) -> int:
        """Tokens that each request asks for: more than steps pass while prompts are computed, and are timed."""
        return batch * -(-length // (self._budget.max_batch_tokens - batch)) + 2 * _STEPS

    def _start(self, batch: int, length: int) -> tuple[list[str], float]:
        params = SamplingParams(max_tokens=self._output(batch, length), temperature=0.0, ignore_eos=True)
        prompts = self._random.integers(0, self._vocab, (batch, length)).tolist()
        names = [str(number) for number in range(batch)]
        begin = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.submit(EngineRequest(name, tuple(prompt), params))
        while len(self._begun) < batch:
            self._engine.step()
        return names, time.perf_counter() - begin

    def _end(self, names: list[str]) -> None:
        for name in names:
            self._engine.abort(name)
        while self._engine.pending():
            self._engine.step()
        self._begun.clear()

    def _take(self, events: Delivery) -> None:
        self._begun.update(name for name, event in events if isinstance(event, Output))


def measure(options: argparse.Namespace, form: str, loaded: LoadedModel, folder: Path) -> Iterator[tuple[str, float]]:
    """Figures of one form, by name."""
    asked: Any = {"device": options.device, "kv_cache": form, "prefix_cache": False}
    settings = LLMSettings.of(str(folder), asked | {"kv_memory_gib": options.kv_memory_gib})
    bench = Bench(settings, loaded)
    cache = bench.runner.cache
    yield "tokens that fit", bench.tokens
    yield "GiB of pages", cache.bytes / (1 << 30)
    yield "share of pages that can be open", cache.open_pages / cache.num_pages
    for batch, length in pairs(options.prefill):
        bench.prefill(batch, length)
        yield f"prefill {batch} x {length}, ms", 1e3 * min(bench.prefill(batch, length) for _ in range(3))
    for batch, length in pairs(options.decode):
        yield f"decode step {batch} x {length}, ms", 1e3 * bench.decode(batch, length)
    if options.long:
        most = bench.most(options.long)
        yield f"most requests of {options.long}", most
        yield f"tokens/s of these {options.long}", most / bench.decode(most, options.long)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_pages", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--forms", default="plain,lossless,int4,plain")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--decode", default="1x128,32x8192", help="batch x context, comma-separated")
    parser.add_argument("--prefill", default="1x8000", help="prompts x tokens, comma-separated")
    parser.add_argument("--long", type=int, default=8192, help="tokens of a request where as many run as fit; 0: none")
    parser.add_argument("--kv-memory-gib", type=float, default=0.0)
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    options = parser.parse_args(argv)
    facts = facts_of("benchmarks.kv_pages", hardware(options.device))
    print(paragraph(facts), flush=True)
    found: list[dict[str, float | str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_shape(options.shape, Path(scratch) / options.shape)
        loaded = load_model(
            str(folder), device=options.device, dtype="auto", kv_dtype="bfloat16", page_size=64, load_format="dummy"
        )
        for form in options.forms.split(","):
            found.append({"form": form})
            for name, value in measure(options, form, loaded, folder):
                found[-1][name] = value
                print(f"{form:10s} {name:40s} {value:12,.4g}", flush=True)
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps({**facts, "shape": options.shape, "forms": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
