"""Decode attention over closed pages beside bfloat16 pages, and the rates of closing and opening, on a GPU.

    python -m benchmarks.kv_formats [--forms lossless,int8,int4,kvcomp,rot3] [--escapes 0,1e-4,1e-3]
        [--loads 64x2048,64~2048,64~~2048] [--sweep [5:0,5:168]] [--no-rates] [--open]

One layer of Qwen3-8B's shape: 32 heads over 8 KV heads of 128, pages of 64 tokens. KV is drawn: normal, each channel of
another scale, and a share of values so small that they are escapes, beside some 5e-5 that are so by themselves. Each
time is the median of replays of a captured graph whose launches go over several layers, so that no cache holds their
pages. 64~2048: lengths are drawn evenly from 0.05 to 1.95 of that, 64~~2048: lognormal with a deviation of 1.1, at most
eight times that. Both kernels must give the same bits, or the benchmark fails; beside lossy pages, whose sequences
begin with an open page, bfloat16 pages hold what these give opened. --sweep: also other launch parameters. --open: no
page is closed yet, as with short requests, in a pool that can close pages. A form may also be one of SCALED.
"""

import argparse
import functools
import itertools
import random
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import triton
from triton.runtime.errors import OutOfResources

from benchmarks.facts import say
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.attention.shares import shares_of
from kvrail.engine.attention.triton.decode_kernel import DecodeTuning, decode_attention, tuning_over
from kvrail.engine.kv.closed.forms import FORMS, page_bytes
from kvrail.engine.kv.closed.pages import ClosedPages, LosslessPages, LossyPages
from kvrail.engine.kv.formats import LayerPages
from kvrail.engine.kv.lossless.form import GROUPS, RAW, SLOTS, TOKENS, Tile
from kvrail.values.layout import KVLayout

HEADS, KV_HEADS, DIM = 32, 8, 128
SCALED = ("float8_e4m3fn", "float8_e5m2")
"""Not closed forms: scaled pages, timed beside. Their bits are not compared."""
LOADS = "64x2048,32x8192,8x32768,1x32768"
_DISTINCT = 256
"""Pages that are drawn; pools repeat them."""
_PLAIN_BYTES = 800 << 20
"""Of bfloat16 pages that the launches of a graph go over, at least."""
_REPLAYS = 15
SWEEP = ",".join(f"{stages}:{registers}" for stages in (3, 4, 5, 7) for registers in (0, 168, 128))
"""See tuning_of. Each takes a second or two a load."""


class Load:
    """Sequences of such lengths in pages of both forms, each with one new token."""

    def __init__(self, form: str, lengths: Sequence[int], escapes: float, opened: bool = False) -> None:
        torch.manual_seed(0)
        self.form = form
        batch, context = len(lengths), -(-max(lengths) // TOKENS) * TOKENS
        pages = batch * context // TOKENS
        self.layers = -(-_PLAIN_BYTES // (pages * layout_of(1).page_bytes))
        self._fill(pages, batch, escapes)
        self.options, self.processors = ScoreOptions(DIM**-0.5), processors()
        order = torch.randperm(pages, device="cuda").view(batch, -1)
        last = torch.arange(pages, pages + batch, device="cuda")[:, None]
        self.table = torch.cat([order, last], 1).int()
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda") + 1
        self.shares: dict[int, torch.Tensor] = {}  # by slots
        self.closed_tokens = torch.zeros_like(self.lengths) if opened else (self.lengths - 1) // TOKENS * TOKENS
        self.counters = torch.zeros(batch * KV_HEADS, dtype=torch.int32, device="cuda")
        self.query = torch.randn(batch, HEADS, DIM, device="cuda").bfloat16()
        self.key, self.value = torch.randn(2, batch, KV_HEADS, DIM, device="cuda").bfloat16()

    def _fill(self, pages: int, batch: int, escapes: float) -> None:
        """Pages are drawn from _DISTINCT, which the kernels for CPUs close."""
        keys, values = (draw(_DISTINCT, escapes) for _ in range(2))
        if self.form in SCALED:
            chosen = torch.randint(_DISTINCT, (self.layers, pages + batch)).cuda()
            self.keys, self.values = (pool.cuda()[chosen] for pool in (keys, values))
            self.scaled = [pool.to(getattr(torch, self.form)) for pool in (self.keys, self.values)]
            self.scales = torch.ones(*self.keys.shape[:-1], device="cuda")
            return
        every, width = torch.arange(_DISTINCT), FORMS[self.form]
        closed = pool_of(self.form, 1, _DISTINCT, _DISTINCT * KV_HEADS * 2, "cpu")
        closed.close(keys[None], values[None], every, every)
        closed.open(keys[None], values[None], every, every)
        chosen = torch.randint(_DISTINCT, (self.layers, pages + batch))
        self.keys, self.values = (pool.cuda()[chosen.cuda()] for pool in (keys, values))
        self.closed = pool_of(self.form, self.layers, pages, 1, "cuda")
        if not width:
            self.closed.shared = closed.shared.cuda()
        some = closed.pages[0].cuda()
        for layer, numbers in zip(self.closed.pages, chosen.cuda(), strict=True):
            layer.copy_(some[numbers[:pages]])

    def attend(self, layer: int, closed: bool, tuning: DecodeTuning | None = None) -> torch.Tensor:
        """Attention of one layer."""
        out, pages = torch.empty_like(self.query), self._pages(layer, closed)
        usual = tuning_over(pages, torch.bfloat16, len(self.lengths))
        tuning = replace(tuning or usual, columns=usual.columns)
        decode_attention(
            self.query,
            self.key,
            self.value,
            pages,
            self.table,
            self.lengths,
            self._shares(tuning.programs * self.processors),
            self.counters,
            out,
            self.options,
            tuning,
            self.closed_tokens if closed and self.form not in SCALED else None,
        )
        return out

    def _shares(self, slots: int) -> torch.Tensor:
        if slots not in self.shares:
            self.shares[slots] = torch.from_numpy(shares_of(self.lengths.cpu().numpy(), KV_HEADS, slots)).int().cuda()
        return self.shares[slots]

    def _pages(self, layer: int, closed: bool) -> LayerPages:
        if not closed:
            return LayerPages(self.keys[layer], self.values[layer])
        if self.form in SCALED:
            return LayerPages(*(pool[layer] for pool in self.scaled), *[self.scales[layer]] * 2)
        return LayerPages(self.keys[layer], self.values[layer], closed=self.closed.layer(layer))

    def microseconds(self, closed: bool, tuning: DecodeTuning | None = None) -> float:
        """Of one layer's attention."""
        launches = max(4, self.layers)

        def launch() -> None:
            for number in range(launches):
                self.attend(number % self.layers, closed, tuning)

        return timed(launch, captured=True) / launches

    def raw_share(self) -> float:
        """Share of tiles that are raw."""
        if FORMS.get(self.form, True):
            return 0.0
        form = Tile(DIM)
        words = self.closed.pages.view(torch.int32).unflatten(-1, (2, form.bytes // 4))
        return float((words[..., -GROUPS * SLOTS] & RAW).ne(0).float().mean())


def lengths_of(name: str) -> list[int]:
    """The lengths of a load's sequences: 64x2048, 64~2048 or 64~~2048."""
    batch, mean = map(int, re.split(r"x|~+", name))
    draws = random.Random(1)
    if "x" in name:
        return [mean] * batch
    if "~~" in name:
        drawn = [min(8.0, draws.lognormvariate(-0.6, 1.1)) for _ in range(batch)]
    else:
        drawn = [draws.uniform(0.05, 1.95) for _ in range(batch)]
    return [max(TOKENS, round(mean * times)) for times in drawn]


def pool_of(form: str, layers: int, pages: int, units: int, device: str) -> ClosedPages:
    """A pool of closed pages. units: spare units, of lossless ones."""
    layout, width = layout_of(layers), FORMS[form]
    return LossyPages(layout, pages, width, device) if width else LosslessPages(layout, pages, units, device)


def bits_of(form: str) -> float:
    """Bits a value."""
    if form in SCALED:
        return 8 + 32 / DIM
    return 16 * page_bytes(layout_of(1), FORMS[form]) / layout_of(1).page_bytes


def layout_of(layers: int) -> KVLayout:
    """The layout of a model with `layers` layers."""
    return KVLayout(layers, KV_HEADS, DIM, DIM, TOKENS, "bfloat16")


def draw(pages: int, escapes: float) -> torch.Tensor:
    """Keys or values of some pages, on the CPU."""
    shape = (pages, TOKENS, KV_HEADS, DIM)
    drawn = torch.randn(shape) * torch.exp2(torch.randint(-3, 4, (KV_HEADS, DIM)).float())
    return torch.where(torch.rand(shape) < escapes, drawn * 2.0**-40, drawn).bfloat16()


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


def measure(load: Load, name: str, escapes: float, sweep: Sequence[DecodeTuning]) -> bool:
    """Print one load's figures; False: the bits differ."""
    same = all(
        torch.equal(*(load.attend(layer, closed).view(torch.int16) for closed in (False, True)))
        for layer in range(load.layers)
    )
    compared = load.form not in SCALED
    plain, closed = load.microseconds(False), load.microseconds(True)
    print(
        f"| {load.form} | {name} | {escapes:g} | {load.raw_share():.2%} | {plain:.1f} | {closed:.1f} | "
        f"{closed / plain:.3f} | "
        f"{('same bits' if same else 'BITS DIFFER') if compared else 'not compared'} |",
        flush=True,
    )
    for tuning in sweep:
        try:
            found = load.microseconds(True, tuning)
        except OutOfResources:
            continue
        print(f"  {tuning}: {found:.1f} ({found / plain:.3f})", flush=True)
    return same or not compared


def rates(form: str, layers: int, pages: int) -> bool:
    """Print how fast pages are closed and opened, in bytes of plain pages a second; whether they are those of a CPU."""
    plain = [draw(min(pages, _DISTINCT), 0).cuda().repeat(-(-pages // _DISTINCT), 1, 1, 1)[:pages] for _ in range(2)]
    keys, values = (pool.expand(layers, *pool.shape).contiguous() for pool in plain)
    closed, every = pool_of(form, layers, pages, layers * pages, "cuda"), torch.arange(pages, device="cuda")
    failed = int(closed.close(keys, values, every, every).sum())
    print(f"{form}: {layers} x {pages} pages closed, {failed} tiles not", flush=True)
    opened = [torch.zeros_like(pool) for pool in (keys, values)]
    closed.open(*opened, every, every)
    wanted = expected(form, keys, values)
    exact = all(torch.equal(*(t.view(torch.int16) for t in pair)) for pair in zip(opened, wanted, strict=True))
    print(f"opened: {'same bits' if exact else 'BITS DIFFER'}", flush=True)
    for name, work in (("closing", closed.close), ("opening", closed.open)):
        taken = timed(functools.partial(work, keys, values, every, every))
        print(f"{name}: {taken:.0f} us, {2 * keys.nbytes / taken / 1e3:.0f} GB/s of bfloat16", flush=True)
    return exact


def expected(form: str, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What opened pages hold; all layers are alike."""
    if not FORMS[form]:
        return keys, values
    pages = keys.shape[1]
    closed, every = pool_of(form, 1, pages, 0, "cpu"), torch.arange(pages)
    one = [pool[:1].cpu().contiguous() for pool in (keys, values)]
    closed.close(*one, every, every)
    closed.open(*one, every, every)
    return one[0].cuda().expand_as(keys), one[1].cuda().expand_as(values)


def tuning_of(stages: int, registers: int, warps: int = 4, programs: int = 4) -> DecodeTuning:
    """Launch parameters; 0 registers: the compiler decides."""
    return DecodeTuning(warps, stages, programs, registers or None)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--escapes", default="0,1e-4,1e-3")
    parser.add_argument("--loads", default=LOADS, help="empty: only closing and opening")
    parser.add_argument(
        "--sweep", nargs="?", const=SWEEP, default="", help="stages:registers[:warps[:programs]], comma-separated"
    )
    parser.add_argument("--no-rates", action="store_true", help="only attention")
    parser.add_argument("--open", action="store_true", help="no page is closed yet")
    arguments = parser.parse_args()
    say("benchmarks.kv_formats", "cuda")
    sweep = [tuning_of(*map(int, each.split(":"))) for each in arguments.sweep.split(",") if each]
    same, forms = True, arguments.forms.split(",")
    bits = ", ".join(f"{form} {bits_of(form):.2f}" for form in forms)
    print(f"triton {triton.__version__}; bits a value: {bits}\n", flush=True)
    print("| form | sequences x tokens | escapes added | raw tiles | bfloat16, us | closed, us | of bfloat16 | |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for form, name in itertools.product(forms, filter(None, arguments.loads.split(","))):
        lengths = lengths_of(name)
        shares = [0.0] if FORMS.get(form, True) else [*map(float, arguments.escapes.split(","))]
        for number, escapes in enumerate(shares):
            load = Load(form, lengths, escapes, arguments.open)
            same &= measure(load, name, escapes, () if number else sweep)
            del load
            torch.cuda.empty_cache()
    for form, (layers, pages) in itertools.product(
        [form for form in forms if form in FORMS], ((1, 16), (36, 1), (36, 128))
    ):
        same &= arguments.no_rates or rates(form, layers, pages)
    if not same:
        raise SystemExit("closed pages do not give the bits of plain ones")


if __name__ == "__main__":
    main()
