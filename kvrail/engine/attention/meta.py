"""How the integers of one step reach the attention operator: as two flat tensors.

A tensor for each of them would give torch.compile a dozen dimensions to specialise on (an axis of length 0 or 1 is a
case of its own); two that are never that short give it none.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_HEADER = 5
_ALIGN = 4
"""Sections begin at multiples of 16 bytes, so that kernels may load wide."""


@dataclass(frozen=True, slots=True)
class StepMeta:
    """The integers of one step, unpacked: arrays before, tensors after the way through the model.

    plan: (new tokens, tokens in all) a sequence; sequences with one new token first.
    slots: int32 [tokens], where each new token's KV goes: page * page_size + offset.
    kv_lens: int32 [sequences], tokens in all, the new ones included. page_tables: int32 [sequences, width].
    shared: on a CPU, what the first layer of each window has worked out for the others.
    The rest serves CUDA. counters: int32 [sequences with one new token * kv_heads], zeros between two layers.
    Of the sequences with more than one new token:
    cu_queries, cu_tokens: int32 [such sequences + 1], running sums of their new tokens and of all their tokens.
    gather_slots: int32 [sum of all their tokens], slots of all their tokens in order; empty where all of them begin
    at token 0 and the pages keep the computed type, so that new keys and values are all there is.
    """

    plan: list[tuple[int, int]]
    slots: Any
    kv_lens: Any
    page_tables: Any
    cu_queries: Any
    cu_tokens: Any
    gather_slots: Any
    counters: Any
    shared: dict[int, Any] = field(default_factory=dict, init=False)

    @property
    def decodes(self) -> int:
        """How many leading sequences have one new token."""
        return next((i for i, (new, _) in enumerate(self.plan) if new > 1), len(self.plan))


def encode(meta: StepMeta) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """(data, plan): data goes to the device, plan stays on the host."""
    arrays = (
        meta.slots,
        meta.kv_lens,
        meta.page_tables,
        meta.cu_queries,
        meta.cu_tokens,
        meta.gather_slots,
        meta.counters,
    )
    begins = section_starts([array.size for array in arrays])
    data = np.zeros(max(begins[-1], 2), np.int32)
    for array, begin in zip(arrays, begins, strict=False):
        data[begin : begin + array.size] = array.reshape(-1)
    header = [len(meta.plan), len(meta.slots), meta.page_tables.shape[1], len(meta.gather_slots), len(meta.counters)]
    return data, np.concatenate([header, np.asarray(meta.plan, np.int64).reshape(-1)])


def decode(data: torch.Tensor, plan: torch.Tensor) -> StepMeta:
    """What `encode` packed; tensors are views of `data`."""
    numbers = plan.tolist()
    sequences, tokens, width, gathered, counters = numbers[:_HEADER]
    pairs = list(zip(numbers[_HEADER::2], numbers[_HEADER + 1 :: 2], strict=True))
    sums = 1 + sum(new > 1 for new, _ in pairs)
    sizes = [tokens, sequences, sequences * width, sums, sums, gathered, counters]
    sections = [data[begin : begin + size] for begin, size in zip(section_starts(sizes), sizes, strict=False)]
    sections[2] = sections[2].view(sequences, width)
    return StepMeta(pairs, *sections)


def section_starts(sizes: list[int]) -> list[int]:
    """Where each section begins, and last where the data ends."""
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + -(-size // _ALIGN) * _ALIGN)
    return begins
