"""From slices to the arrays of one step, in numpy: no tensor is made per sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrail.engine.batch.batch import SequenceSlice

Ints = npt.NDArray[np.int64]


class PageForms(Protocol):
    """Where pages lie whose form can change. lead: pages at a sequence's beginning that are always read open."""

    lead: int

    def find(self, pages: Ints) -> tuple[Ints, Ints]:
        """The open slots and the closed slots of `pages`, of any shape; less than 0 where a page has none."""
        ...


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Arrays of one step, int64, sequences with one new token first.

    token_ids, positions, slots: [tokens]; page_tables: [sequences, width], unused entries 0; plan: [sequences, 2], new
    tokens and tokens in all; logit_rows: [rows], packed indices of the tokens whose logits are wanted, in the order of
    the slices; decodes: how many leading sequences have one new token. closed_tokens: [sequences], see
    attention.meta.StepMeta; None: all pages are plain.
    """

    token_ids: Ints
    positions: Ints
    slots: Ints
    page_tables: Ints
    plan: Ints
    logit_rows: Ints
    decodes: int
    closed_tokens: Ints | None = None


def pack(slices: Sequence[SequenceSlice], page_size: int, forms: PageForms | None = None) -> PackedStep:
    """Lay `slices` out on one axis. forms: where pages lie; None: where they say."""
    order = sorted(range(len(slices)), key=lambda i: len(slices[i].token_ids) > 1)
    ordered = [slices[i] for i in order]
    new = np.fromiter((len(s.token_ids) for s in ordered), np.int64, len(ordered))
    start = np.fromiter((s.start for s in ordered), np.int64, len(ordered))
    total = start + new
    ends = np.cumsum(new)
    owner = np.repeat(np.arange(len(ordered)), new)
    positions = np.arange(ends[-1]) + np.repeat(start - (ends - new), new)
    tables = _page_tables(ordered, -(-total // page_size))
    closed = None
    if forms is not None:
        asked = np.fromiter((-1 if s.closed is None else s.closed for s in ordered), np.int64, len(ordered))
        tables, closed = _in_slots(tables, forms, asked, -(-total // page_size))
        if (closed * page_size > start).any():
            raise RuntimeError("a closed page is to be written")
        closed *= page_size
    slots = tables[owner, positions // page_size] * page_size + positions % page_size
    end_of = np.empty(len(slices), np.int64)
    end_of[order] = ends
    return PackedStep(
        token_ids=np.fromiter(chain.from_iterable(s.token_ids for s in ordered), np.int64, int(ends[-1])),
        positions=positions,
        slots=slots,
        page_tables=tables,
        plan=np.stack([new, total], axis=1),
        logit_rows=_last_tokens(end_of, np.fromiter((s.num_logits for s in slices), np.int64, len(slices))),
        decodes=int((new == 1).sum()),
        closed_tokens=closed,
    )


def _last_tokens(ends: Ints, counts: Ints) -> Ints:
    """The last `counts[i]` indices before `ends[i]`, for each i in order."""
    rows = np.cumsum(counts)
    return np.arange(rows[-1]) + np.repeat(ends - rows, counts)


def _page_tables(slices: Sequence[SequenceSlice], used: Ints) -> Ints:
    """Each sequence's used pages, rows padded with page 0."""
    tables = np.zeros((len(slices), int(used.max())), np.int64)
    flat = chain.from_iterable(s.page_table[:n] for s, n in zip(slices, used.tolist(), strict=True))
    filled = np.arange(tables.shape[1]) < used[:, None]
    tables[filled] = np.fromiter(flat, np.int64, int(used.sum()))
    return tables


def _in_slots(tables: Ints, forms: PageForms, asked: Ints, used: Ints) -> tuple[Ints, Ints]:
    """Page tables of slots, and how many pages of each sequence come before the end of its closed ones; 0: none is.

    asked: [sequences], see SequenceSlice.closed, -1 for None; used: [sequences], pages in use.
    """
    number = np.arange(tables.shape[1])
    within = number < used[:, None]
    opened, closed = forms.find(tables)
    end = forms.lead + asked[:, None]
    read_closed = within & np.where(asked[:, None] < 0, opened < 0, (number >= forms.lead) & (number < end))
    slots = np.where(within, np.where(read_closed, closed, opened), 0)
    if (slots < 0).any():
        row, column = np.argwhere(slots < 0)[0]
        form = "closed" if read_closed[row, column] else "open"
        raise RuntimeError(f"page {tables[row, column]} is to be read {form} and has no {form} slot")
    count = read_closed.sum(axis=1)
    ends = np.where(count > 0, forms.lead + count, 0)
    if (read_closed != (number >= forms.lead) & (number < ends[:, None])).any():
        raise RuntimeError(f"a closed page lies behind an open one, or among the first {forms.lead}")
    return slots, ends


def query_blocks(packed: PackedStep, most: int, padded: int = 0) -> Ints:
    """Blocks of the queries of sequences with more than one new token: [blocks, 4], see attention.meta.StepMeta.blocks.

    most: queries of a block. Blocks that see the most tokens come first, since they take longest. Tokens behind the
    step's own, up to `padded`, are padding, in blocks of their own.
    """
    new, total = packed.plan[packed.decodes :].T
    counts = -(-new // most)
    owner = np.repeat(np.arange(len(new)), counts)
    begin = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    start = packed.decodes + np.cumsum(new) - new
    size = np.minimum(new[owner] - begin, most)
    position = (total - new)[owner] + begin
    blocks = np.stack([start[owner] + begin, size, position, packed.decodes + owner], axis=1)
    blocks = blocks[np.argsort(-(position + size), kind="stable")]
    return np.concatenate([blocks, idle_blocks(len(packed.token_ids), padded, most)])


def idle_blocks(begin: int, end: int, most: int) -> Ints:
    """Blocks for padding, from token `begin` to `end` - 1."""
    first = np.arange(begin, end, most)
    return np.stack([first, np.minimum(end - first, most), np.zeros_like(first), np.full_like(first, -1)], axis=1)


def most_blocks(tokens: int, sequences: int, most: int) -> int:
    """The most blocks that `query_blocks` makes of at most `sequences` sequences, padded to `tokens`."""
    several = min(sequences, tokens // 2)
    return tokens // most + several + 1
