"""What benchmarks.engine times, one method a figure."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry
from torch.profiler import ProfilerActivity, profile

from kvrail.engine.attention.registry import NAME
from kvrail.engine.batch.batch import SampleRow, SequenceSlice
from kvrail.engine.engine import Engine
from kvrail.engine.kv.pages import PagePool
from kvrail.engine.model.loader import LoadedModel
from kvrail.engine.request.events import Delivery, Output
from kvrail.engine.request.requests import EngineRequest, ModelLimits
from kvrail.engine.sampling.sampler import Sampler
from kvrail.engine.schedule.chunks import StepBudget
from kvrail.engine.schedule.scheduler import Scheduler
from kvrail.engine.step.runner import ModelRunner
from kvrail.telemetry.worker import EngineMetrics
from kvrail.values.sampling import SamplingParams


@dataclass(frozen=True)
class Measurement:
    """One figure."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True)
class Case:
    """`batch` sequences of `length` tokens."""

    batch: int
    length: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def __str__(self) -> str:
        return f"{self.batch} x {self.length}"


SPARE_TOKENS = 128
"""Tokens that sequences may grow by before and after what is timed."""

GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class Bench:
    """A loaded model with a runner, and an engine around that where a figure asks for one."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_tokens: int,
        max_running: int,
        max_batch_tokens: int,
        graphs: bool,
        compile: bool,
        invariant: bool = True,
    ) -> None:
        self.loaded = loaded
        self._budget = StepBudget(max_batch_tokens, max_running, max_waiting=1024)
        self._num_pages = loaded.layout.pages_for(max_tokens) + max_running + 8
        self.runner = ModelRunner(
            loaded,
            self._num_pages,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            cuda_graphs=graphs,
            compile=compile,
            invariant=invariant,
        )
        self._sampler = Sampler(loaded.vocab_size, loaded.device)
        choice = random.Random(0)
        lengths = [min(n, loaded.max_model_len // 2) for n in (300, 129, 64, 33)]
        self._known = [choice.choices(range(loaded.vocab_size), k=n) for n in lengths]

    # -- correctness ---------------------------------------------------------------------------------------------

    def dense_logits(self) -> list[torch.Tensor]:
        """Last two rows of logits of each known sequence, by the model's own attention; before anything is compiled."""
        model = self.loaded.model
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            found = [
                model(torch.tensor([ids], device=self.loaded.device), use_cache=False).logits[0, -2:].float()
                for ids in self._known
            ]
        model.set_attn_implementation(NAME)
        return found

    def gate(self, reference: Sequence[torch.Tensor]) -> dict[str, float]:
        """Relative difference of a prefill's and of a captured decode step's logits from `reference`."""
        size, tables, next_page = self.loaded.layout.page_size, [], 0
        for ids in self._known:
            count = -(-len(ids) // size)
            tables.append(list(range(next_page, next_page + count))[::-1])
            next_page += count
        cut = [len(ids) // 2 for ids in self._known]
        parts = list(zip(self._known, cut, tables, strict=True))
        self.runner.execute([SequenceSlice(ids[:c], 0, t, 0) for ids, c, t in parts])
        prefilled = self.runner.execute([SequenceSlice(ids[c:-1], c, t, 1) for ids, c, t in parts]).clone()
        decoded = self.runner.execute([SequenceSlice(ids[-1:], len(ids) - 1, t, 1) for ids, _, t in parts])
        wanted = torch.stack(list(reference), 1)
        return {
            name: float((got - want).norm() / want.norm())
            for name, got, want in zip(("prefill", "decode"), (prefilled, decoded), wanted, strict=True)
        }

    def fill_pages(self) -> None:
        """Random keys and values everywhere: timings on zeros flatter."""
        cache = self.runner.cache
        for pool in cache.as_block()[:2]:
            for layer in pool:
                layer.copy_(torch.randn(layer.shape, device=layer.device))

    # -- the runner ----------------------------------------------------------------------------------------------

    def decode_runner(self, case: Case, steps: int) -> float:
        """Seconds of a decode step: model and greedy sampling, tokens back on the host."""
        tables = self.tables(case, case.length + steps + 8)
        tokens = random.choices(range(self.loaded.vocab_size), k=case.batch)
        taken = []
        for step in range(steps + 8):
            start = case.length - 1 + step
            begin = time.perf_counter()
            slices = [SequenceSlice([t], start, table, 1) for t, table in zip(tokens, tables, strict=True)]
            rows = [SampleRow(GREEDY, 0, start + 1, (), ()) for _ in slices]
            tokens = [drawn.token_id for drawn in self._sampler.sample(self.runner.execute(slices), rows)]
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken[8:])

    def prefill_runner(self, case: Case) -> float:
        """Seconds of prefilling all prompts, in steps as large as allowed, until the last logits are there."""
        tables, prompts = self.tables(case, case.length), self.prompts(case)

        def run() -> None:
            for slices in self.prefill_steps(prompts, tables):
                logits = self.runner.execute(slices)
            logits.argmax(-1).tolist()

        return _median(run, 5)

    def prefill_steps(self, prompts: list[list[int]], tables: list[list[int]]) -> Iterator[list[SequenceSlice]]:
        """The steps in which prompts are computed, as large as allowed."""
        room, slices = self._budget.max_batch_tokens, []
        for ids, table in zip(prompts, tables, strict=True):
            start = 0
            while start < len(ids):
                count = min(room, len(ids) - start)
                slices.append(SequenceSlice(ids[start : start + count], start, table, int(start + count == len(ids))))
                start, room = start + count, room - count
                if room == 0:
                    yield slices
                    room, slices = self._budget.max_batch_tokens, []
        if slices:
            yield slices

    # -- the engine ----------------------------------------------------------------------------------------------

    def decode_engine(self, case: Case, steps: int) -> float:
        """Seconds of a decode step through scheduling and output, once every prompt is prefilled."""
        started: set[str] = set()
        engine = self._engine(
            lambda events: started.update(name for name, event in events if isinstance(event, Output))
        )
        self._submit(engine, self.prompts(case), steps + SPARE_TOKENS)
        while len(started) < case.batch:
            engine.step()
        taken: list[float] = []
        for _ in range(steps + 4):
            begin = time.perf_counter()
            engine.step()
            taken.append(time.perf_counter() - begin)
        for number in range(case.batch):
            engine.abort(str(number))
        return statistics.median(taken[4:])

    def prefill_engine(self, case: Case) -> float:
        """Seconds from the prompts' submission to the last one's first token."""
        return _median(lambda: self._run_all(self.prompts(case), 1), 3)

    def workload(self, case: Case, new_tokens: int) -> float:
        """Seconds for prompts that come at once, with `new_tokens` each."""
        prompts = self.prompts(case)
        begin = time.perf_counter()
        self._run_all(prompts, new_tokens)
        return time.perf_counter() - begin

    def prompts(self, case: Case) -> list[list[int]]:
        return [random.choices(range(self.loaded.vocab_size), k=case.length) for _ in range(case.batch)]

    def _run_all(self, prompts: list[list[int]], new_tokens: int) -> None:
        engine = self._engine()
        self._submit(engine, prompts, new_tokens)
        while engine.pending():
            engine.step()

    def _engine(self, deliver: Callable[[Delivery], None] = lambda events: None) -> Engine:
        loaded = self.loaded
        return Engine(
            self.runner,
            self._sampler,
            Scheduler(PagePool(self._num_pages, loaded.layout.page_size, prefix_cache=False), self._budget),
            ModelLimits(loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids),
            None,
            EngineMetrics(CollectorRegistry(), "benchmark"),
            deliver,
        )

    def _submit(self, engine: Engine, prompts: list[list[int]], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        for number, ids in enumerate(prompts):
            engine.submit(EngineRequest(str(number), tuple(ids), params))

    def tables(self, case: Case, tokens: int) -> list[list[int]]:
        """Random pages for the tokens of each sequence."""
        pages = random.sample(range(self._num_pages), self._num_pages)
        need = self.loaded.layout.pages_for(tokens)
        return [[pages.pop() for _ in range(need)] for _ in range(case.batch)]


def _median(run: Callable[[], object], rounds: int) -> float:
    """Median seconds of `run`, after one round that does not count."""
    taken = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def measure_ceilings(device: torch.device) -> Iterator[Measurement]:
    """What the device can do: a large copy and a large product, on random data."""
    if device.type != "cuda":
        return
    yield Measurement("device copy, read + written", _copy_rate(device) / 1e9, "GB/s")
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / _seconds(lambda: a @ b)
    yield Measurement("bfloat16 product of 8192 x 8192", rate / 1e12, "TFLOP/s")


def _copy_rate(device: torch.device) -> float:
    source = torch.randn(1 << 30, device=device)
    target = torch.empty_like(source)
    return 8 * source.numel() / _seconds(lambda: target.copy_(source))


def _seconds(run: Callable[[], object], rounds: int = 10) -> float:
    """Seconds of device work a round, by events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        run()
    begin.record()
    for _ in range(rounds):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / rounds


def profile_step(bench: Bench, case: Case, folder: Path, *, prefill: bool = False, rows: int = 25) -> str:
    """The kernels of a step by time, as a table; leaves a Chrome trace in `folder`."""
    run = (lambda: bench.prefill_runner(case)) if prefill else (lambda: bench.decode_runner(case, 4))
    run()
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if bench.loaded.device.type == "cuda" else [])
    with profile(activities=kinds) as profiler:
        run()
    order = "self_cuda_time_total" if bench.loaded.device.type == "cuda" else "self_cpu_time_total"
    title = f"{'prefill' if prefill else 'decode'} {case}"
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"trace-{title.replace(' ', '-')}.json.gz"))
    return f"== {title} ==\n" + profiler.key_averages().table(sort_by=order, row_limit=rows, max_name_column_width=70)
