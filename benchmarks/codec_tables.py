"""The tables of SplitZip's paper, measured again with the codecs and the KV here, beside the paper's figures.

Its figures are of an H200 with KV of Qwen3-32B, kernels alone. Ours are of the machine that runs this: from pages to a
payload on the host and back, as workers do it; on a GPU, where it says so and in all but tables 2, kernels alone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks import codec_gpu
from benchmarks.codec_data import Source, Windows, histograms
from benchmarks.codec_trials import Figures, Trial, measure, ours
from kvrail.codec.base import Block
from kvrail.codec.splitzip.one_stage.codec import WindowCodec
from kvrail.codec.splitzip.one_stage.exponents import best_set, best_window, coverage, set_coverage
from kvrail.codec.splitzip.tiles.format import WindowCode

CHUNKS = (256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a report; cells are text, figures: what of it was measured."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: str = ""
    figures: Sequence[Figures] = field(default=())


def variant(name: str, block: Block, code: WindowCode, *, shared: bool = False) -> Trial:
    """A trial of `code`, on a GPU of its kernels alone; fixed windows are those that fit `block` best."""
    windows = None if code.per_channel else Windows(block, code.window, shared=shared)
    if block.keys.is_cuda:
        return codec_gpu.kernel_trial(name, block, code, windows)
    return ours(name, WindowCodec(name, {block.spec.dtype: code}, windows), block)


def rate_cells(figures: Figures) -> list[str]:
    """Ratio, escapes, and both rates, each with its share of the copy rate."""
    escapes = "" if math.isnan(figures.escapes) else f"{figures.escapes:.2%}"
    cells = [f"{figures.ratio:.3f}", escapes]
    for rate in (figures.encode_rate, figures.decode_rate):
        cells += [f"{rate:.2f}", f"{rate / figures.copy_rate:.2f}"]
    return cells


RATES = ("ratio", "escapes", "encode GB/s", "of copy", "decode GB/s", "of copy")


def table_of(title: str, found: Iterable[Figures], paper: dict[str, str], header: str, notes: str = "") -> Table:
    """Figures by name, the paper's words beside them."""
    figures = list(found)
    rows = [[each.name, *rate_cells(each), paper.get(each.name, "")] for each in figures]
    return Table(title, (header, *RATES, "paper, H200: ratio, encode, decode"), rows, notes, figures)


def codecs(source: Source, trials: Iterable[Trial], runs: int) -> Table:
    """Table 2: codecs beside their peers on one source."""
    paper = {
        "splitzip": "1.324, 613, 2,182",
        "ZipNN": "1.515, 1.2, 1.7 (CPU)",
        "nvCOMP LZ4": "1.019",
        "nvCOMP Cascaded": "1.000",
        "nvCOMP Bitcomp": "1.056",
    }
    found = [measure(trial, runs) for trial in trials]
    size = source.block.spec.raw_bytes / (1 << 20)
    copy = np.median([each.copy_rate for each in found])
    notes = f"{source.note}; {size:g} MiB. A copy runs at {copy:.1f} GB/s (median over the rows)."
    return table_of(f"Codecs on {source.name} KV (Table 2)", found, paper, "codec", notes)


def sizes(found: Sequence[Figures]) -> Table:
    """Speed by size of the block."""
    rows = [[f"{each.raw_bytes / (1 << 20):g}", each.name, *rate_cells(each)] for each in found]
    notes = "Real KV. Figures of small blocks hold what a call costs by itself."
    return Table("Sizes", ("MiB", "codec", *RATES), rows, notes, found)


def code_widths(block: Block, runs: int) -> Table:
    """Table 3: windows of 8 and of 16."""
    trials = [
        variant("fixed, 8 exponents, 3 bits", block, WindowCode(3, False)),
        variant("fixed, 16 exponents, 4 bits", block, WindowCode(4, False)),
    ]
    paper = {trials[0].name: "–, 440, 711; 7.89 %", trials[1].name: "1.324, 613, 2,182; 0.16 %"}
    found = [measure(trial, runs) for trial in trials]
    return table_of("Code width (Table 3)", found, paper, "code")


def granularity(block: Block, runs: int) -> Table:
    """Table 5: how much of the KV shares a window."""
    trials = [
        variant("tensor: one window, 16", block, WindowCode(4, False), shared=True),
        variant("layer: a window each, 16", block, WindowCode(4, False)),
        variant("channel of a page: a window each, 16", block, WindowCode(4, True)),
        variant("channel of a page: a window each, 8", block, WindowCode(3, True)),
    ]
    paper = {trials[0].name: "1.324, 613, 2,182", trials[2].name: "channel: 0.10 % escapes, 0.020, 0.060"}
    found = [measure(trial, runs) for trial in trials]
    notes = (
        "A channel's window here ends at its largest exponent, which is stored; the paper stores a codebook a channel."
    )
    return table_of("Granularity of the windows (Table 5)", found, paper, "granularity", notes)


def sentinel(block: Block, runs: int) -> Table:
    """Table 6: positions of escapes against a code that marks them; the latter by arithmetic on the same data."""
    found = measure(variant("16 and positions", block, WindowCode(4, False)), runs)
    values = block.spec.raw_bytes // 2
    tensors = [
        (layer, tensor.numel() // len(tensor)) for tensor in (block.keys, block.values) for layer in histograms(tensor)
    ]
    escaped = sum(round((1 - coverage(each, best_window(each, 15), 15)) * count) for each, count in tensors)
    payload = values + values // 2 + escaped + 4 * -(-values // 4096)
    marked = ["15 and a mark", f"{2 * values / payload:.3f}", f"{escaped / values:.2%}", "", "", "", ""]
    rows = [[found.name, *rate_cells(found), "1.324, 613, 2,182; 0.16 %"], [*marked, "396, 621; 0.27 %"]]
    notes = (
        "The mark's ratio is arithmetic on the same data: one byte an escape and an offset of four bytes for each 4,096"
        " values. Its speed is not measured: we have no such codec."
    )
    header = ("escapes", *RATES, "paper, H200: ratio, encode, decode; escapes")
    return Table("Positions of escapes or a mark (Table 6)", header, rows, notes, [found])


def dynamic(block: Block, runs: int) -> Table:
    """Table 7: windows known beforehand or found for each block."""
    code, name = WindowCode(4, False), "histogram and windows for each block"
    known = variant("windows known", block, code)

    def encode() -> Any:
        Windows(block, code.window, shared=False)
        return known.encode()

    found_each = replace(known, name=name, encode=encode)
    found = [measure(known, runs), measure(found_each, runs)]
    paper = {known.name: "1.324, 613, 2,182", name: "1.324, 80.7, 2,197"}
    notes = "The histogram is `kvrail.codec.splitzip.one_stage.exponents.histogram` on a CPU, torch.bincount on a GPU."
    return table_of("Calibration beforehand (Table 7)", found, paper, "windows", notes)


def float8(blocks: dict[str, Block], runs: int) -> Table:
    """Table 9: eight-bit KV. blocks: by element type."""
    found = []
    for dtype, title, bits, per_channel in (
        ("float8_e5m2", "E5M2, fixed 16", 4, False),
        ("float8_e5m2", "E5M2, fixed 8", 3, False),
        ("float8_e5m2", "E5M2, channel 8", 3, True),
        ("float8_e4m3fn", "E4M3, fixed 8", 3, False),
        ("float8_e4m3fn", "E4M3, channel 8", 3, True),
    ):
        found.append(measure(variant(title, blocks[dtype], WindowCode(bits, per_channel)), runs))
    paper = {
        "E5M2, fixed 16": "1.14, 250, 565; 0.16 %",
        "E5M2, fixed 8": "222, 341; 7.72 %",
        "E4M3, fixed 8": "below 1, 220, 367; 7.83 %",
    }
    notes = (
        "Ratio to the eight-bit KV with its scales; rates are of its bytes. A tensor that a code would not make smaller"
        " travels raw, hence no ratio below 1 but for the header."
    )
    return table_of("Eight-bit KV (Table 9)", found, paper, "code", notes)


def chunks(block: Block, runs: int) -> list[Table]:
    """Figure 6: size of a tile, for both codes."""
    paper = {"256": "351 encode", "1024": "613, 2,182", "2048": "about as 1,024", "16384": "sharp slowdown"}
    tables = []
    for title, bits, per_channel in (("fixed, 16", 4, False), ("channel, 8", 3, True)):
        found = [measure(variant(str(size), block, WindowCode(bits, per_channel, size)), runs) for size in CHUNKS]
        beside = {} if per_channel else paper
        tables.append(table_of(f"Values of a tile, {title} (Figure 6)", found, beside, "chunk"))
    return tables


def transfer_of_windows(sources: dict[str, Block]) -> Table:
    """Table 4: coverage of windows of 16 found on one text and used on another; one a layer, keys and values."""
    rows = []
    for name, block in sources.items():
        cells = []
        for other in sources.values():
            pairs = [
                (there, best_window(here, 16))
                for kind in ("keys", "values")
                for here, there in zip(histograms(getattr(other, kind)), histograms(getattr(block, kind)), strict=True)
            ]
            cells.append(f"{np.mean([coverage(found, top, 16) for found, top in pairs]):.3%}")
        rows.append([name, *cells])
    notes = "Rows: text that is coded; columns: text that the windows were found on. The paper: 99.3 to 99.9 %."
    return Table("Coverage across texts (Table 4)", ("coded", *sources), rows, notes)


def layers(block: Block) -> Table:
    """Figure 5: coverage by layer, of one window for all layers, of one a layer, and of the best sixteen exponents."""
    columns: list[list[float]] = []
    for tensor in (block.keys, block.values):
        found = histograms(tensor)
        shared = best_window(found.sum(axis=0), 16)
        columns += [
            [coverage(each, shared, 16) for each in found],
            [coverage(each, best_window(each, 16), 16) for each in found],
            [set_coverage(each, best_set(each, 16)) for each in found],
        ]
    rows = [[str(layer), *(f"{cell:.3%}" for cell in cells)] for layer, cells in enumerate(zip(*columns, strict=True))]
    header = ("layer", *(f"{kind}: {of}" for kind in ("K", "V") for of in ("shared window", "own window", "best 16")))
    notes = "Real KV. The paper, Qwen3-32B, shared set: keys above 99.0 %, values above 98.77 % in every layer."
    return Table("Coverage by layer (Figure 5)", header, rows, notes)
