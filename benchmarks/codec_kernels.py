"""SplitZip's kernels on a GPU beside the limit that the memory sets.

    python -m benchmarks.codec_kernels [--mib 512] [--runs 20] [--out FOLDER]

Every row is checked bit for bit first. The limit is the time to read the tensors once and to write their payload once,
or the reverse, at the rate of a copy in the same run. Times hold all launches and every byte of metadata. The KV of a
prefill chunk is encoded in one launch, all layers, keys and values, and timed as a captured graph too.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import codec_data, codec_report
from benchmarks.codec_data import Source
from benchmarks.codec_gpu import captured, kernel_trial
from benchmarks.codec_tables import Table
from benchmarks.codec_trials import Figures, Trial, measure
from codec.base import Block
from codec.splitzip.formats import WindowCode

FIXED, CHANNEL = WindowCode(4, False), WindowCode(3, True)
CHUNK_LAYERS, CHUNK_TOKENS, CHUNK_HEADS, CHUNK_DIM = 36, 2048, 8, 128
"""KV that an 8B-class model makes of one prefill chunk."""
HEADER = ("KV", "codec", "MiB", "ratio", "escapes", "encode GB/s", "of limit", "decode GB/s", "of limit")
HOST_CALLS = 50


def sources(mib: float) -> Iterator[Source]:
    """KV on the GPU: `mib` MiB of bfloat16, and as many eight-bit values."""
    for escapes in (0.0004, 0.0016):
        yield on_gpu(codec_data.synthetic(mib, escapes))
    yield on_gpu(codec_data.real("bfloat16", mib))
    for escapes in (0.0004, 0.0016):
        yield on_gpu(codec_data.synthetic(mib / 2, escapes, torch.float8_e5m2))


def on_gpu(source: Source) -> Source:
    """The same KV in device memory."""
    return Source(source.name, source.note, Block(*(tensor.cuda() for tensor in source.block.tensors())))


def prefill_chunk(source: Source) -> Source:
    """The source's values as those of all layers of a prefill chunk."""
    shape = CHUNK_LAYERS, CHUNK_TOKENS // codec_data.PAGE_SIZE, codec_data.PAGE_SIZE, CHUNK_HEADS, CHUNK_DIM
    count = torch.Size(shape).numel()
    flat = [tensor.flatten() for tensor in source.block.tensors()]
    tensors = [each.repeat(-(-count // each.numel()))[:count].view(shape) for each in flat]
    return Source(f"{source.name}, prefill chunk", source.note, Block(*tensors))


def trials(block: Block) -> Iterator[Trial]:
    """Both codecs, `splitzip` with the windows that fit the block."""
    yield kernel_trial("splitzip", block, FIXED, codec_data.Windows(block, FIXED.window, shared=False))
    yield kernel_trial("splitzip-channel", block, CHANNEL, None)


def row(source: str, found: Figures) -> list[str]:
    """The cells of one measurement."""
    rates = [
        cell
        for rate in (found.encode_rate, found.decode_rate)
        for cell in (f"{rate:,.0f}", f"{rate / found.limit:.3f}")
    ]
    return [
        source,
        found.name,
        f"{found.raw_bytes / (1 << 20):g}",
        f"{found.ratio:.3f}",
        f"{found.escapes:.2%}",
        *rates,
    ]


def large(mib: float, runs: int) -> Table:
    """Both codecs on all sources."""
    rows, figures = [], []
    for source in sources(mib):
        for trial in trials(source.block):
            figures.append(measure(trial, runs))
            rows.append(row(source.name, figures[-1]))
            print(" | ".join(rows[-1]), flush=True)
    copies = sorted(2 * each.copy_rate for each in figures)
    notes = f"Copies moved {copies[0]:,.0f} to {copies[-1]:,.0f} GB/s, read and written."
    return Table("Kernels", HEADER, rows, notes, figures)


def chunk(runs: int) -> Table:
    """One prefill chunk: time on the device, its limit, and what the host needs to launch it."""
    source = prefill_chunk(on_gpu(codec_data.synthetic(64, 0.0016)))
    rows, figures = [], []
    for trial in trials(source.block):
        host = [host_seconds(call) for call in (trial.encode, lambda trial=trial: trial.decode(None))]
        for each in (trial, captured(trial)):
            found = measure(each, runs)
            limit = found.raw_bytes / found.limit / 1e3
            cells = []
            for seconds, own in zip((found.encode_seconds, found.decode_seconds), host, strict=True):
                launch = f"{1e6 * own:.0f}" if each is trial else ""
                cells += [f"{1e6 * seconds:.0f}", f"{1e6 * seconds / limit:.2f}", launch]
            rows.append([each.name, f"{found.raw_bytes / (1 << 20):g}", f"{limit:.0f}", *cells])
            figures.append(found)
            print(" | ".join(rows[-1]), flush=True)
    header = ("codec", "MiB", "limit µs", "encode µs", "of limit", "host µs", "decode µs", "of limit", "host µs")
    notes = f"{CHUNK_LAYERS} layers of {CHUNK_TOKENS:,} tokens, {CHUNK_HEADS} KV heads of {CHUNK_DIM}, in one call."
    return Table("One prefill chunk of an 8B-class model", header, rows, notes, figures)


def host_seconds(call: Callable[[], Any]) -> float:
    """Mean time that the host needs for a call while the device is behind."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    seconds = (time.perf_counter() - begin) / HOST_CALLS
    torch.cuda.synchronize()
    return seconds


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codec_kernels", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--mib", type=float, default=512, help="size of the bfloat16 KV")
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each")
    parser.add_argument("--out", type=Path, default=codec_report.RESULTS)
    options = parser.parse_args(argv)
    device = torch.device("cuda")
    facts = codec_report.head(device, "benchmarks.codec_kernels")
    with torch.cuda.stream(torch.cuda.Stream()):
        tables = [large(options.mib, options.runs), chunk(options.runs)]
    kind = torch.cuda.get_device_name(device).split()[-1].lower()
    text = codec_report.markdown(facts, "Kernels of the window code", "Every row gave every bit back first.", tables)
    codec_report.write(options.out, f"codec-kernels-{facts['date']}-{kind}", facts, text, tables)
    print(text)


if __name__ == "__main__":
    main()
