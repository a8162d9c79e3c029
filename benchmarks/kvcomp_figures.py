"""KVComp's Figures 7 and 8 on the demo model: predictions against the compression ratio, and the ratio of values.

    python -m benchmarks.kvcomp_figures [--contexts 12] [--long 2] [--svg FILE]

Figure 7 codes keys, or values, and leaves the other operand exact. For the paper's CoQA and GSM8K it takes the share
of tokens whose likeliest successor stays (top-1), and the KL divergence. Figure 8 codes values of 2,048 to 8,192
tokens, the model's longest context. KV is the model's own, of its heldout.txt and of files of installed packages.
Sizes have all metadata: KVComp's are parts of real payloads, with 16 bits a vector and 32 a block, scales and minima;
KIVI's have a minimum and a step of 16 bits for each 32 values. Neither keeps a buffer of recent tokens.
Prints Markdown.
"""

import argparse
import math
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.anchor_drafts import UNSEEN
from benchmarks.facts import say
from kvrail.codec.base import Block, PagedBlock
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.host import host_bytes
from kvrail.codec.papers.kvcomp.codec import KVCompCodec
from kvrail.codec.papers.kvcomp.format import Granularity, KVCompCode, TensorCode
from kvrail.codec.papers.kvcomp.payload import parse, plans_of
from kvrail.config.settings import DEMO_MODEL
from kvrail.engine.model.loader import LoadedModel, load_model
from kvrail.text.samples import read_samples
from kvrail.tools.quality.main import windows_of
from kvrail.tools.quality.measure import Evaluator, Figures, measure
from kvrail.tools.quality.options import PAGE_SIZE, Options

Floats = npt.NDArray[np.float64]
OPERANDS = ("keys", "values")
SWEEPS = {
    ("keys", Granularity.BLOCK): (0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.13),
    ("keys", Granularity.CHANNEL): (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4),
    ("values", Granularity.TOKEN): (0.03, 0.05, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4),
}
"""Relative quantisation scales of Figure 7; those of values are Figure 8's too."""
WIDTHS = (2, 3, 4)
"""KIVI's bits of a value."""
GROUP = 32
"""Values that share KIVI's scale: tokens of a channel of keys, channels of a token of values."""
LENGTHS = (2048, 4096, 8192)
CONTEXT, NEXT = 1024, 128
"""Tokens of Figure 7's contexts, and after them."""
DROP = 0.03
"""The paper's turning points: the accuracy drops by less than this share."""


@dataclass(frozen=True, slots=True)
class Coded:
    """KVComp on one operand; the other stays exact, and does not count."""

    operand: str
    code: TensorCode

    @property
    def name(self) -> str:
        """The paper's name of the granularity."""
        return f"{self.code.granularity.name.title()}Quant {self.code.scale:g}"

    @property
    def _both(self) -> KVCompCode:
        few_symbols = TensorCode(Granularity.BLOCK, 0.5)
        return replace(KVCompCode(few_symbols, few_symbols), **{self.operand: self.code})

    def pass_through(self, pages: PagedBlock) -> float:
        """See `kvrail.tools.quality.lossy.Lossy`."""
        exact, payload = pages.gather(), self._payload(pages)
        KVCompCodec(self.name, self._both).decode(0, [payload.data], pages)
        put(pages, exact, self.operand, getattr(pages.gather(), self.operand))
        return self._size(payload, pages)

    def bits(self, pages: PagedBlock) -> float:
        """Bits a value, with all metadata; the pages stay as they are."""
        return self._size(self._payload(pages), pages)

    def _payload(self, pages: PagedBlock) -> Bytes:
        return host_bytes(self.name, KVCompCodec(self.name, self._both).encode(pages).stages()[0])

    def _size(self, payload: Bytes, pages: PagedBlock) -> float:
        """Bits a value of the operand's part of a payload."""
        part = parse(payload, pages.spec, self._both).parts[OPERANDS.index(self.operand)]
        return 8 * (part.fixed_bytes + part.variable_bytes) / part.plan.values

    def fixed_bits(self, pages: PagedBlock) -> float:
        """Bits a value of the same symbols in a fixed width, with the same minima and scales, of 16 bits each."""
        plan = plans_of(pages.spec, self._both)[OPERANDS.index(self.operand)]
        return width_for(self.code.scale) + 32 * math.prod(plan.unit_shape) / plan.values


@dataclass(frozen=True, slots=True)
class Kivi:
    """KIVI's quantiser on one operand, of `width` bits; the other stays exact."""

    operand: str
    width: int

    @property
    def name(self) -> str:
        """With its width."""
        return f"KIVI {self.width} bits"

    def pass_through(self, pages: PagedBlock) -> float:
        """See `kvrail.tools.quality.lossy.Lossy`."""
        exact = pages.gather()
        tensor, axis = getattr(exact, self.operand), (2, 4)[OPERANDS.index(self.operand)]  # a channel's, a token's
        groups = torch.unflatten(tensor.float(), axis, (-1, GROUP))
        low, most = groups.amin(axis + 1, keepdim=True), 2**self.width - 1
        step = (groups.amax(axis + 1, keepdim=True) - low) / most
        low, step = low.half().float(), step.half().float().clamp_min(2**-24)
        levels = ((groups - low) / step).round().clamp(0, most)
        put(pages, exact, self.operand, (low + levels * step).bfloat16().view(tensor.shape))
        return self.width + 32 / GROUP


def put(pages: PagedBlock, exact: Block, operand: str, tensor: torch.Tensor) -> None:
    """Write a tensor as `operand`, and the other operand as it was."""
    pages.scatter(replace(exact, **{operand: tensor}))


def width_for(scale: float) -> int:
    """Bits of a fixed width for the symbols 0 to 1 / scale."""
    return round(1 / scale).bit_length()


def ratio(bits: float) -> float:
    """Compression ratio of bfloat16."""
    return 16 / bits


def at_same_kl(rows: Sequence[Figures], kl: float) -> float:
    """The ratio of a sweep at a KL, its bits interpolated over log KL; NaN outside of the sweep."""
    known = np.array(sorted((math.log(row.kl), row.bits) for row in rows))
    return ratio(float(np.interp(math.log(kl), known[:, 0], known[:, 1], left=math.nan, right=math.nan)))


def figure7(operand: str, loaded: LoadedModel, windows: Sequence[Sequence[int]]) -> Mapping[str, list[Figures]]:
    """Measure and print what forms of one operand cost; gives rows by form."""
    coded = [
        Coded(operand, TensorCode(of, scale))
        for (on, of), scales in SWEEPS.items()
        if on == operand
        for scale in scales
    ]
    measured = measure(loaded, windows, CONTEXT, [*coded, *(Kivi(operand, width) for width in WIDTHS)])
    forms: dict[str, list[Figures]] = {}
    print(f"\n### Figure 7, {operand}; loss with exact KV {measured.loss:.4f}\n")
    header("form", "bits", "ratio", "top-1", "KL", "change of the loss, %")
    for row in measured.figures:
        forms.setdefault(row.name.split()[0], []).append(row)
        change = f"{100 * (row.loss / measured.loss - 1):+.2f} ± {100 * row.error / measured.loss:.2f}"
        print(f"| {row.name} | {row.bits:.2f} | {ratio(row.bits):.2f} | {row.top1:.3f} | {row.kl:.5f} | {change} |")
    print(f"\nThe coarsest that keep {1 - DROP:.0%} of top-1, and that add less than {DROP:.0%} to the loss:\n")
    header("form", "by top-1", "ratio", "by loss", "ratio")
    for form, rows in forms.items():
        kept = (
            [row for row in rows if row.top1 >= 1 - DROP],
            [row for row in rows if row.loss < (1 + DROP) * measured.loss],
        )
        best = [min(each, key=lambda row: row.bits, default=None) for each in kept]
        print(
            f"| {form} |", *(f"{row.name.split()[1]} | {ratio(row.bits):.2f} |" if row else "none | |" for row in best)
        )
    print("\nRatio at KIVI's KL, interpolated; in brackets over KIVI's:\n")
    swept = [form for form in forms if form != "KIVI"]
    header("", "KL", "ratio", *swept)
    for row in forms["KIVI"]:
        found = [at_same_kl(forms[form], row.kl) for form in swept]
        cells = [f"{each:.2f} ({each / ratio(row.bits) - 1:+.0%})" if each > 0 else "not swept" for each in found]
        print(f"| {row.name} | {row.kl:.5f} | {ratio(row.bits):.2f} | {' | '.join(cells)} |")
    return forms


def figure8(loaded: LoadedModel, texts: Sequence[Sequence[int]]) -> Mapping[str, Floats]:
    """Print the compression ratio of values by scale; gives ratios by length, and fixed widths' and KIVI's."""
    scales = SWEEPS["values", Granularity.TOKEN]
    codes = [Coded("values", TensorCode(Granularity.TOKEN, scale)) for scale in scales]
    sizes = np.zeros((len(codes), len(LENGTHS)))
    evaluator = Evaluator(loaded, LENGTHS[-1], 0)
    for text in texts:
        evaluator.prefill(text)
        for at, length in enumerate(LENGTHS):
            pages = replace(evaluator.context, page_ids=evaluator.context.page_ids[: length // PAGE_SIZE])
            sizes[:, at] += [code.bits(pages) / len(texts) for code in codes]
    found = {f"{length:,} tokens": 16 / sizes[:, at] for at, length in enumerate(LENGTHS)}
    found["fixed width"] = 16 / np.array([code.fixed_bits(evaluator.context) for code in codes])
    found["KIVI"] = 16 / np.array([width_for(scale) + 32 / GROUP for scale in scales])
    print(f"\n### Figure 8: ratio of values, TokenQuant; means over {len(texts)} contexts\n")
    header("scale", *found, f"{LENGTHS[-1]:,} over fixed width", "over KIVI")
    for at, scale in enumerate(scales):
        row = [each[at] for each in found.values()]
        gains = [row[len(LENGTHS) - 1] / other - 1 for other in row[-2:]]
        print(f"| {scale:g} |", *(f"{each:.2f} |" for each in row), *(f"{gain:+.0%} |" for gain in gains))
    return found


def header(*names: str) -> None:
    """Print a table's."""
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")


def plot(path: Path, sweeps: Mapping[str, Mapping[str, list[Figures]]], ratios: Mapping[str, Floats]) -> None:
    """Draw both figures into an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvrail"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7.5), layout="constrained")
    for column, (operand, forms) in zip(axes.T, sweeps.items(), strict=False):
        for axis, measure_of in zip(column, ("top1", "kl"), strict=True):
            for form, rows in forms.items():
                points = [ratio(row.bits) for row in rows], [getattr(row, measure_of) for row in rows]
                axis.plot(*points, marker="o", linestyle="" if form == "KIVI" else "-", label=form)
            axis.set(xlabel=f"compression ratio of {operand}", ylabel={"top1": "top-1", "kl": "KL, nats"}[measure_of])
            axis.grid(alpha=0.3)
        column[0].set_title(f"Figure 7: {operand}")
        column[0].axhline(1 - DROP, color="grey", linestyle=":")
        column[1].set_yscale("log")
        column[1].legend()
    scales = SWEEPS["values", Granularity.TOKEN]
    for name, row in ratios.items():
        coded = name.endswith("tokens")
        axes[0, 2].plot(scales, row, marker="." if coded else "s", linestyle="-" if coded else "--", label=name)
        if coded:
            axes[1, 2].plot(scales, row / ratios["KIVI"], marker=".", label=name)
    axes[0, 2].set(title="Figure 8: values, TokenQuant", xlabel="relative scale", ylabel="compression ratio")
    axes[1, 2].set(xlabel="relative scale", ylabel="KVComp's ratio over KIVI's")
    for axis in axes[:, 2]:
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kvcomp_figures", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--contexts", type=int, default=12, help=f"of {CONTEXT:,} tokens, for Figure 7")
    parser.add_argument("--long", type=int, default=2, help=f"texts of {LENGTHS[-1]:,} tokens, for Figure 8")
    parser.add_argument("--svg", type=Path, help="a plot, where matplotlib is installed")
    args = parser.parse_args()
    say("benchmarks.kvcomp_figures")
    paths = (Path(DEMO_MODEL) / "heldout.txt", *(Path(sysconfig.get_path("purelib")) / name for name in UNSEEN))
    options = Options(DEMO_MODEL, paths, (), (), args.contexts, CONTEXT, NEXT, "bfloat16", "cpu", json=None)
    share = -(-args.contexts // len(paths))
    texts = read_samples(DEMO_MODEL, paths, max(share * options.length, LENGTHS[-1]))
    windows = windows_of([text[: share * options.length] for text in texts], options)
    loaded = load_model(
        DEMO_MODEL, device="cpu", dtype="auto", kv_dtype="bfloat16", page_size=PAGE_SIZE, load_format="safetensors"
    )
    print(f"{len(windows)} contexts of {CONTEXT:,} tokens, {NEXT} next tokens each")
    sweeps = {operand: figure7(operand, loaded, windows) for operand in OPERANDS}
    ratios = figure8(loaded, [text for text in texts if len(text) == LENGTHS[-1]][: args.long])
    if args.svg:
        plot(args.svg, sweeps, ratios)


if __name__ == "__main__":
    main()
