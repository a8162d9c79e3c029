"""Compressors on the CPU, beside ours: the same tensors in chunks of 1 MiB, on as many threads."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from benchmarks.codec_trials import Trial, poisoned
from kvrail.codec.base import Block

CHUNK = 1 << 20
LENGTH_BYTES = 4
"""What a container would spend to say how long a compressed chunk is."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A compressor of byte strings; module: what has to be installed. make: for an element type, both directions."""

    name: str
    module: str
    make: Callable[[str], tuple[Callable[[memoryview], bytes], Callable[[bytes], bytes]]]


def _zstd(dtype: str) -> tuple[Callable[[memoryview], bytes], Callable[[bytes], bytes]]:
    import zstandard

    return (
        lambda chunk: zstandard.ZstdCompressor(level=1).compress(chunk),
        lambda coded: zstandard.ZstdDecompressor().decompress(coded),
    )


def _lz4(dtype: str) -> tuple[Callable[[memoryview], bytes], Callable[[bytes], bytes]]:
    import lz4.block

    return lz4.block.compress, lz4.block.decompress


def _zipnn(dtype: str) -> tuple[Callable[[memoryview], bytes], Callable[[bytes], bytes]]:
    from zipnn import ZipNN

    def coder() -> ZipNN:
        return ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1)

    # It overwrites what it compresses, so it gets a copy.
    return lambda chunk: coder().compress(bytearray(chunk)), lambda coded: coder().decompress(coded)


PEERS = (Peer("ZipNN", "zipnn", _zipnn), Peer("zstd, level 1", "zstandard", _zstd), Peer("LZ4", "lz4", _lz4))


def peers(block: Block) -> Iterator[Trial]:
    """A trial of each peer that is installed; of the others, a printed line."""
    for peer in PEERS:
        if importlib.util.find_spec(peer.module) is None:
            print(f"{peer.name}: not installed, left out (pip install {peer.module})")
            continue
        yield _trial(peer, block)


def _trial(peer: Peer, block: Block) -> Trial:
    dtype = str(block.keys.dtype).removeprefix("torch.")
    compress, decompress = peer.make(dtype)
    out, threads = poisoned(block), ThreadPoolExecutor(torch.get_num_threads())
    chunks, targets = _chunks(block), _chunks(out)

    def restore(coded: bytes, target: memoryview) -> None:
        target[:] = decompress(coded)

    def decode(payload: Sequence[bytes]) -> None:
        list(threads.map(restore, payload, targets))

    return Trial(
        peer.name,
        block,
        out,
        encode=lambda: list(threads.map(compress, chunks)),
        decode=decode,
        size=lambda payload: sum(len(coded) + LENGTH_BYTES for coded in payload),
    )


def _chunks(block: Block) -> list[memoryview]:
    views = [tensor.view(torch.uint8).numpy().reshape(-1).data for tensor in block.tensors()]
    return [view[start : start + CHUNK] for view in views for start in range(0, len(view), CHUNK)]
