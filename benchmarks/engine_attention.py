"""One layer's attention by itself, as benchmarks.engine times it: what a step of the engine launches for it."""

import statistics
from collections.abc import Callable, Iterator

import torch

from benchmarks.engine_parts import Bench, Case, Measurement
from kvrail.engine.attention.cuda import paged_attention
from kvrail.engine.attention.meta import decode
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.batch.inputs import step_inputs
from kvrail.engine.batch.packing import pack

_LAUNCHES = 10
_REPLAYS = 15


def attention_alone(bench: Bench, decodes: list[Case], prefills: list[Case]) -> Iterator[Measurement]:
    """Microseconds of one layer; of prefills, of their last step, as large as allowed."""
    if bench.loaded.device.type != "cuda":
        return
    for case in decodes:
        slices = [SequenceSlice([0], case.length - 1, table, 1) for table in bench.tables(case, case.length)]
        yield Measurement(f"attention of decode {case}, one layer", _microseconds(bench, slices), "us")
    for case in prefills:
        *_, slices = bench.prefill_steps(bench.prompts(case), bench.tables(case, case.length))
        yield Measurement(f"attention of prefill {case}'s last step, one layer", _microseconds(bench, slices), "us")


def _microseconds(bench: Bench, slices: list[SequenceSlice]) -> float:
    """Median of captured launches, which go over as many layers' pages as there are, so that no cache holds them."""
    cache, layout, loaded = bench.runner.cache, bench.loaded.layout, bench.loaded
    inputs = step_inputs(cache, pack(slices, layout.page_size), loaded.dtype)
    meta = decode(inputs.step.data, inputs.step.plan)
    heads = int(loaded.config.get_text_config().num_attention_heads)
    tokens = len(inputs.token_ids)

    def drawn(count: int, dim: int) -> torch.Tensor:
        return torch.randn(tokens, count, dim, device=loaded.device, dtype=loaded.dtype)

    query = drawn(heads, layout.key_dim)
    key, value = drawn(layout.num_kv_heads, layout.key_dim), drawn(layout.num_kv_heads, layout.value_dim)
    options = ScoreOptions(layout.key_dim**-0.5)

    def run() -> None:
        for layer in range(_LAUNCHES):
            paged_attention(query, key, value, cache.layer(layer % layout.num_layers), meta, options)

    return captured_s(run) / _LAUNCHES * 1e6


def captured_s(run: Callable[[], None]) -> float:
    """Median seconds of a replay."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    taken = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(taken)
