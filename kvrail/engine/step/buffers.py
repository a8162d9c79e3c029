"""The integers of a step of fixed size: written on the host, read on the device at addresses that never change."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvrail.engine.attention.meta import BLOCK_FIELDS, Extents, StepMeta
from kvrail.engine.batch.batch import Feed
from kvrail.engine.batch.inputs import fill_meta, fill_shares
from kvrail.engine.batch.packing import PackedStep, idle_blocks, most_blocks, query_blocks
from kvrail.engine.sampling.draw import WORDS, DrawParams, draw_words

_ALIGN = 16


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of a step that is captured: the most that it holds.

    logit_rows: rows of logits; 0: one for every token. queries: most queries of a block (see attention.meta); 0: no
    sequence has more than one new token. draws: rows of logits from which the step draws by itself. programs:
    how many compute sequences with one new token at once.
    """

    extents: Extents
    logit_rows: int = 0
    queries: int = 0
    draws: int = 0
    programs: int = 1

    def starts(self) -> list[int]:
        """Where each of `Sections` begins in a buffer, and where it ends."""
        tokens, rows, wide = self.extents.tokens, self.extents.rows, 8 * self.logit_rows
        begins = [0]
        for count in (8 * tokens, 8 * tokens, wide, 8 * rows, 4 * WORDS * self.draws, 4 * self.extents.words()):
            begins.append(begins[-1] + -(-count // _ALIGN) * _ALIGN)
        return begins


def decode_size(
    rows: int, width: int, kv_heads: int, tokens: int = 0, *, closed: bool = False, programs: int = 1
) -> StepSize:
    """At most `rows` sequences with one new token each and page tables of `width` pages, padded to `tokens`."""
    return StepSize(Extents(max(rows, tokens), rows, width, rows, 0, kv_heads, closed), draws=rows, programs=programs)


def mixed_size(
    tokens: int,
    sequences: int,
    width: int,
    kv_heads: int,
    logit_rows: int,
    queries: int,
    *,
    closed: bool = False,
    programs: int = 1,
) -> StepSize:
    """At most `tokens` new tokens of at most `sequences` sequences, each with one or more of them."""
    rows, blocks = min(tokens, sequences), most_blocks(tokens, sequences, queries)
    extents = Extents(tokens, sequences, width, rows, blocks, kv_heads, closed)
    return StepSize(extents, min(tokens, logit_rows), queries, programs=programs)


@dataclass(frozen=True, slots=True, eq=False)
class Sections:
    """Parts of a buffer.

    token_ids, positions: int64 [tokens]; logit_rows: int64; fed_rows: int64 [rows], see batch.Feed, or -1: the host
    knows the token; draws: int32 [draws, WORDS], see draw.draw_words; data: int32, see attention.meta.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    fed_rows: torch.Tensor
    draws: torch.Tensor
    data: torch.Tensor


def sections(buffer: torch.Tensor, size: StepSize) -> Sections:
    """Views of `buffer`, uint8 [size.starts()[-1]]."""
    tokens, rows, begins = size.extents.tokens, size.extents.rows, size.starts()

    def wide(number: int, count: int) -> torch.Tensor:
        return buffer[begins[number] : begins[number] + 8 * count].view(torch.int64)

    draws = buffer[begins[4] : begins[4] + 4 * WORDS * size.draws].view(torch.int32).view(-1, WORDS)
    data = buffer[begins[5] : begins[5] + 4 * size.extents.words()].view(torch.int32)
    return Sections(wide(0, tokens), wide(1, tokens), wide(2, size.logit_rows), wide(3, rows), draws, data)


class StepBuffer:
    """One step of fixed size, on the host (pinned for CUDA) and on the device; `fill`, then `send`."""

    def __init__(self, size: StepSize, device: torch.device) -> None:
        self.size = size
        self.host = torch.zeros(size.starts()[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        here = sections(self.host, size)
        self._token_ids: npt.NDArray[np.int64] = here.token_ids.numpy()
        self._positions: npt.NDArray[np.int64] = here.positions.numpy()
        self._logit_rows: npt.NDArray[np.int64] = here.logit_rows.numpy()
        self._fed_rows: npt.NDArray[np.int64] = here.fed_rows.numpy()
        self._fed_rows[:] = -1
        self._draws: npt.NDArray[np.int32] = here.draws.numpy()
        self._random = False  # whether some of `_draws` are not greedy
        self._meta: StepMeta = size.extents.sections(here.data.numpy())
        self._meta.slots[:] = -1
        fill_shares(self._meta, size.programs)
        if size.queries:
            idle = idle_blocks(0, size.extents.tokens, size.queries)
            self._meta.blocks[: len(idle)] = idle
        self.device = self.host.to(device, copy=True)
        self.there = sections(self.device, size)

    def fill(self, packed: PackedStep, feed: Feed | None = None, draws: Sequence[DrawParams] = ()) -> None:
        """Write a step that fits. Token ids, positions and rows behind its own keep their values, which are never read.

        draws: parameters of the rows' draws; rows without any draw greedily. A size that draws nothing ignores them.
        """
        tokens, size = len(packed.token_ids), self.size
        self._token_ids[:tokens] = packed.token_ids
        self._positions[:tokens] = packed.positions
        if size.logit_rows:
            self._logit_rows[: len(packed.logit_rows)] = packed.logit_rows
        self._fed_rows[:tokens] = -1
        if feed is not None:
            self._fed_rows[: len(feed.rows)] = feed.rows
        if size.draws:
            self._fill_draws(draws)
        blocks = np.zeros((0, BLOCK_FIELDS), np.int64)
        if size.queries:
            blocks = query_blocks(packed, size.queries, size.extents.tokens)
        fill_meta(self._meta, packed, blocks, size.programs)

    def send(self) -> None:
        """Enqueue the copy to the device."""
        self.device.copy_(self.host, non_blocking=True)

    def _fill_draws(self, draws: Sequence[DrawParams]) -> None:
        random = any(each.temperature for each in draws)
        if random or self._random:
            self._draws[:] = 0
            self._draws[: len(draws)] = draw_words(draws) if random else 0
        self._random = random
