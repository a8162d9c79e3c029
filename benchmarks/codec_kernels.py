"""The codecs' kernels on a GPU beside the limit that the memory sets.

    python -m benchmarks.codec_kernels [--mib 512] [--runs 20] [--codecs LIST] [--kv LIST] [--tables LIST]

Every row is checked bit for bit first. The limit is the time to move the least bytes that the work can, at the rate
of a copy in the same run. Codecs of one stage read the tensors once and write their payload once, or the reverse. Of
those with stages, encoding reads the tensors and writes all payloads. The first stage is read and the tensors are
written; for the second, both are read and the tensors are written; the third of `lynx-exact` is read while the
tensors are read and written. Times hold all launches and every byte of metadata; those of `splitzip-ans`, whose
payloads stay on the device, also every wait of the host. The KV of a prefill chunk is encoded in one launch, all
layers, keys and values, and timed as a captured graph too. Lists have commas; without one, there is everything.
"""

import argparse
import functools
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import codec_data, codec_report, codec_stage_kernels
from benchmarks.codec_data import Source
from benchmarks.codec_gpu import captured, kernel_trial
from benchmarks.codec_stage_kernels import StepFigures
from benchmarks.codec_tables import Table
from benchmarks.codec_trials import Figures, Trial, measure, ours
from benchmarks.facts import RESULTS, facts_of, hardware
from benchmarks.shapes import card_of
from kvrail.codec import registry
from kvrail.codec.base import Block
from kvrail.codec.splitzip.tiles.format import WindowCode

FIXED, CHANNEL = WindowCode(4, False), WindowCode(3, True)
ONE_STAGE = ("splitzip", "splitzip-channel")
ENTROPY = "splitzip-ans"
CODECS = (*ONE_STAGE, ENTROPY, *codec_stage_kernels.CODECS)
TABLES = ("kernels", "chunk")
SOURCES: dict[str, Callable[[float], Source]] = {
    "synthetic-0.04%": functools.partial(codec_data.synthetic, escapes=0.0004),
    "synthetic-0.16%": functools.partial(codec_data.synthetic, escapes=0.0016),
    "real": functools.partial(codec_data.real, "bfloat16"),
    "e5m2-0.04%": lambda mib: codec_data.synthetic(mib / 2, 0.0004, torch.float8_e5m2),
    "e5m2-0.16%": lambda mib: codec_data.synthetic(mib / 2, 0.0016, torch.float8_e5m2),
}
"""KV by name, given the MiB of bfloat16; of eight bits there are as many values."""
CHUNK_LAYERS, CHUNK_TOKENS, CHUNK_HEADS, CHUNK_DIM = 36, 2048, 8, 128
"""KV that an 8B-class model makes of one prefill chunk."""
HEADER = ("KV", "codec", "MiB", "ratio", "escapes", "encode GB/s", "of limit", "decode GB/s", "of limit")
STEPS = ("KV", "codec", "step", "bytes moved a value", "GB/s", "of limit", *(f"of {name}" for name in ONE_STAGE))
STEP_NOTES = (
    "anchor: the first stage into pages. second: both stages into pages, whose contents are not read. encode the third,"
    " restore: what leads from there to the exact values, its escapes left to the host. The last columns are of the"
    " rate at which codecs of one stage encode or decode the same KV."
)
HOST_CALLS = 50


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


def trials(block: Block, codecs: Collection[str]) -> Iterator[Trial]:
    """Those of one stage that are in `codecs`, `splitzip` with the windows that fit the block."""
    if "splitzip" in codecs:
        yield kernel_trial("splitzip", block, FIXED, codec_data.Windows(block, FIXED.window, shared=False))
    if "splitzip-channel" in codecs:
        yield kernel_trial("splitzip-channel", block, CHANNEL, None)
    if ENTROPY in codecs:
        yield ours(ENTROPY, registry.get(ENTROPY), block, on_device=True)


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


def step_row(source: str, found: StepFigures, beside: Collection[Figures]) -> list[str]:
    """The cells of one step; beside: of the codecs of one stage, on the same KV."""
    encodes = found.step.startswith("encode")
    rates = {each.name: each.encode_rate if encodes else each.decode_rate for each in beside}
    return [
        source,
        found.codec,
        found.step,
        f"{found.moved_bytes / (found.raw_bytes // 2):.2f}",
        f"{found.rate:,.0f}",
        f"{found.rate / found.limit:.3f}",
        *(f"{found.rate / rates[name]:.2f}" if name in rates else "" for name in ONE_STAGE),
    ]


def large(mib: float, runs: int, codecs: Collection[str], names: Collection[str]) -> list[Table]:
    """All codecs on the KV in `names`; those with stages on what has 16 bits."""
    rows, figures, step_rows = [], [], []
    for name in names:
        source = on_gpu(SOURCES[name](mib))
        beside = []
        for trial in trials(source.block, codecs):
            beside.append(measure(trial, runs))
            rows.append(row(source.name, beside[-1]))
            print(" | ".join(rows[-1]), flush=True)
        figures += beside
        for codec in codec_stage_kernels.CODECS if source.block.keys.itemsize == 2 else ():
            for step in codec_stage_kernels.measure(codec, source.block, runs) if codec in codecs else ():
                step_rows.append(step_row(source.name, step, beside))
                print(" | ".join(step_rows[-1]), flush=True)
    notes = ""
    if figures:
        copies = sorted(2 * each.copy_rate for each in figures)
        notes = f"Copies moved {copies[0]:,.0f} to {copies[-1]:,.0f} GB/s, read and written."
    tables = [
        Table("Kernels", HEADER, rows, notes, figures),
        Table("Kernels of the codecs with stages", STEPS, step_rows, STEP_NOTES),
    ]
    return [table for table in tables if table.rows]


def chunk(runs: int, codecs: Collection[str]) -> Table:
    """One prefill chunk: time on the device, its limit, and what the host needs to launch it."""
    source = prefill_chunk(on_gpu(codec_data.synthetic(64, 0.0016)))
    rows, figures = [], []
    for trial in trials(source.block, set(codecs) - {ENTROPY}):
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


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Options; ends with a message that lists the names there are, where one is unknown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codec_kernels", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--mib", type=float, default=512, help="size of the bfloat16 KV")
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each")
    for option, known in (("codecs", CODECS), ("kv", tuple(SOURCES)), ("tables", TABLES)):
        parser.add_argument(f"--{option}", default=",".join(known), help=f"of {', '.join(known)}".replace("%", "%%"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    for option, known in (("codecs", CODECS), ("kv", tuple(SOURCES)), ("tables", TABLES)):
        chosen = getattr(options, option).split(",")
        if unknown := [name for name in chosen if name not in known]:
            parser.error(f"--{option} has {', '.join(unknown)}; choose of {', '.join(known)}")
        setattr(options, option, chosen)
    return options


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse(argv)
    device = torch.device("cuda")
    facts = facts_of("benchmarks.codec_kernels", hardware("cuda"))
    tables = []
    with torch.cuda.stream(torch.cuda.Stream()):
        if "kernels" in options.tables:
            tables += large(options.mib, options.runs, options.codecs, options.kv)
        if "chunk" in options.tables and set(ONE_STAGE) & set(options.codecs):
            tables.append(chunk(options.runs, options.codecs))
    kind = card_of(torch.cuda.get_device_name(device))
    text = codec_report.markdown(facts, "Kernels of the codecs", "Every row was checked bit for bit first.", tables)
    codec_report.write(options.out, f"codec-kernels-{facts['date']}-{kind}", facts, text, tables)
    print(text)


if __name__ == "__main__":
    main()
