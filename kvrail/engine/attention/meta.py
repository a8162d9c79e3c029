"""The integers of one step on their way to the attention operator: two flat tensors.

One tensor for each array would give torch.compile a dozen dimensions to specialise on: it treats an axis of length 0 or
1 as a special case. Two tensors that are never that short give it none.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from kvrail.engine.attention.shares import SHARE_FIELDS, room_for

_ALIGN = 4
"""Sections begin at multiples of 16 bytes, so that kernels can use wide loads."""

BLOCK_FIELDS = 4
"""Integers of a block of queries: see StepMeta.blocks."""


@dataclass(frozen=True, slots=True)
class StepMeta:
    """The integers of one step, unpacked: arrays on the host, tensors in the model.

    slots: int32 [tokens], where each new token's KV goes: page * page_size + offset. On CUDA -1 for padding and for
    sequences with one new token, which the decode kernel stores.
    page_tables: int32 [sequences, width]; sequences with one new token first.
    closed_tokens: [sequences], where the sequence's closed pages end, in tokens; 0: it has none. They begin behind the
    form's `lead` tokens (kv.formats.LayerPages.closed), which lie in open pages, and are whole; their entries of
    page_tables number closed pages, the others plain ones. int64 on a CPU, int32 on CUDA; None: all pages are plain.

        0            lead            closed_tokens            tokens in all
        |    open     |     closed         |         open          |

    plan, on a CPU: (new tokens, tokens in all) of each sequence. shared, on a CPU: by window, the units that the first
    layer has made for all.
    The rest is for CUDA, where every length is read from device memory, so that a captured step serves any lengths.
    kv_lens: int32 [rows], tokens of each leading sequence with one new token, the new one included; 0: the row is
    padding, or belongs to a sequence with more new tokens. shares: int32 [shares, 3], the programs of a KV head, each
    with its part of one of these sequences: (row, number of the part, how many there are); row -1: it has nothing to
    do. Each row has one at least. counters: int32 [rows * kv_heads], zeros between two layers.
    blocks: int32 [blocks, 4], queries of sequences with more than one new token, in any order: (first packed token,
    number of tokens, the first one's position in its sequence, the sequence's page table; -1: padding, which gets
    zeros). Blocks without tokens are skipped.
    """

    slots: Any
    page_tables: Any
    plan: list[tuple[int, int]] = field(default_factory=list)
    kv_lens: Any = None
    shares: Any = None
    counters: Any = None
    blocks: Any = None
    closed_tokens: Any = None
    shared: dict[int, Any] = field(default_factory=dict, init=False)


@dataclass(frozen=True, slots=True)
class Extents:
    """The lengths of a CUDA step's sections; StepMeta says what these hold. closed: whether pages can be closed."""

    tokens: int
    sequences: int
    width: int
    rows: int
    blocks: int
    kv_heads: int
    closed: bool = False

    def sizes(self) -> list[int]:
        """Integers in each section: slots, page_tables, kv_lens, shares, counters, blocks, closed_tokens."""
        return [
            self.tokens,
            self.sequences * self.width,
            self.rows,
            room_for(self.rows, self.kv_heads) * SHARE_FIELDS,
            self.rows * self.kv_heads,
            self.blocks * BLOCK_FIELDS,
            self.sequences * self.closed,
        ]

    def plan(self) -> torch.Tensor:
        """The lengths as a tensor on the host: int64 [7]."""
        lengths = [self.tokens, self.sequences, self.width, self.rows, self.blocks, self.kv_heads]
        return torch.tensor([*lengths, int(self.closed)])

    def words(self) -> int:
        """Integers of all sections and the gaps between them; at least 2: torch.compile specialises on 0 and 1."""
        return max(section_starts(self.sizes())[-1], 2)

    def sections(self, data: Any) -> StepMeta:
        """Views of `data`, int32 [words], an array or a tensor."""
        sizes = self.sizes()
        slots, tables, kv_lens, shares, counters, blocks, closed_tokens = (
            data[begin : begin + size] for begin, size in zip(section_starts(sizes), sizes, strict=False)
        )
        return StepMeta(
            slots=slots,
            page_tables=tables.reshape(self.sequences, self.width),
            kv_lens=kv_lens,
            shares=shares.reshape(-1, SHARE_FIELDS),
            counters=counters,
            blocks=blocks.reshape(self.blocks, BLOCK_FIELDS),
            closed_tokens=closed_tokens if self.closed else None,
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
