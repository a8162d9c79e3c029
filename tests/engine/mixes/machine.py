"""A runner without a model: its logits are a function of all that a token reads through its pages.

Most of a row depends on the last tokens alone, so that drafts on coarse KV are right now and then; a part depends on
every value read, so one wrong page changes the odds of all tokens that follow.
"""

import functools
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvrail.engine.batch.batch import Extras, Feed, SequenceSlice
from kvrail.engine.sampling.draw import DrawParams
from tests.lossless.slotted import SlottedCells
from tests.lossy.machine import LossyCells, kv_of

VOCAB = 320
EOS = 256
POISON = 1 << 40
"""In a cell: KV that is not finite. A token that reads it has NaN as logits."""
AT_EASE = 4
"""Steps between two that break: an engine gives up after three in a row."""

Cells = Any
"""A page's values at [page], one at [page, offset], pages' at [list of them], as in an array [pages, page size]."""


def cells_of(form: str, pages: int, page_size: int, opened: int, seed: int) -> Cells:
    """Empty pages of a form: plain, closed without loss (few find no spare unit), closed with loss."""
    if form == "plain":
        return np.full((pages, page_size), -1, dtype=np.int64)
    if form == "lossless":
        return SlottedCells(pages, opened, page_size, random.Random(seed).choice([0.0, 0.02, 0.3]), seed)
    return LossyCells(pages, opened, seed)


def value_of(form: str, read: Sequence[int], token: int) -> int:
    """KV of a token. Where pages lose bits it depends on what the token read, elsewhere a wrong cell shows anyway."""
    return kv_of(read, token) if form == "lossy" else token


def kv_of_prompt(form: str, prompt: Sequence[int]) -> list[int]:
    """KV that another worker sends."""
    read: list[int] = []
    for token in prompt:
        read.append(value_of(form, read, token))
    return read


@functools.lru_cache(1 << 15)
def logits_of(read: tuple[int, ...]) -> np.ndarray:
    """float32 [VOCAB]: behind these values of KV."""
    values = np.asarray(read, dtype=np.int64)
    if (values == POISON).any():
        return np.full(VOCAB, np.nan, dtype=np.float32)
    row = 3 * _noise(values[-4:]) + 0.8 * _noise(values)
    row[EOS] += 0.5
    return row


def _noise(values: np.ndarray) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(zlib.crc32(values.tobytes()))).standard_normal(VOCAB, dtype=np.float32)


class Trouble:
    """What happens while a step computes: other threads do something, and now and then it breaks.

    breaks: how likely. steps, broken: how many there were.
    """

    def __init__(self, breaks: float, seed: int) -> None:
        self.steps = self.broken = 0
        self.meanwhile: Callable[[], None] = lambda: None
        self._breaks, self._rng, self._last_broken = breaks, random.Random(seed), 0

    def come(self) -> None:
        """Raises RuntimeError if it breaks."""
        self.steps += 1
        self.meanwhile()
        if self._rng.random() < self._breaks and self.steps - self._last_broken > AT_EASE:
            self._last_broken, self.broken = self.steps, self.broken + 1
            raise RuntimeError("a broken step")


class TokenMachine:
    """Stands for ModelRunner. ahead: the engine enqueues a step before the draws of the one before are known.

    most_tokens, most_slices: what a step may hold.
    """

    def __init__(
        self,
        form: str,
        cells: Cells,
        page_size: int,
        trouble: Trouble,
        *,
        ahead: bool,
        most_tokens: int,
        most_slices: int,
    ) -> None:
        self.form, self.cells, self.page_size, self.trouble = form, cells, page_size, trouble
        self.launches_async = ahead
        self.extras = Extras()
        self._most_tokens, self._most_slices = most_tokens, most_slices

    def execute(
        self,
        slices: Sequence[SequenceSlice],
        on_layer: Callable[[int], None] | None = None,
        feed: Feed | None = None,
        draws: Sequence[DrawParams] = (),
    ) -> torch.Tensor:
        """Logits, float32 [rows, VOCAB]. Raises AssertionError for a step that is too large or reads what is not there.

        It draws nothing by itself.
        """
        assert len(slices) <= self._most_slices and sum(len(piece.token_ids) for piece in slices) <= self._most_tokens
        tokens = [list(piece.token_ids) for piece in slices]
        for number, row in enumerate(feed.rows if feed is not None else ()):
            if feed is not None and row >= 0:
                tokens[number] = [max(0, int(feed.tokens[row]))]
        for piece in slices:
            if piece.copied_page is not None:
                self.cells[piece.page_table[piece.start // self.page_size]] = self.cells[piece.copied_page]
        rows = [row for piece, new in zip(slices, tokens, strict=True) for row in self._compute(piece, new)]
        if on_layer is not None:
            on_layer(0)
        self.trouble.come()
        return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, VOCAB)

    def _compute(self, piece: SequenceSlice, tokens: Sequence[int]) -> list[np.ndarray]:
        read, rows = self._read(piece), []
        assert -1 not in read and -2 not in read, "KV was read that was never written, or has been freed"
        for position, token in enumerate(tokens, start=piece.start):
            read.append(value_of(self.form, read, token))
            self.cells[piece.page_table[position // self.page_size], position % self.page_size] = read[-1]
            if position >= piece.start + len(tokens) - piece.num_logits:
                rows.append(logits_of(tuple(read)))
        return rows

    def _read(self, piece: SequenceSlice) -> list[int]:
        pages = list(piece.page_table[: -(-piece.start // self.page_size)])
        if self.form != "lossy":
            return [int(value) for value in self.cells[pages].reshape(-1)[: piece.start]] if pages else []
        read: list[int] = self.cells.read(piece)
        return read
