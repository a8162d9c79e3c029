"""What codecs on a CPU share: pages as bytes, work on several threads, and payloads that are there already."""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch

from kvrail.codec.base import CodecError, EncodingStats, PagedBlock, Payload
from kvrail.codec.core.arrays import Bytes, Ints

Result = TypeVar("Result")

MAX_THREADS = min(4, torch.get_num_threads())
BYTES_PER_THREAD = 1 << 20
"""Raw bytes for which another thread is worth its start, some 50 us."""


@dataclass(frozen=True, slots=True)
class CpuEncoding:
    """Payloads, one a stage, that are there already."""

    payloads: list[memoryview]
    totals: EncodingStats

    def stages(self) -> list[Payload]:
        """The payloads."""
        return list(self.payloads)

    def stats(self) -> EncodingStats:
        """What it came to."""
        return self.totals


def usable_cores(most: int) -> int:
    """Cores that this process may use, at most `most`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(most, cores)


def byte_pools(pages: PagedBlock) -> list[Bytes]:
    """The pool's tensors, cut to the layers chosen, as [layers, pool pages, bytes of a page]; views.

    Raises CodecError where one is not contiguous.
    """
    pools = pages.layer_pools()
    for pool in pools:
        if not pool.is_contiguous():
            raise CodecError(f"a pool's tensor of shape {tuple(pool.shape)} is not contiguous; make it so first")
    return [pool.flatten(2).view(torch.uint8).numpy() for pool in pools]


def gather(pool: Bytes, page_ids: Ints, target: Bytes, offset: int) -> int:
    """Copy pages to `offset` of `target`; the end of what was written."""
    shape = (pool.shape[0], page_ids.size, pool.shape[2])
    end = offset + int(np.prod(shape))
    np.take(pool, page_ids, axis=1, out=target[offset:end].reshape(shape), mode="clip")  # raise would copy twice
    return end


def scatter(pool: Bytes, page_ids: Ints, source: Bytes) -> None:
    """Write contiguous pages to their places."""
    pool[:, page_ids] = source.reshape(pool.shape[0], page_ids.size, pool.shape[2])


def on_threads(work: Callable[[int, int], Result], count: int, raw_bytes: int) -> list[Result]:
    """Call `work` for ranges of `count` things, in order, on this thread and, where they are large, on others.

    raw_bytes: of all of them, uncompressed.
    """
    wanted = max(1, min(raw_bytes // BYTES_PER_THREAD, MAX_THREADS, count))
    ends = [count * (number + 1) // wanted for number in range(wanted)]
    others = [_threads().submit(work, first, last) for first, last in pairwise(ends)]
    return [work(0, ends[0]), *(other.result() for other in others)]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """The helpers of all threads that encode or decode."""
    return ThreadPoolExecutor(max(1, MAX_THREADS - 1), thread_name_prefix="codec")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of its parent's threads
