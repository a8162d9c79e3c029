"""How the integers of one step reach the attention operator: as two flat tensors.

A tensor for each of them would give torch.compile a dozen dimensions to specialise on (an axis of length 0 or 1 is a
case of its own); two that are never that short give it none.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

_ALIGN = 4
"""Sections begin at multiples of 16 bytes, so that kernels may load wide."""

BLOCK_FIELDS = 4
"""Integers of a block of queries: see StepMeta.blocks."""


@dataclass(frozen=True, slots=True)
class StepMeta:
    """The integers of one step, unpacked: arrays before, tensors after the way through the model.

    slots: int32 [tokens], where each new token's KV goes: page * page_size + offset. On CUDA -1 where nothing is to be
    stored by way of it: padding, and sequences with one new token, whose attention stores it.
    page_tables: int32 [sequences, width]; sequences with one new token first.
    closed_tokens: [sequences], tokens in closed pages (engine.kv.lossless), whole pages from the sequence's beginning;
    their entries of page_tables number closed pages, the others plain ones. int64 on a CPU, int32 on CUDA; None: all
    pages are plain.
    plan, on a CPU: (new tokens, tokens in all) a sequence. shared, likewise: what the first layer of each window has
    worked out for the others.
    The rest serves CUDA, where every length is read from device memory, so that a captured step serves any lengths.
    kv_lens: int32 [rows], of leading sequences with one new token: tokens in all, the new one included; 0: the row is
    padding, or the token of a sequence with more. counters: int32 [rows * kv_heads], zeros between two layers.
    blocks: int32 [blocks, 4], queries of sequences with more than one new token, in any order: (first packed token, how
    many, the first one's position in its sequence, the sequence's page table or -1: padding, which gets zeros). A block
    of no tokens is passed over.
    """

    slots: Any
    page_tables: Any
    plan: list[tuple[int, int]] = field(default_factory=list)
    kv_lens: Any = None
    counters: Any = None
    blocks: Any = None
    closed_tokens: Any = None
    shared: dict[int, Any] = field(default_factory=dict, init=False)


@dataclass(frozen=True, slots=True)
class Extents:
    """The lengths of a CUDA step's sections: see StepMeta for what they hold."""

    tokens: int
    sequences: int
    width: int
    rows: int
    blocks: int
    kv_heads: int

    def sizes(self) -> list[int]:
        """Integers in each section: slots, page_tables, kv_lens, counters, blocks."""
        return [
            self.tokens,
            self.sequences * self.width,
            self.rows,
            self.rows * self.kv_heads,
            self.blocks * BLOCK_FIELDS,
        ]

    def plan(self) -> torch.Tensor:
        """What stays on the host: int64 [6] on the CPU."""
        return torch.tensor([self.tokens, self.sequences, self.width, self.rows, self.blocks, self.kv_heads])

    def words(self) -> int:
        """Integers of all sections, room between them included; never so few that torch.compile sees a special case."""
        return max(section_starts(self.sizes())[-1], 2)

    def sections(self, data: Any) -> StepMeta:
        """Views of `data`, int32 [words], an array or a tensor."""
        sizes = self.sizes()
        slots, tables, kv_lens, counters, blocks = (
            data[begin : begin + size] for begin, size in zip(section_starts(sizes), sizes, strict=False)
        )
        return StepMeta(
            slots=slots,
            page_tables=tables.reshape(self.sequences, self.width),
            kv_lens=kv_lens,
            counters=counters,
            blocks=blocks.reshape(self.blocks, BLOCK_FIELDS),
        )


def decode(data: torch.Tensor, plan: torch.Tensor) -> StepMeta:
    """The sections of a step on CUDA, views of `data`; plan: what Extents.plan gives."""
    return Extents(*plan.tolist()).sections(data)


def section_starts(sizes: list[int]) -> list[int]:
    """Where each section begins, and last where the data ends."""
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + -(-size // _ALIGN) * _ALIGN)
    return begins
