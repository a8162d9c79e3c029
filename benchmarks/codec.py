"""Codecs beside their peers: ratio, speed, and the links on which they pay.

    python -m benchmarks.codec [--device cpu | cuda] [--mib 64] [--sizes 2,8,64,512] [--runs 20] [--out FOLDER]

Correctness first: each codec and each peer must give every bit back, into poisoned pages, or nothing of it is timed.
The tables are those of SplitZip's paper (2 to 7, 9, Figures 5 and 6), measured again on real KV of the demo model, on
synthetic KV with the paper's rate of escapes and on that of a random model of Qwen3-8B's shape. Peers that are not
installed are left out, with a line that says so. The results are NAME.md and NAME.json in FOLDER.
"""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks import codec_breakeven, codec_data, codec_gpu, codec_gpu_peers, codec_peers, codec_report, codec_tables
from benchmarks.codec_tables import Table
from benchmarks.codec_trials import Figures, Trial, measure, ours
from benchmarks.facts import RESULTS, facts_of, hardware
from benchmarks.shapes import card_of
from kvrail.codec import registry
from kvrail.codec.base import Block
from kvrail.codec.splitzip.tiles.format import WindowCode

GATE = "Every codec and every peer gave every bit back before it was timed."
FITTED = "splitzip, windows of this KV"
SMALL_RUNS = 100
"""Runs of blocks of up to 8 MiB, which are short."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codec", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--mib", type=float, help="size of the block that most tables take; 64 on a CPU, 512 on a GPU")
    parser.add_argument("--sizes", default="2,8,64,512", help="MiB of the table of sizes, with commas")
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each codec")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def on(block: Block, device: str) -> Block:
    """The block on a device."""
    return Block(*(tensor.to(device) for tensor in block.tensors()))


def registered(block: Block) -> Iterator[Trial]:
    """Every exact codec of one stage that workers can use for such KV, with the codebook that ships."""
    for name in registry.names():
        codec = registry.get(name)
        if codec.exact and codec.num_stages == 1 and block.spec.dtype in codec.dtypes:
            yield ours(name, codec, block)


def all_codecs(block: Block, *, peers: bool) -> Iterator[Trial]:
    """Ours and the others."""
    yield from registered(block)
    yield codec_tables.variant(FITTED, block, WindowCode(4, False))
    if block.keys.is_cuda:
        yield ours("splitzip-ans, payload on the device", registry.get("splitzip-ans"), block, on_device=True)
        yield from codec_gpu.kernels(block)
        if peers:
            yield from codec_gpu_peers.peers(block)
    elif peers:
        yield from codec_peers.peers(block)


def sizes(block: Block, wanted: Sequence[float], runs: int) -> Iterator[Figures]:
    """Ours at each size."""
    for mib in wanted:
        cut = codec_data.tiled(block, mib)
        trials = [*registered(cut), *(codec_gpu.kernels(cut) if cut.keys.is_cuda else ())]
        for trial in trials:
            yield measure(trial, SMALL_RUNS if mib <= 8 else runs)


def make_tables(options: argparse.Namespace) -> list[Table]:
    """All tables."""
    runs, device = options.runs, options.device
    mib = options.mib or (512 if device == "cuda" else 64)
    real = codec_data.real("bfloat16", mib)
    synthetic = [codec_data.synthetic(mib, escapes) for escapes in (0.0016, 0.0004)]
    sources = [real, *synthetic, codec_data.random_8b(min(mib, codec_data.RANDOM_MIB))]
    tables = []
    for source in sources:
        print(f"{source.name}: {source.note}", flush=True)
        moved = codec_data.Source(source.name, source.note, on(source.block, device))
        tables.append(codec_tables.codecs(moved, all_codecs(moved.block, peers=not options.no_peers), runs))
    coded = [each for each in tables[0].figures if each.name not in ("raw", FITTED) and each.ratio > 1]
    tables.append(codec_breakeven.table(coded, real.name))
    tables += [codec_breakeven.speedups(coded, pipelined=pipelined) for pipelined in (True, False)]
    block, even = on(real.block, device), on(synthetic[0].block, device)
    tables.append(codec_tables.sizes(list(sizes(block, [float(each) for each in options.sizes.split(",")], runs))))
    print("ablations", flush=True)
    for table in (codec_tables.code_widths, codec_tables.granularity, codec_tables.sentinel, codec_tables.dynamic):
        tables.append(table(even, runs))
    eights = {dtype: on(codec_data.real(dtype, mib / 2).block, device) for dtype in ("float8_e5m2", "float8_e4m3fn")}
    tables.append(codec_tables.float8(eights, runs))
    texts = {name: codec_data.real("bfloat16", 16, name).block for name in ("heldout", "docs", "code")}
    tables += [
        *codec_tables.chunks(even, runs),
        codec_tables.transfer_of_windows(texts),
        codec_tables.layers(real.block),
    ]
    return tables


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse(argv)
    device = torch.device(options.device)
    facts = facts_of("benchmarks.codec", hardware(options.device))
    with torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext():
        tables = make_tables(options)
    kind = "cpu" if device.type == "cpu" else card_of(torch.cuda.get_device_name(device))
    name = f"codec-{facts['date']}-{kind}"
    text = codec_report.markdown(facts, "KV codecs", GATE, tables)
    codec_report.write(options.out, name, facts, text, tables)
    print(text)


if __name__ == "__main__":
    main()
