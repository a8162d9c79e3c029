"""One codec on one block: first whether every bit returns, then how fast.

A rate is uncompressed bytes a second, in GB/s. Each run of a codec is followed by a plain copy of the same tensors on
the same device, so that a rate stands beside the copy rate of the same minute. Medians of all runs.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrail.codec.base import Block, Codec, PagedBlock

POISON = 0xA5
FLUSH_BYTES = 256 << 20
"""More than any cache holds: this much is overwritten between runs on a GPU."""
HEAD_START_CYCLES = 1_000_000
"""About half a millisecond, for which a GPU waits before each run, so that the host has launched all of it."""


class GateError(Exception):
    """A codec did not give every bit back; nothing of it is timed."""


@dataclass(slots=True)
class Trial:
    """A codec at work on `block`.

    encode: gives what `decode` takes and writes into `out`; size: bytes of it, all metadata counted; escapes: share of
    values that no code covered, where the codec has such; collect: brings what was decoded into `out`, untimed.
    """

    name: str
    block: Block
    out: Block
    encode: Callable[[], Any]
    decode: Callable[[Any], None]
    size: Callable[[Any], int]
    escapes: Callable[[], float] = lambda: math.nan
    collect: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Figures:
    """What a trial came to; seconds are medians for the whole block."""

    name: str
    raw_bytes: int
    payload_bytes: int
    encode_seconds: float
    decode_seconds: float
    copy_seconds: float
    escapes: float

    @property
    def ratio(self) -> float:
        """Uncompressed over compressed bytes, all metadata counted."""
        return self.raw_bytes / self.payload_bytes

    @property
    def encode_rate(self) -> float:
        """GB/s."""
        return self.raw_bytes / self.encode_seconds / 1e9

    @property
    def decode_rate(self) -> float:
        """GB/s."""
        return self.raw_bytes / self.decode_seconds / 1e9

    @property
    def copy_rate(self) -> float:
        """GB/s that a copy reads; it writes as many."""
        return self.raw_bytes / self.copy_seconds / 1e9

    @property
    def limit(self) -> float:
        """GB/s of a code that moves the raw bytes once and its payload once, at the copy's speed."""
        return self.copy_rate * 2 / (1 + 1 / self.ratio)


def poisoned(block: Block) -> Block:
    """Tensors like the block's, of bytes that mean nothing."""
    tensors = [torch.empty_like(tensor) for tensor in block.tensors()]
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(POISON)
    return Block(*tensors)


def ours(name: str, codec: Codec, block: Block, *, on_device: bool = False) -> Trial:
    """A codec of this project, as workers call it: pages to a payload on the host, or on their device, and back."""
    out = poisoned(block)
    source, target = PagedBlock.whole(block), PagedBlock.whole(out)

    def escapes() -> float:
        encoding = codec.encode(source)
        encoding.stages()
        stats = encoding.stats()
        return stats.escapes / stats.values

    return Trial(
        name,
        block,
        out,
        encode=lambda: codec.encode(source, on_device=on_device).stages()[0],
        decode=lambda payload: codec.decode(0, [payload], target),
        size=lambda payload: payload.nbytes,
        escapes=escapes,
    )


def check(trial: Trial) -> int:
    """Encode, decode into poisoned pages and compare every bit; bytes of the payload. Raises GateError."""
    payload = trial.encode()
    trial.decode(payload)
    trial.collect()
    for number, (sent, got) in enumerate(zip(trial.block.tensors(), trial.out.tensors(), strict=True)):
        if not torch.equal(sent.view(torch.uint8), got.view(torch.uint8)):
            wrong = int((sent.view(torch.uint8) != got.view(torch.uint8)).sum())
            raise GateError(f"{trial.name} is not lossless: {wrong} bytes of tensor {number} differ; nothing was timed")
    return trial.size(payload)


def measure(trial: Trial, runs: int) -> Figures:
    """The gate, then `runs` timed runs of encode, decode and copy in turn; raises GateError."""
    size, payload = check(trial), trial.encode()
    seconds = timed(trial.block, (trial.encode, lambda: trial.decode(payload)), runs)
    return Figures(trial.name, trial.block.spec.raw_bytes, size, *seconds, escapes=trial.escapes())


def timed(block: Block, calls: Sequence[Callable[[], Any]], runs: int) -> list[float]:
    """Seconds of each call and, last, of a copy of the block: medians of `runs` runs, all of them in turn."""
    clock = _CudaClock() if block.keys.is_cuda else _Clock()
    in_turn = (*calls, _copier(block))
    readings = [[clock.time(call) for call in in_turn] for _ in range(runs + 2)]
    seconds = [[reading() for reading in row] for row in readings[2:]]
    return [statistics.median(column) for column in zip(*seconds, strict=True)]


def _copier(block: Block) -> Callable[[], Any]:
    """Copies the block's tensors: on a GPU one after the other, on a CPU each in as many threads as codecs use."""
    sources, targets = block.tensors(), [torch.empty_like(tensor) for tensor in block.tensors()]
    if block.keys.is_cuda:
        return lambda: [target.copy_(source) for source, target in zip(sources, targets, strict=True)]
    count = torch.get_num_threads()
    threads = ThreadPoolExecutor(count)
    parts = [
        pair
        for source, target in zip(sources, targets, strict=True)
        for pair in zip(*(np.array_split(_flat(tensor), count) for tensor in (target, source)), strict=True)
    ]
    return lambda: list(threads.map(np.copyto, *zip(*parts, strict=True)))


def _flat(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.view(torch.uint8).numpy().reshape(-1)


class _Clock:
    """Wall time of a call."""

    def time(self, call: Callable[[], Any]) -> Callable[[], float]:
        begin = time.perf_counter()
        kept = call()
        seconds = time.perf_counter() - begin
        del kept
        return lambda: seconds


class _CudaClock:
    """Time on the current stream between two events, with a cold cache, read when all is over.

    Launches queue up behind work enqueued before, as in serving; what waits for the device counts with its wait.
    """

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def time(self, call: Callable[[], Any]) -> Callable[[], float]:
        self._flush.zero_()
        torch.cuda._sleep(HEAD_START_CYCLES)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kept = call()
        end.record()
        del kept

        def seconds() -> float:
            end.synchronize()
            return begin.elapsed_time(end) / 1e3

        return seconds
