"""What the host and the GPU take for a step of each kind, captured and enqueued kernel by kernel, and what that serves.

    python -m benchmarks.engine_host [--shape qwen3-8b] [--contend] [--requests 96]

For each kind of step: `host`, until `execute` returns with everything enqueued; `GPU`, by events around it; `whole`,
with the draw, until its tokens are on the host. `gate`: the relative difference of captured logits from enqueued ones;
beyond 0.1 nothing is timed. Then closed streams of 1,024 tokens in and 128 out through an engine alone, without HTTP.
With --contend a second thread keeps the interpreter busy in short bursts, as an event loop does.
"""

import argparse
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from benchmarks.shapes import SHAPES, write_shape
from kvrail.engine.batch.batch import SampleRow, SequenceSlice
from kvrail.engine.engine import Engine
from kvrail.engine.kv.pages import PagePool
from kvrail.engine.model.loader import LoadedModel, load_model
from kvrail.engine.request.events import Delivery, Failed, Finished
from kvrail.engine.request.requests import EngineRequest, ModelLimits
from kvrail.engine.sampling.sampler import Sampler
from kvrail.engine.schedule.chunks import StepBudget
from kvrail.engine.schedule.scheduler import Scheduler
from kvrail.engine.step.runner import ModelRunner
from kvrail.errors import KvrailError
from kvrail.runtime.tuning import tune_process
from kvrail.telemetry.worker import EngineMetrics
from kvrail.values.sampling import SamplingParams

CONTEXT, PROMPT, OUTPUT, STREAMS = 1100, 1024, 128, 32
MAX_TOKENS, MAX_RUNNING, MIXED = 2048, 64, 512
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
TOLERANCE = 0.1
ROUNDS = 15
BURST_S = 0.0003


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_host", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b", help="random weights of this shape")
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=96, help="of each run of closed streams; 0: none")
    parser.add_argument("--contend", action="store_true", help="another thread keeps the interpreter busy")
    return parser.parse_args(argv)


@contextmanager
def contention(wanted: bool) -> Iterator[None]:
    """Another thread that computes for BURST_S and sleeps as long, again and again."""
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            end = time.perf_counter() + BURST_S
            while time.perf_counter() < end:
                pass
            time.sleep(BURST_S)

    thread = threading.Thread(target=burn, daemon=True)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if wanted:
            thread.join()


def steps_of_each_kind(loaded: LoadedModel, num_pages: int) -> dict[str, tuple[list[SequenceSlice], bool]]:
    """Slices of each kind of step, and whether layers are observed."""
    choice = random.Random(0)
    pages = choice.sample(range(num_pages), num_pages)
    need = loaded.layout.pages_for(CONTEXT)
    tables = [[pages.pop() for _ in range(need)] for _ in range(MAX_RUNNING)]
    long = [pages.pop() for _ in range(loaded.layout.pages_for(MAX_TOKENS))]
    ids = choice.choices(range(loaded.vocab_size), k=MAX_TOKENS)

    def decodes(count: int) -> list[SequenceSlice]:
        return [SequenceSlice(ids[i : i + 1], CONTEXT - 1, tables[i], 1) for i in range(count)]

    chunk = SequenceSlice(ids[: MIXED - STREAMS], 0, long, 0)
    kinds = {f"decode, {count} sequences": (decodes(count), False) for count in (1, 32, 64)}
    kinds[f"{STREAMS} decodes and {MIXED - STREAMS} tokens of a prompt"] = ([*decodes(STREAMS), chunk], False)
    for count in (1024, 2048):
        kinds[f"prefill of {count:,} tokens, layers observed"] = ([SequenceSlice(ids[:count], 0, long, 1)], True)
    return kinds


def observe(events: list[torch.Event], layer: int) -> None:
    """What a prefill worker does when layers are enqueued: record an event."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    events.append(event)


def time_step(runner: ModelRunner, sampler: Sampler, slices: list[SequenceSlice], observed: bool) -> tuple[float, ...]:
    """Milliseconds on the host, on the GPU and in all, medians of ROUNDS."""
    rows = [SampleRow(GREEDY, 0, CONTEXT, (), ()) for piece in slices for _ in range(piece.num_logits)]
    found = []
    for _ in range(ROUNDS + 3):
        tell = partial(observe, []) if observed else None
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        first.record()
        logits = runner.execute(slices, tell)
        last.record()
        host = time.perf_counter() - begin
        sampler.sample(logits, rows)
        whole = time.perf_counter() - begin
        torch.cuda.synchronize()
        found.append((1e3 * host, first.elapsed_time(last), 1e3 * whole))
    return tuple(statistics.median(column) for column in zip(*found[3:], strict=True))


class Streams:
    """Closed streams through an engine: as one request ends, the next is submitted."""

    def __init__(self, runner: ModelRunner, mixed_tokens: int) -> None:
        loaded = runner.loaded
        self._vocab = loaded.vocab_size
        self._ended: queue.Queue[object] = queue.Queue()
        self._engine = Engine(
            runner,
            Sampler(loaded.vocab_size, loaded.device),
            Scheduler(
                PagePool(runner.cache.num_pages, loaded.layout.page_size, prefix_cache=False),
                StepBudget(MAX_TOKENS, MAX_RUNNING, 1024, mixed_batch_tokens=mixed_tokens),
            ),
            ModelLimits(loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids),
            None,
            EngineMetrics(CollectorRegistry(), "benchmark"),
            self._deliver,
        )

    def _deliver(self, events: Delivery) -> None:
        for _, event in events:
            if isinstance(event, Finished | Failed):
                self._ended.put(event)

    def rate(self, requests: int) -> float:
        """Requests per second, without the first and the last STREAMS of them."""
        choice = random.Random(1)
        prompts = [tuple(choice.choices(range(self._vocab), k=PROMPT)) for _ in range(requests)]
        self._engine.start()
        ends = []
        for number in range(requests + STREAMS):
            if number >= STREAMS:
                event = self._ended.get(timeout=60)
                if isinstance(event, Failed):
                    raise event.error
                ends.append(time.perf_counter())
            if number < requests:
                self._engine.submit(EngineRequest(str(number), prompts[number], GREEDY))
        self._engine.stop()
        inner = ends[STREAMS - 1 : -STREAMS]
        return (len(inner) - 1) / (inner[-1] - inner[0])


def gate(runners: Sequence[ModelRunner], slices: list[SequenceSlice]) -> float:
    """Relative difference of logits of the first runner from the second's."""
    ours, theirs = (runner.execute(slices).clone() for runner in runners)
    return float((ours - theirs).norm() / theirs.norm())


def load(options: argparse.Namespace) -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        return load_model(
            str(write_shape(options.shape, Path(folder) / options.shape)),
            device="cuda",
            dtype="auto",
            kv_dtype=options.kv_dtype,
            page_size=64,
            load_format="dummy",
        )


def timed(name: str, run: Callable[[], None]) -> None:
    begin = time.perf_counter()
    run()
    print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)


def main(argv: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if argv is None else argv)
    tune_process()
    loaded = load(options)
    pages = MAX_RUNNING * loaded.layout.pages_for(CONTEXT + OUTPUT) + 40
    before = torch.cuda.mem_get_info()[0]
    captured = ModelRunner(loaded, pages, max_running=MAX_RUNNING, max_batch_tokens=MAX_TOKENS, cuda_graphs=True)
    timed("captured runner warms up", captured.warm_up)
    enqueued = ModelRunner(loaded, pages, max_running=MAX_RUNNING, max_batch_tokens=MAX_TOKENS, cuda_graphs=False)
    timed("enqueued runner warms up", enqueued.warm_up)
    cached = captured.cache.bytes + enqueued.cache.bytes
    print(f"beyond pages: {(before - torch.cuda.mem_get_info()[0] - cached) / (1 << 20):,.0f} MiB")
    kinds = steps_of_each_kind(loaded, pages)
    for runner in (captured, enqueued):
        generator = torch.Generator(loaded.device).manual_seed(0)
        for pool in runner.cache.as_block()[:2]:
            for layer in pool:
                layer.copy_(torch.randn(layer.shape, device=loaded.device, generator=generator))
    sampler = Sampler(loaded.vocab_size, loaded.device)
    print(f"{'milliseconds':58s} {'host':>8s} {'GPU':>8s} {'whole':>8s} {'gate':>8s}")
    with contention(options.contend):
        for name, (slices, observed) in kinds.items():
            off = gate((captured, enqueued), slices)
            if not off <= TOLERANCE:
                raise KvrailError(f"{name}: captured logits differ from enqueued ones by {off:.2g}; nothing is timed")
            for how, runner in (("captured", captured), ("enqueued", enqueued)):
                host, device, whole = time_step(runner, sampler, slices, observed)
                print(f"{name + ', ' + how:58s} {host:8.2f} {device:8.2f} {whole:8.2f} {off:8.4f}", flush=True)
        runs = [("captured", captured, MIXED), ("captured", captured, 0), ("enqueued", enqueued, MIXED)]
        for how, runner, mixed in runs if options.requests > 2 * STREAMS else []:
            rate = Streams(runner, mixed).rate(options.requests)
            print(
                f"{STREAMS} closed streams, {how}, mixed steps of {mixed or MAX_TOKENS}: {rate:.2f} requests/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
