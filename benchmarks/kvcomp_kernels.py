"""KVComp's Figures 9, 10 and 11: products with keys and values that stay compressed, on a GPU.

    python -m benchmarks.kvcomp_kernels [--contexts 2048,4096,8192,16384] [--batches 1,16]

One layer's pages in KVComp's form, 8 KV heads of 128 under 32 query heads, 64 tokens a page, drawn as in
`benchmarks.kv_formats`, and one query a sequence. Three ways lead to the product that attention needs of an operand,
scores of the keys or weighted values:

    fused   one kernel reads codes and multiplies what it decodes; values: and a sum over parts
    apart   the pages' own kernel decodes, dequantises and stores bfloat16; torch multiplies that. One buffer serves
            all layers, so that a cache may hold it
    torch   torch multiplies bfloat16 that lies there

Figure 9 is apart over fused. The paper has three kernels apart; decoding and dequantising are one here, so that symbols
never go through memory: a faster baseline. It sweeps scales; pages have 0.05 for keys and 0.15 for values. Figure 10
is torch over fused. Figure 11, equivalent decompression: bytes of bfloat16 by what fused takes longer than torch;
"free" where it takes no longer. Times are medians of replays of one captured graph over layers that no cache holds.
Products must be those of the CPU's opened pages, or the benchmark fails. Prints one table in Markdown.
"""

import argparse
import itertools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from benchmarks.facts import say
from benchmarks.kv_formats import DIM, HEADS, KV_HEADS, draw, layout_of, timed
from kvrail.engine.kv.closed.pages import LossyPages
from kvrail.engine.kv.fixed.open_kernel import SHRUNK
from kvrail.engine.kv.kvcomp.form import CODED
from kvrail.engine.kv.kvcomp.open_kernel import codes_of_tile, open_coded, open_pages
from kvrail.engine.kv.lossless.form import TOKENS

OPERANDS = ("keys", "values")
GROUP = HEADS // KV_HEADS
_DISTINCT = 256
"""Pages that are drawn; pools repeat them."""
_PROGRAMS = 2048
"""About as many programs share a load, of one operand."""


@triton.jit
def key_product(
    closed, tables, query, scores, pages, PER: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, PAIR: tl.constexpr, ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """Grid: (batch * pages / PER, KV_HEADS). query, scores: bfloat16 [batch, heads, DIM or tokens].

    closed: [batch * pages, KV_HEADS, PAIR bytes]; pages: of a sequence.
    """
    first, kv_head = tl.program_id(0) * PER, tl.program_id(1)
    row = tl.arange(0, 16)[:, None]
    head = (first // pages * KV_HEADS + kv_head) * GROUP + row
    q = tl.load(query + head * DIM + tl.arange(0, DIM)[None, :], row < GROUP, 0.0)
    for step in range(PER):
        page = first + step
        pair = closed + tl.multiple_of((page.to(tl.int64) * KV_HEADS + kv_head) * PAIR, 64)
        codes = codes_of_tile(pair, tables, 0, True, DIM, 64, ASSEMBLED)
        found = tl.dot(q, open_coded(pair, codes, DIM, 64, ASSEMBLED)) * SHRUNK
        place = head.to(tl.int64) * pages * 64 + page % pages * 64 + tl.arange(0, 64)[None, :]
        tl.store(scores + place, found.to(tl.bfloat16), row < GROUP)


@triton.jit
def value_product(
    closed, tables, weights, parts, pages, PER: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, PAIR: tl.constexpr, BEGIN: tl.constexpr, ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """Grid: that of key_product. weights: bfloat16 [batch, heads, tokens]; BEGIN: of a pair's values.

    parts: sums of PER pages, float32 [batch, pages / PER, heads, DIM].
    """
    first, kv_head = tl.program_id(0) * PER, tl.program_id(1)
    row = tl.arange(0, 16)[:, None]
    head = (first // pages * KV_HEADS + kv_head) * GROUP + row
    total = tl.zeros([16, DIM], tl.float32)
    for step in range(PER):
        page = first + step
        place = head.to(tl.int64) * pages * 64 + page % pages * 64 + tl.arange(0, 64)[None, :]
        w = tl.load(weights + place, row < GROUP, 0.0)
        pair = closed + tl.multiple_of((page.to(tl.int64) * KV_HEADS + kv_head) * PAIR, 64)
        codes = codes_of_tile(pair, tables, BEGIN, False, 64, DIM, ASSEMBLED)
        total = tl.dot(w, open_coded(pair + BEGIN, codes, 64, DIM, ASSEMBLED), total)
    place = (tl.program_id(0) * KV_HEADS + kv_head) * GROUP + row
    tl.store(parts + place * DIM + tl.arange(0, DIM)[None, :], total * SHRUNK, row < GROUP)


class Load:
    """`batch` sequences of `pages` pages in several layers, closed and plain, and what each operand is multiplied with.

    plain: bfloat16 [layers, batch * KV_HEADS, tokens, DIM], keys, then values, as a CPU opens them; factors: queries
    and weights, bfloat16 [batch * KV_HEADS, GROUP, DIM or tokens].
    """

    def __init__(self, batch: int, pages: int, device: str, cold_bytes: int) -> None:
        torch.manual_seed(0)
        every, distinct, tokens = batch * pages, min(_DISTINCT, batch * pages), pages * TOKENS
        drawn, order = [draw(distinct, 0) for _ in OPERANDS], torch.arange(distinct)
        some, (keys, values) = LossyPages(layout_of(1), distinct, CODED, "cpu"), (each[None] for each in drawn)
        if some.close(keys, values, order, order).any():
            raise SystemExit("drawn pages cannot be closed")
        some.open(keys, values, order, order)
        self.layers = -(-cold_bytes // (every * KV_HEADS * some.pages.shape[-1]))
        chosen = torch.randint(distinct, (self.layers, batch, pages)).to(device)
        self.closed = LossyPages(layout_of(self.layers), every, CODED, device)
        self.closed.pages.copy_(some.pages[0].to(device)[chosen.flatten(1)])
        self.plain = []
        for each in drawn:
            by_head = each.to(device).transpose(1, 2).contiguous()  # [distinct, KV_HEADS, TOKENS, DIM]
            layers = [by_head[numbers].transpose(1, 2).reshape(-1, tokens, DIM) for numbers in chosen]
            self.plain.append(torch.stack(layers))
        self.opened = torch.empty_like(self.plain[0][0])
        self.sources = torch.arange(every * KV_HEADS, device=device)
        self.targets = self.sources.view(batch, KV_HEADS, pages).transpose(1, 2).flatten()
        shapes = ((batch * KV_HEADS, GROUP, wide) for wide in (DIM, tokens))
        self.factors = [torch.randn(shape).bfloat16().to(device) for shape in shapes]
        most = max(1, every * KV_HEADS // _PROGRAMS)
        self.pages, self.per = pages, max(per for per in range(1, most + 1) if pages % per == 0)

    def fused(self, layer: int, kind: int) -> torch.Tensor:
        """A product, bfloat16 [batch * KV_HEADS, GROUP, tokens or DIM], from the closed pages of a layer."""
        factor, kernel = self.factors[kind], (key_product, value_product)[kind]
        programs, shape = len(self.sources) // KV_HEADS // self.per, self.factors[1 - kind].shape
        if kind:  # of each program a part
            out = torch.empty(programs, HEADS * DIM, device=factor.device)
        else:
            out = torch.empty(shape, dtype=torch.bfloat16, device=factor.device)
        begin = {"BEGIN": self.closed.tiles[0].bytes} if kind else {}
        kernel[programs, KV_HEADS](
            self.closed.pages[layer], self.closed.shared, factor, out, self.pages, self.per, GROUP, KV_HEADS, DIM,
            self.closed.pages.shape[-1], **begin, ASSEMBLED=isinstance(kernel, triton.JITFunction),
        )  # fmt: skip
        return out.view(-1, self.pages // self.per, HEADS * DIM).sum(1).bfloat16().view(shape) if kind else out

    def apart(self, layer: int, kind: int) -> torch.Tensor:
        """The same, from pages that are opened first, each head's by itself, as torch multiplies them."""
        closed, part = self.closed.pages[layer], self.closed.tiles[kind]
        open_pages[len(self.sources), 1, 1](
            closed, self.closed.shared, self.opened, self.sources, self.targets, closed.numel(), self.opened.numel(),
            KV_HEADS=1, BLOCKS=1, DIM=DIM, BEGIN=kind * self.closed.tiles[0].bytes,
            BOTH_TILES=closed.shape[-1], KEYS=part.keys, ASSEMBLED=isinstance(open_pages, triton.JITFunction),
        )  # fmt: skip
        return self.factors[kind] @ (self.opened if kind else self.opened.transpose(1, 2))

    def lying(self, layer: int, kind: int) -> torch.Tensor:
        """The same, from plain pages that lie there."""
        plain = self.plain[kind][layer]
        return self.factors[kind] @ (plain if kind else plain.transpose(1, 2))

    def check(self, layer: int, kind: int) -> None:
        """Raises SystemExit where pages opened apart have other bits, or the fused product is not theirs.

        It may err by a bit of bfloat16, to which Triton's interpreter cuts, and by one of float32 for each 16 products
        that are added at once.
        """
        self.apart(layer, kind)
        plain = self.plain[kind][layer]
        if not torch.equal(self.opened.view(torch.int16), plain.view(torch.int16)):
            raise SystemExit(f"opened {OPERANDS[kind]} of layer {layer} are not those of a CPU")
        pair = self.factors[kind].double(), (plain if kind else plain.transpose(1, 2)).double()
        wanted, largest = pair[0] @ pair[1], pair[0].abs() @ pair[1].abs()
        sums = self.per * TOKENS // 16 + self.pages // self.per if kind else DIM // 16
        wrong = (self.fused(layer, kind) - wanted).abs() > 2.0**-7 * wanted.abs() + sums * 2.0**-23 * largest
        if wrong.any():
            raise SystemExit(f"{int(wrong.sum())} products with {OPERANDS[kind]} of layer {layer} are wrong")

    def microseconds(self, way: Callable[[int, int], torch.Tensor], kind: int) -> float:
        """Of one layer's product."""
        launches = max(4, self.layers)

        def launch() -> None:
            for number in range(launches):
                way(number % self.layers, kind)

        return timed(launch, captured=True) / launches


def measure(batch: int, context: int, cold_bytes: int) -> None:
    """Check one load and print its rows."""
    load = Load(batch, context // TOKENS, "cuda", cold_bytes)
    for kind, name in enumerate(OPERANDS):
        for layer in {0, load.layers - 1}:
            load.check(layer, kind)
        fused, apart, plain = (load.microseconds(way, kind) for way in (load.fused, load.apart, load.lying))
        size = load.plain[kind][0].nbytes / 1e3  # GB/s from microseconds
        decoding = f"{size / (fused - plain):,.0f}" if fused > plain else "free"
        print(
            f"| {name} | {batch} x {context:,} | {plain:.1f} | {fused / plain:.2f} | {apart / plain:.2f} "
            f"| {apart / fused:.2f} | {plain / fused:.2f} | {size / fused:,.0f} | {size / plain:,.0f} | {decoding} |",
            flush=True,
        )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kvcomp_kernels", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--contexts", default="2048,4096,8192,16384", help="tokens, multiples of 64")
    parser.add_argument("--batches", default="1,16", help="sequences")
    parser.add_argument("--cold-mib", type=int, default=400, help="of closed pages that a graph goes over, at least")
    arguments = parser.parse_args()
    say("benchmarks.kvcomp_kernels", "cuda")
    print("| | sequences x tokens | torch, us | fused / torch | apart / torch | Figure 9: apart / fused ", end="")
    print("| Figure 10: torch / fused | Figure 11, GB/s of bfloat16: fused | torch | equivalent decompression |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for batch, context in itertools.product(
        *(map(int, each.split(",")) for each in (arguments.batches, arguments.contexts))
    ):
        measure(batch, context, arguments.cold_mib << 20)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
