"""Decode attention over lossless pages beside bfloat16 pages, and the rates of closing and opening, on a GPU.

    python -m benchmarks.kv_formats [--escapes 0,1e-4,1e-3] [--loads 64x2048,1x32768] [--sweep]

One layer of Qwen3-8B's shape: 32 heads over 8 KV heads of 128, pages of 64 tokens. KV is drawn: normal, each channel of
another scale, and a share of values so small that they are escapes, beside some 5e-5 that are so by themselves. Each
time is the median of replays of a captured graph whose launches go over several layers, so that no cache holds their
pages. Both kernels must give the same bits, or the benchmark fails. --sweep: also other launch parameters.
"""

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from triton.runtime.errors import OutOfResources

from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.attention.triton.decode_kernel import DecodeTuning, decode_attention
from kvrail.engine.kv.formats import LayerPages
from kvrail.engine.kv.lossless.form import GROUPS, RAW, SLOTS, TOKENS, Tile
from kvrail.engine.kv.lossless.pages import ClosedPages, page_bytes
from kvrail.values.layout import KVLayout

HEADS, KV_HEADS, DIM = 32, 8, 128
LOADS = "64x2048,32x8192,8x32768,1x32768"
_PLAIN_BYTES = 800 << 20
"""Of bfloat16 pages that the launches of a graph go over, at least."""
_REPLAYS = 15
SWEEP = [
    DecodeTuning(stages=stages, programs=programs, registers=registers)
    for stages in (3, 4, 5)
    for registers in (None, 168, 128)
    for programs in (2, 4)
]


class Load:
    """`batch` sequences of `context` tokens in pages of both forms, each with one new token."""

    def __init__(self, batch: int, context: int, escapes: float) -> None:
        torch.manual_seed(0)
        self.batch, self.context = batch, context
        pages, layout = batch * context // TOKENS, KVLayout(1, KV_HEADS, DIM, DIM, TOKENS, "bfloat16")
        layers = -(-_PLAIN_BYTES // (pages * layout.page_bytes))
        layout = KVLayout(layers, KV_HEADS, DIM, DIM, TOKENS, "bfloat16")
        self.keys, self.values = (self._draw(layers, pages + batch, escapes) for _ in range(2))
        self.closed = ClosedPages(layout, pages, pages * layers * KV_HEADS // 4 + 64, "cuda")
        self.full = torch.arange(pages, device="cuda")
        self.options, self.processors = ScoreOptions(DIM**-0.5), processors()
        order = torch.randperm(pages, device="cuda").view(batch, -1)
        last = torch.arange(pages, pages + batch, device="cuda")[:, None]
        self.table = torch.cat([order, last], 1).int()
        self.lengths = torch.full((batch,), context + 1, dtype=torch.int32, device="cuda")
        self.closed_tokens = self.lengths - 1
        self.counters = torch.zeros(batch * KV_HEADS, dtype=torch.int32, device="cuda")
        self.query = torch.randn(batch, HEADS, DIM, device="cuda").bfloat16()
        self.key, self.value = torch.randn(2, batch, KV_HEADS, DIM, device="cuda").bfloat16()

    def _draw(self, layers: int, pages: int, escapes: float) -> torch.Tensor:
        pool = torch.empty(layers, pages, TOKENS, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        scales = torch.exp2(torch.randint(-3, 4, (KV_HEADS, DIM), device="cuda").float())
        for layer in pool:
            for part in layer.split(1024):
                part.copy_(torch.randn(part.shape, device="cuda") * scales)
                if escapes:
                    part.mul_(torch.where(torch.rand(part.shape, device="cuda") < escapes, 2.0**-40, 1.0))
        return pool

    @property
    def layers(self) -> int:
        return len(self.keys)

    def close(self) -> None:
        """Close all full pages."""
        failed = self.closed.close(self.keys, self.values, self.full, self.full)
        if failed.item():
            raise RuntimeError(f"{failed.item()} tiles found no spare unit")

    def open(self) -> bool:
        """Open all closed pages elsewhere; whether every bit came back."""
        pools = [torch.zeros_like(pool) for pool in (self.keys, self.values)]
        self.closed.open(*pools, self.full, self.full)
        number = len(self.full)
        return all(
            torch.equal(ours[:, :number].view(torch.int16), theirs[:, :number].view(torch.int16))
            for ours, theirs in zip(pools, (self.keys, self.values), strict=True)
        )

    def attend(self, layer: int, lossless: bool, tuning: DecodeTuning | None = None) -> torch.Tensor:
        """Attention of one layer."""
        out = torch.empty_like(self.query)
        decode_attention(
            self.query,
            self.key,
            self.value,
            LayerPages(self.keys[layer], self.values[layer], closed=self.closed.layer(layer) if lossless else None),
            self.table,
            self.lengths,
            self.counters,
            out,
            self.options,
            self.processors,
            tuning,
            self.closed_tokens if lossless else None,
        )
        return out

    def microseconds(self, lossless: bool, tuning: DecodeTuning | None = None) -> float:
        """Of one layer's attention."""
        launches = max(4, self.layers)

        def launch() -> None:
            for number in range(launches):
                self.attend(number % self.layers, lossless, tuning)

        return timed(launch, captured=True) / launches

    def raw_share(self) -> float:
        """Share of tiles that are raw."""
        form = Tile(DIM)
        words = self.closed.pages.view(torch.int32).unflatten(-1, (2, form.bytes // 4))
        return float((words[..., -GROUPS * SLOTS] & RAW).ne(0).float().mean())


def processors() -> int:
    """Multiprocessors of the GPU."""
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def timed(launch: Callable[[], None], captured: bool = False) -> float:
    """Microseconds of what `launch` enqueues, the median of replays."""
    launch()
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        launch = graph.replay
        launch()
    found = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1000)
    return statistics.median(found)


def measure(load: Load, name: str, escapes: float, sweep: bool) -> None:
    """Print one load's figures."""
    load.close()
    exact = load.open()
    same = all(
        torch.equal(*(load.attend(layer, form).view(torch.int16) for form in (False, True)))
        for layer in range(load.layers)
    )
    plain, lossless = load.microseconds(False), load.microseconds(True)
    print(
        f"| {name} | {escapes:g} | {load.raw_share():.2%} | {plain:.1f} | {lossless:.1f} | {lossless / plain:.3f} | "
        f"{'same bits' if exact and same else 'BITS DIFFER: ' + ('attention' if exact else 'pages')} |",
        flush=True,
    )
    if sweep:
        for tuning in SWEEP:
            try:
                found = load.microseconds(True, tuning)
            except OutOfResources:
                continue
            print(f"  {tuning}: {found:.1f} ({found / plain:.3f})", flush=True)
    if not (exact and same):
        raise SystemExit("lossless pages do not give the bits of plain ones")


def rates(load: Load) -> None:
    """Print how fast pages are closed and opened, in bytes of plain pages a second."""
    size = load.layers * len(load.full) * TOKENS * KV_HEADS * DIM * 4
    for name, work in (("closing", load.closed.close), ("opening", load.closed.open)):
        taken = timed(lambda work=work: work(load.keys, load.values, load.full, load.full))
        print(f"{name}: {size / taken / 1e3:.0f} GB/s of bfloat16", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--escapes", default="0,1e-4,1e-3")
    parser.add_argument("--loads", default=LOADS)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    begin = perf_counter()
    layout = KVLayout(1, KV_HEADS, DIM, DIM, TOKENS, "bfloat16")
    print(torch.cuda.get_device_name(), f"{16 * page_bytes(layout) / layout.page_bytes:.2f} bits a value\n", flush=True)
    print("| sequences x tokens | escapes added | raw tiles | bfloat16, us | lossless, us | of bfloat16 | |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.loads.split(","):
        batch, context = map(int, name.split("x"))
        for number, escapes in enumerate(map(float, arguments.escapes.split(","))):
            load = Load(batch, context, escapes)
            measure(load, name, escapes, arguments.sweep and not number)
            if not number:
                rates(load)
            del load
            torch.cuda.empty_cache()
    print(f"\n{perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
