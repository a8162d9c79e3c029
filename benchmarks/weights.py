"""Weights and checkpoints in fewer bytes: ratio and speed of the tensor codec beside ZipNN and zstd.

The figures 6, 8 and 9 of "Lossless Compression of Neural Network Components" (Heilper and Singer, 2025), on our data.
"""

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import codec_report
from benchmarks.codec_tables import Table
from benchmarks.facts import RESULTS, facts_of, hardware
from benchmarks.weights_data import Sample, samples
from kvrail.codec.huffman.codec import HuffmanCodec
from kvrail.codec.huffman.format import FORMATS

GATE = "Nothing is timed before it gave every byte back."
HUFFMAN = HuffmanCodec()
ZSTD_CHUNK = 1 << 20
RUN_BYTES = 1 << 26
"""A run has as many calls as read this many bytes. One call of a small tensor, after another coder's, would show what
it takes to find code that has left the caches; models have tensors one after the other."""
EXPONENTS = {  # shift and mask of a value's exponent
    torch.bfloat16: (7, 0xFF),
    torch.float8_e4m3fn: (3, 0x0F),
    torch.float8_e5m2: (2, 0x1F),
}
PAPER = {
    "Gaussian, bfloat16": "0.667 (opt-1.3b)",
    "Gaussian, float8_e4m3fn": "0.829 (llama-3-70b)",
    "Gaussian, NVFP4 scales": "0.55 (DeepSeek-R1)",
    "delta, step 0.005": "0.38 (amber, best pair)",
}
ZIPNN_TYPES = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"} | {
    name: name for name in ("bfloat16", "float16", "float32")
}


@dataclass(frozen=True, slots=True)
class Coder:
    """A compressor of one sample: both directions, on some threads. prepare: what one call of `encode` is given."""

    name: str
    prepare: Callable[[], Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    size: Callable[[Any], int]
    plain: Callable[[Any], bytes]


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, uint8 [n]."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor. Torch's own would leave its threads spinning for a while, on the cores that are timed."""
    return torch.from_numpy(bytes_of(tensor).copy()).view(tensor.dtype).reshape(tensor.shape)


def ours(sample: Sample, threads: int) -> Coder:
    """The tensor codec."""
    return Coder(
        "huffman",
        lambda: copy_of(sample.tensor),
        lambda tensor: HUFFMAN.encode(tensor, base=sample.base, threads=threads),
        lambda packed: HUFFMAN.decode(packed, base=sample.base, threads=threads),
        len,
        lambda tensor: bytes_of(tensor).tobytes(),
    )


def zipnn(sample: Sample, threads: int) -> Coder | None:
    """ZipNN on as many threads of its own; None where it is not installed."""
    if importlib.util.find_spec("zipnn") is None:
        return None
    from zipnn import ZipNN

    dtype = ZIPNN_TYPES.get(str(sample.tensor.dtype).removeprefix("torch."), "float8_e4m3fn")
    options = {"input_format": "byte", "bytearray_dtype": dtype, "threads": threads}
    raw = bytes_of(sample.tensor).tobytes()
    if sample.base is None:
        return Coder(
            "ZipNN",
            lambda: bytearray(raw),  # it overwrites what it compresses
            lambda copy: ZipNN(**options).compress(copy),
            lambda packed: ZipNN(**options).decompress(packed),
            len,
            bytes,
        )
    base = bytes_of(sample.base).tobytes()
    options["delta_compressed_type"] = "byte"
    return Coder(
        "ZipNN",
        lambda: bytearray(raw),
        lambda copy: ZipNN(**options).compress(copy, delta_second_data=base),
        lambda packed: ZipNN(**options).decompress(packed, delta_second_data=base),
        len,
        bytes,
    )


def zstd(sample: Sample, threads: int) -> Coder | None:
    """Zstd, level 3, chunks of 1 MiB dealt to threads; of a delta, the exclusive or. None where it is not installed."""
    if importlib.util.find_spec("zstandard") is None:
        return None
    import zstandard

    raw = bytes_of(sample.tensor) if sample.base is None else bytes_of(sample.tensor) ^ bytes_of(sample.base)
    pool = ThreadPoolExecutor(threads)
    taken_off = None if sample.base is None else bytes_of(sample.base)

    def chunks() -> list[memoryview]:
        whole = raw.copy()
        return [whole[at : at + ZSTD_CHUNK].data for at in range(0, whole.size, ZSTD_CHUNK)]

    def plain(parts: list[bytes]) -> bytes:
        found = np.frombuffer(b"".join(parts), np.uint8)
        return (found if taken_off is None else found ^ taken_off).tobytes()

    return Coder(
        "zstd, level 3",
        chunks,
        lambda chunks: list(pool.map(lambda chunk: zstandard.ZstdCompressor(level=3).compress(chunk), chunks)),
        lambda parts: list(pool.map(lambda part: zstandard.ZstdDecompressor().decompress(part), parts)),
        lambda parts: sum(map(len, parts)),
        plain,
    )


def entropy_bytes(symbols: np.ndarray) -> float:
    """Order-0 entropy of bytes, in bytes."""
    counts = np.bincount(symbols, minlength=256)
    share = counts[counts > 0] / symbols.size
    return float(-(share * np.log2(share)).sum() * symbols.size / 8)


def fields(sample: Sample) -> tuple[float, float] | None:
    """Entropy of exponents, and of signs with mantissas, in bytes, piece by piece as the codec codes them.

    None for types whose exponent is not looked at here.
    """
    if sample.tensor.dtype not in EXPONENTS:
        return None
    shift, mask = EXPONENTS[sample.tensor.dtype]
    words = bytes_of(sample.tensor) if sample.base is None else bytes_of(sample.tensor) ^ bytes_of(sample.base)
    words = words.view(np.uint16 if sample.tensor.itemsize == 2 else np.uint8)
    chunk = 1 << FORMATS[str(sample.tensor.dtype).removeprefix("torch.")].chunk_bits
    exponent = rest = 0.0
    for at in range(0, words.size, chunk):
        part = words[at : at + chunk]
        exponent += entropy_bytes((part >> shift & mask).astype(np.uint8))
        low, high = part & ((1 << shift) - 1), part >> (8 * part.itemsize - 1)
        rest += entropy_bytes((low | high << shift).astype(np.uint8))
    return exponent, rest


def timed(call: Callable[[Any], Any], prepare: Callable[[], Any], calls: int) -> float:
    """Seconds of a call, the mean of `calls` calls, each of what was prepared just before."""
    seconds = 0.0
    for _ in range(calls):
        given = prepare()
        begun = time.perf_counter()
        call(given)
        seconds += time.perf_counter() - begun
    return seconds / calls


def measure(sample: Sample, threads: int, runs: int) -> list[tuple[str, float, float, float]]:
    """Name, share of the size, GB/s to compress and to decompress of each coder, medians of runs in turn."""
    raw = bytes_of(sample.tensor).tobytes()
    found = [ours(sample, threads), zipnn(sample, threads), zstd(sample, threads)]
    coders = [coder for coder in found if coder is not None]
    packed, calls = [], max(1, RUN_BYTES // len(raw))
    for coder in coders:
        packed.append(coder.encode(coder.prepare()))
        if coder.plain(coder.decode(packed[-1])) != raw:
            raise RuntimeError(f"{coder.name} did not give {sample.name} back")
    times: dict[str, tuple[list[float], list[float]]] = {coder.name: ([], []) for coder in coders}
    for _ in range(runs):
        for coder, coded in zip(coders, packed, strict=True):
            times[coder.name][0].append(timed(coder.encode, coder.prepare, calls))
            times[coder.name][1].append(timed(coder.decode, lambda coded=coded: coded, calls))
    return [
        (
            coder.name,
            coder.size(coded) / len(raw),
            *(len(raw) / statistics.median(each) / 1e9 for each in times[coder.name]),
        )
        for coder, coded in zip(coders, packed, strict=True)
    ]


def rows_of(sample: Sample, threads: Sequence[int], runs: int) -> list[list[str]]:
    """A sample's rows: one a coder."""
    by_threads = [measure(sample, count, runs) for count in threads]
    rows = []
    for place, (name, share, _, _) in enumerate(by_threads[0]):
        rates = [f"{rate:.2f}" for found in by_threads for rate in found[place][2:]]
        rows.append([sample.name, name, f"{share:.4f}", *rates])
    return rows


def field_row(sample: Sample, share: str) -> list[str] | None:
    """A row of the table of entropies."""
    found = fields(sample)
    if found is None:
        return None
    size = sample.tensor.nbytes
    bits = sample.tensor.itemsize * 8
    width = EXPONENTS[sample.tensor.dtype][1].bit_length()
    exponents, rest = size * width / bits, size * (bits - width) / bits
    bound = (found[0] + found[1]) / size
    cells = [
        f"{found[0] / exponents:.3f}",
        f"{found[1] / rest:.3f}",
        f"{bound:.4f}",
        share,
        f"{bound / float(share):.4f}",
    ]
    return [sample.name, *cells, PAPER.get(sample.name, "")]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--values", type=int, default=1 << 24, help="values of a sample")
    parser.add_argument("--runs", type=int, default=7, help="runs of each coder, in turn")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, with commas")
    parser.add_argument("--only", default="", help="samples whose names have this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    threads = [int(count) for count in options.threads.split(",")]
    facts = facts_of("benchmarks.weights", hardware("cpu"))
    rows, field_rows = [], []
    for sample in samples(options.values):
        if options.only in sample.name:
            found = rows_of(sample, threads, options.runs)
            rows += found
            field_rows.append(field_row(sample, found[0][2]))
            print(found, flush=True)
    facts["load at the end"] = f"{os.getloadavg()[0]:.1f}"
    header = ("tensors", "codec", "of the size")
    header += tuple(f"{way} GB/s, {count} thr." for count in threads for way in ("compress", "decompress"))
    notes = (
        f"Medians of {options.runs} runs in turn, each as many calls as take in {RUN_BYTES >> 20} MiB; uncompressed"
        " bytes a second, from memory to memory."
    )
    fields_header = ("tensors", "exponents", "signs, mantissas", "bound", "huffman", "bound over huffman", "paper")
    fields_notes = (
        "Order-0 entropy of each field over its size, chunk by chunk, and of both over the tensor's size. The codec is"
        " below that where it codes fields together, and above where it leaves a plane as it is."
    )
    tables = [
        Table("Sizes and rates", header, rows, notes),
        Table("Fields (Figures 6, 8 and 9)", fields_header, [row for row in field_rows if row], fields_notes),
    ]
    text = codec_report.markdown(facts, "Weights and checkpoints", GATE, tables)
    codec_report.write(options.out, f"weights-{facts['date']}-cpu", facts, text, tables)
    print(text)


if __name__ == "__main__":
    main()
